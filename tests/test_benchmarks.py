"""Benchmarks and checks as a user runs them, to their last line, at the smallest sizes."""

import importlib.util

import jax
import pytest

from tests import commands
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import hf

home, chat = commands.home, commands.chat
run, succeed, error = commands.run, commands.succeed, commands.error
tiny_run, found = commands.tiny_run, commands.found

COUNTED = ("differing_tokens", "near_ties")


@pytest.fixture(scope="module")
def drafter(home):
  """The folder of a random drafter of the tiny policy."""
  config = drafter_lib.of_target(commands.COUNTDOWN, "eagle2")
  init = jax.jit(lambda key: drafter_lib.init_params(config, key))
  drafter_files.save(home / "random_drafter", config, init(jax.random.key(1)))
  return home / "random_drafter"


@pytest.mark.slow
def test_rollouts_are_measured(home, chat):
  """Tables of speculation by live batch, of steps, of schedules, of switching it on."""
  result = found(
    home,
    "bench.rollout",
    *chat,
    "--drafter=eagle2",
    "--only=speculation,steps,traces,switch",
    "--strategies=2_1_3",
    "--live=1",
    "--tokens=8",
    "--lengths=64",
    "--requests=2",
    "--repeats=1",
    f"--workdir={home / 'bench_rollout'}",
  )
  assert result["differing_tokens"] == result["near_ties"] == 0
  assert result["break_even_live_batch"] in (0, 1)
  (cell,) = result["by_live_batch"].values()
  assert cell["strategy"] == "2_1_3" and cell["speedup"] > 0
  assert cell["mean_acceptance_length"] >= 1
  traced = sum(trace["total_tokens"] for trace in result["traces"].values())
  assert result["total_tokens"] == traced + 2 * 8
  assert set(result["steps"]) == set(result["by_live_batch"]) == {"1"}
  assert set(result["steps"]["1"]["step_ms"]) == {"off", "2_1_3"}
  assert result["switch"]["plain_steps"] > 0


@pytest.mark.slow
def test_spot_training_is_measured(home):
  """Pairs of rollouts, checkpoints, packing; sizes that the config leaves open."""
  config = tiny_run(home, *commands.DRAFTING.items(), ("rollout.slots", None))
  result = found(home, "bench.spot", *config, "--pairs=2")
  assert result["pairs"] == 2
  assert 0 <= result["idle_share"] <= 1 and 0 <= result["harvested_share"]
  assert result["checkpoint"]["full_s"] > 0
  assert {"packed", "padded", "ratio"} == set(result["packing"])
  assert "give --drafter" in error(run(home, "bench.spot", *tiny_run(home)))


@pytest.mark.slow
def test_whole_steps_are_compared_side_by_side(home):
  """Responses follow a trace; a drafter trains, and requests move between slices."""
  result = found(
    home,
    "bench.step",
    *tiny_run(home, *commands.DRAFTING.items()),
    "--sides=plain,plain+rebalance,ngram_3,tlt+rebalance",
    *("--steps=2", "--warm_up=1", "--targets=default", "--lengths=log-normal"),
    f"--workdir={home / 'bench_step'}",
  )
  assert result["workload"]["batch"] == {"prompts": 4, "responses": 2, "most_prompts": 0}
  default = result["targets"]["default"]
  assert default["identical"] and default["near_ties"] == 0 and default["steps"] == 2
  assert default["plain"] in ("plain", "plain+rebalance")  # the faster one
  assert default["sides"][default["plain"]]["speedup_step"] == 1
  assert default["sides"]["ngram_3"]["mean_acceptance_length"] >= 1
  assert default["shown"] == "tlt+rebalance" and default["mean_acceptance_length"] >= 1
  assert default["harvested_share"] >= 0 and default["busy_overhead"] is None


@pytest.mark.slow
def test_a_wide_target_is_made_when_it_is_asked_for(home, drafter):
  """And kept for the next time."""
  workdir = home / "bench_step"
  args = [*tiny_run(home, ("drafter", drafter)), "--sides=plain", "--targets=wide"]
  sizes = ["--steps=1", "--warm_up=1", f"--workdir={workdir}"]
  (wide,) = found(home, "bench.step", *args, *sizes)["targets"].values()
  assert wide["shown"] == "plain" and wide["mean_acceptance_length"] == 1
  (folder,) = workdir.glob("wide_*")
  model = hf.load_config(folder / "policy")
  assert (model.num_layers, model.width) == (2, 3 * commands.COUNTDOWN.width)
  assert (folder / "drafter" / "model.safetensors").is_file()


def test_side_by_side_needs_a_drafter_or_sides_without_one(home):
  message = error(run(home, "bench.step", *tiny_run(home)))
  assert "nothing drafts on side 'frozen'" in message


def test_speculation_is_checked_token_by_token(home, chat):
  """On a file of prompts, which are asked again when there are no more."""
  sizes = ["--strategies=2_1_3", "--tokens=100", "--batch=4"]
  result = found(home, "check_lossless", *chat, "--drafter=eagle2", *sizes)
  assert set(result["strategies"]) == {"2_1_3"}
  assert result["total_tokens"] >= 100
  assert result["differing_tokens"] == 0
  without = run(home, "check_lossless", *tiny_run(home))
  assert "give --drafter" in error(without)


@pytest.mark.slow
def test_a_revision_compiles_to_the_same_programs_as_itself(home):
  args = ["--base=HEAD", "--head=HEAD", "--only=resize"]
  result = found(home, "compare_programs", *args)
  assert result["programs"] == result["identical"] > 4
  message = error(run(home, "compare_programs", "--base=HEAD", "--only=nothing"))
  assert "no plain program called nothing" in message


def test_the_comparison_with_tunix_says_how_to_install_it(home):
  """In one line, where it is not installed."""
  if importlib.util.find_spec("tunix") is None:
    assert "install google-tunix==0.1.7" in error(run(home, "bench.tunix"))
