"""The notebooks of the paper's figures run, and their commands exist."""

import importlib.util

import nbformat
import pytest

from experiments.figures import recipes
from experiments.figures import render
from tests import commands

home = commands.home
NOTEBOOKS = render.notebooks()


def shown(notebook: nbformat.NotebookNode) -> list[tuple]:
  """What each output is, and what it says if it is text."""
  return [
    (output.output_type, *sorted(output.get("data", {})), output.get("text"))
    for cell in notebook.cells
    if cell.cell_type == "code"
    for output in cell.outputs
  ]


@pytest.mark.slow
def test_every_notebook_runs_and_shows_what_is_committed():
  """All in one kernel, each without the variables of the others; pictures by their kind."""
  for path, notebook in zip(NOTEBOOKS, render.executed(NOTEBOOKS), strict=True):
    assert shown(notebook) == shown(nbformat.read(path, as_version=4)), path.name
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("full", [False, True])
def test_every_command_exists(full):
  """Those of the recipes are modules; the data name no others."""
  known = recipes.commands("runs/figures", full)
  used = {name for recipe in recipes.RECIPES.values() for name in recipe.commands}
  assert used == set(known)
  for command in known.values():
    assert importlib.util.find_spec(command.split()[0]), command


@pytest.fixture
def drafting(home) -> list[str]:
  """Arguments of a tiny run that drafts."""
  return commands.tiny_run(home, *commands.DRAFTING.items())


@pytest.mark.slow
def test_counts_on_64_slices_are_those_of_the_simulator(home, drafting):
  """Every chunk of plain decoding and of chains, on 64 devices of one CPU."""
  args = (*drafting, "--config.batch.prompts=32", "--slices=64")
  found = commands.found(home, "figures.counted", *args)
  for side in ("plain", "3_1_4"):
    assert found[side]["equal"] and len(set(found[side]["passes"])) == 1


@pytest.mark.slow
def test_pools_of_programs_are_measured(home, drafting):
  """A naive pool has no fewer programs than buckets have."""
  found = commands.found(home, "figures.pool", *drafting)
  programs = [found[case]["programs"] for case in ("one strategy", "buckets", "naive")]
  assert programs == sorted(programs) and programs[0] > 0


@pytest.mark.slow
def test_a_drafter_is_watched_as_it_trains(home, drafting):
  """Its agreement after each update, step by step."""
  found = commands.found(home, "figures.following", *drafting, "--steps=3")
  assert len(found["agreement"]) == 3 and any(found["agreement"])


@pytest.mark.slow
def test_simulated_rollouts_stand_beside_measured_ones(home, drafting):
  """Of every side, by steps that are timed between."""
  args = ("--steps=2", "--warm_up=1", "--config.rollout.chunk=16")
  found = commands.found(home, "figures.simulated", *drafting, *args)
  assert set(found["sides"]) == {"plain", "frozen", "3_1_4", "8_1_9"}
  assert found["sides"]["plain"]["passes"][0] == found["sides"]["plain"]["passes"][1]
