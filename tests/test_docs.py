"""The documents name what exists, and the journeys in them are as short as they say."""

import collections
import functools
import importlib
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SECTIONS = re.split(r"^## ", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
JOURNEYS = {s.split("\n")[0]: s for s in SECTIONS if s.startswith("The journey")}


def calls(journey: str) -> list[tuple[str, str]]:
  """(file, dotted name in it) of each row of a journey's table."""
  found = re.findall(r"^\| \d+ \| `([\w/]+)\.([\w.]+)` \|", journey, flags=re.MULTILINE)
  return [("tlt_jax/" + file, name) for file, name in found]


def path_of(file: str, name: str) -> str:
  """The module, whichever of the rooms it is in."""
  parts = file.split("/")
  if parts[1] in ("decoding", "speculation", "spot", "rollout"):
    parts.insert(1, "spec_decode")
  return ".".join(parts)


@pytest.mark.parametrize("title", JOURNEYS)
def test_every_call_of_a_journey_exists(title):
  for file, name in calls(JOURNEYS[title]):
    module = importlib.import_module(path_of(file, name))
    assert functools.reduce(getattr, name.split("."), module), (file, name)


@pytest.mark.parametrize("title", JOURNEYS)
def test_a_journey_is_short_and_does_not_come_back_again_and_again(title):
  """At most 16 calls after the first, and no file entered more than twice."""
  steps = calls(JOURNEYS[title])
  assert 10 <= len(steps) - 1 <= 16
  entered = [file for i, (file, _) in enumerate(steps) if not i or steps[i - 1][0] != file]
  assert max(collections.Counter(entered).values()) <= 2


FORK = DOCS.parent / "examples" / "my_fork"


def test_the_document_quotes_the_example():
  """Character for character; `test_fork` and `test_extensions` run it."""
  text = (DOCS / "extending.md").read_text()
  quoted = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL))
  files = {str(path.relative_to(FORK)): path for path in FORK.rglob("*.py")}
  assert files.keys() - quoted.keys() == {"my_package/mtp.py"}
  for name, code in quoted.items():
    assert code == files[name].read_text(), name
    assert len(code.splitlines()) <= 60


def test_the_example_says_what_each_of_its_files_is_for():
  named = re.findall(r"^\| `(\S+)` \|", (FORK / "README.md").read_text(), re.MULTILINE)
  assert sorted(named) == sorted(str(p.relative_to(FORK)) for p in FORK.rglob("*.py"))
