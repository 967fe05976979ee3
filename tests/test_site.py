"""The documents as a site: every link leads somewhere."""

import importlib.util
import re
import subprocess
import sys

import pytest

from tests import commands

NAMES = "results train drafters commands design architecture papers glossary distributed"
MORE = "start extending tunix figures reference changelog contributing"
PAGES = ("", *NAMES.split(), *MORE.split())


@pytest.mark.skipif(
  not all(map(importlib.util.find_spec, ("mkdocs", "material"))),
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
  assert "Policy.rollout" in reference
  assert "Draws a response to each request" in reference


@pytest.fixture(scope="module")
def hooks():
  """What makes the pages; it needs no mkdocs for that."""
  spec = importlib.util.spec_from_file_location("hooks", commands.ROOT / "docs/hooks.py")
  hooks = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(hooks)
  return hooks


def test_every_document_is_in_the_navigation():
  """The pages of the folder, and those that are made of files beside it."""
  nav = (commands.ROOT / "mkdocs.yml").read_text()
  named = set(re.findall(r"^ +- .*: (\w+)\.md$", nav, re.MULTILINE))
  assert named == {path.stem for path in (commands.ROOT / "docs").glob("*.md")} | {
    "index",
    "changelog",
    "contributing",
  }


def test_links_to_what_is_no_page_become_text(hooks):
  """And links between files become links between pages."""

  def mended(text, folder):
    return hooks.mended(text, commands.ROOT / folder)

  assert mended("[a](docs/design.md#x) [b](CITATION.cff)", "") == "[a](design.md#x) b"
  assert mended("[a](../README.md#cite)", "docs") == "[a](index.md#cite)"
  assert mended("[a](https://example.org) [b](#x)", "docs").endswith("org) [b](#x)")
