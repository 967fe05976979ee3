"""The documents as a site: every link leads somewhere."""

import importlib.util
import subprocess
import sys

import pytest

from tests import commands

PAGES = ("", "design", "architecture", "extending", "figures", "reference", "changelog")


@pytest.mark.skipif(
  not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
  reason='needs pip install ".[docs]"',
)
def test_the_site_is_built_with_strict_links(tmp_path):
  """A warning is an error there; the reference has what docstrings say."""
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
  built = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True)
  assert built.returncode == 0, built.stderr[-3000:]
  for page in PAGES:
    assert (tmp_path / page / "index.html").stat().st_size > 5_000
  reference = (tmp_path / "reference" / "index.html").read_text()
  assert "tlt_jax.api.Policy.rollout" in reference
  assert "Draws a response to each request" in reference
