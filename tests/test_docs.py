"""The documents name and quote what exists."""

import functools
import importlib
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
JOURNEYS = {s.split("\n")[0]: s for s in SECTIONS if s.startswith("The journey")}


@pytest.mark.parametrize("title", JOURNEYS)
def test_every_call_of_a_journey_exists(title):
  rows = r"^\| \d+ \| `([\w/]+)\.([\w.]+)` \|"
  found = re.findall(rows, JOURNEYS[title], flags=re.MULTILINE)
  assert found
  for file, name in found:
    parts = file.split("/")
    if parts[0] in ("decoding", "speculation", "spot", "rollout"):
      parts.insert(0, "spec_decode")
    module = importlib.import_module(".".join(["tlt_jax", *parts]))
    assert functools.reduce(getattr, name.split("."), module), (file, name)


def test_the_document_quotes_the_example():
  """Character for character; `test_fork` and `test_extensions` run it."""
  fork = DOCS.parent / "examples" / "my_fork"
  text = (DOCS / "extending.md").read_text()
  quoted = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL))
  files = {str(path.relative_to(fork)): path for path in fork.rglob("*.py")}
  assert files.keys() - quoted.keys() == {"my_package/mtp.py"}
  for name, code in quoted.items():
    assert code == files[name].read_text(), name
    assert len(code.splitlines()) <= 60
