"""The first lines of a log say what runs and what is off, and why."""

import functools
import re
import types

import pytest

from experiments import from_config
from experiments import opening
from experiments import workdirs
from tests import commands
from tests import tiny
from tlt_jax.models import config as model_lib


@functools.cache
def prompts() -> from_config.RunPrompts:
  """Those of the default run, which take seconds to make."""
  return from_config.RunPrompts(commands.read_run("countdown.py", {}))


def said(changes=None, slices=2) -> dict[str, str]:
  """The lines of the default run with other settings, by their first word."""
  run = commands.read_run("countdown.py", changes or {})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(from_config, "make_mesh", lambda *_: tiny.mesh(slices))
    lines = opening.of_run(run, prompts(), workdirs.open("runs/none", run, fork=""))
  assert len(lines) <= 10
  return {line.split()[0].rstrip(":,"): line for line in lines}


def test_the_default_run_says_what_it_does():
  lines = said()
  assert "30 steps, in runs/none, from the beginning" in lines.values()
  assert "Qwen3ForCausalLM of 8.9M parameters, in float32 on 2 x cpu" in lines["policy"]
  assert "grpo_gae, for the reward tlt_jax.tasks.countdown.score" in lines["trained"]
  assert "'\\n' (23; generation_config.json" in lines["responses"]
  assert "4 prompts of up to 32 tokens x 8 responses of up to 1,024" in lines["a"]
  assert lines["prompts"].count("tlt_jax.tasks.countdown.Problems") == 2
  assert "up to 4 live: off or 3_1_4; up to 16 live: off or 1_1_2" in lines["decoding"]
  assert (
    "a new eagle2 of 868,672 parameters, random at first; trains in idle slices"
    in (lines["drafter"])
  )
  assert "every 5 steps a rollout plainly and with the first drafter" in lines["gain"]


NGRAMS = "up to 4 live: off or ngram_3 or 3_1_4"


@pytest.mark.parametrize(
  ("line", "changes", "slices", "text"),
  [
    ("decoding", {"drafter": ""}, 2, "plainly, .* 3_1_4, 1_1_2 of strategies need a dr"),
    ("drafter", {"drafter": ""}, 2, "none, and so none trains"),
    ("decoding", {"strategies": "up to 4 live: off"}, 2, 'plainly, .* none but "off"'),
    ("decoding", {"strategies": "", "drafter": ""}, 2, "plainly, .* strategies is empty"),
    ("decoding", {"strategies": NGRAMS, "drafter": ""}, 2, "not 3_1_4: no drafter"),
    ("drafter", {"strategies": "up to 4 live: ngram_3"}, 2, "which no strategy uses; "),
    ("drafter", {"spot.train": False}, 2, "trains not at all: spot.train is off"),
    ("drafter", {"spot.learning_rate": 0.0}, 2, "to no effect"),
    ("drafter", {"spot.max_batch": 1}, 2, "trains after .*; not in idle .* below 2 slots"),
    ("drafter", {}, 1, "trains after rollouts .*; not in idle slices: the only slice is"),
    ("drafter", {"spot.after_rollout_share": 0.0}, 1, "only slice.*; not after rollouts"),
    ("drafter", {"spot.after_rollout_share": 0.0}, 2, "trains in idle .*; not after"),
    ("gain", {"compare.every": 0}, 2, "not measured; compare.every=5 repeats"),
    ("gain", {"spot.train": False}, 2, "a rollout plainly again"),
    ("prompts", {"evaluation.every": 0}, 2, "asked at the end only: 64 of"),
  ],
)
def test_what_is_off_is_said_with_its_reason(line, changes, slices, text):
  found = said(changes, slices)[line]
  assert re.search(text, found), found


def test_float32_is_warned_of_where_it_is_slow(caplog, tmp_path, monkeypatch):
  """On a GPU; not on a CPU, nor in bfloat16."""
  gpu = types.SimpleNamespace(platform="gpu", device_kind="H100")
  for devices, dtype, warns in (
    ([gpu], "float32", True),
    ([gpu], "bfloat16", False),
    ([types.SimpleNamespace(platform="cpu", device_kind="cpu")], "float32", False),
  ):
    caplog.clear()
    model = model_lib.ModelConfig(**{**vars(tiny.CONFIG), "dtype": dtype})
    monkeypatch.setattr(opening.hf, "load_config", lambda _, model=model: model)
    flat = types.SimpleNamespace(flat=devices)
    mesh = types.SimpleNamespace(devices=flat, shape={"data": 1}, size=1)
    run = commands.read_run("countdown.py", {"policy": "folder"})
    [line] = opening.of_policy(run, mesh)
    assert dtype in line and ("float32 on H100" in caplog.text) == warns
    assert ("folder/config.json" in caplog.text) == warns


def test_what_is_carried_over_is_said_with_what_it_costs(caplog):
  """Tokens of earlier policies need a correction; responses in flight need slots."""
  changes = {"rollout.carry.prompts": 8, "rollout.carry.versions": 3}
  line = said(changes)["carried"]
  assert "8 prompts are in flight, a step trains on the oldest 4" in line
  assert "no response spans more than 3 policies" in line
  assert "importance_cap=2" in caplog.text
  assert "32 slots in all do not hold the 64 responses in flight" in caplog.text
  caplog.clear()
  said(changes | {"algorithm.importance_cap": 2.0, "rollout.slots": 32})
  assert not caplog.text
