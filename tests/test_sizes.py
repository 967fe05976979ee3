"""Sizes that a config leaves open: what they follow from, and that a run keeps them."""

import dataclasses
import functools
import json
import shutil

import pytest

from experiments import config as config_lib
from experiments import sizes
from experiments import trees
from experiments import workdirs
from tests import commands
from tests import tiny
from tlt_jax.models import hf
from tlt_jax.spec_decode import rollout

home, chat = commands.home, commands.chat
CPU = sizes.Machine(slices=2, free=2**33, is_cpu=True)


def fit(asked: sizes.Asked, machine=CPU, model=tiny.SMOLLM2, **given) -> config_lib.Rollout:
  options = config_lib.Rollout(chunk=8, **given)
  return sizes.fit_rollout(options, 256, model, asked, machine)


def test_sizes_follow_from_the_prompts():
  made = fit(sizes.Asked(longest=150, prompts=8, responses=1))
  assert made.max_prompt == 192 and made.slots == 4
  options = rollout.Options(max_length=192 + 256, **made.sizes)
  assert options.buckets == made.buckets[::-1] == (2, 4)
  assert options.prefill_rows == options.prompt_rows == 4  # no more than slots
  one = fit(sizes.Asked(longest=3, prompts=1, responses=1))
  assert (one.max_prompt, one.slots) == (4, 1)


def test_slots_are_as_many_as_the_memory_holds():
  """And no more than there are requests."""
  many = sizes.Asked(longest=128, prompts=1000, responses=8)
  slots = [fit(many, CPU._replace(free=free)).slots for free in (2**20, 2**29, 2**40)]
  assert slots[0] == 1 and 1 < slots[1] < 64 and slots[2] == 64
  kv = slots[1] * (128 + 256) * 30 * 2 * 3 * 64 * 4
  assert kv <= 2**29 / 4 < 2 * kv
  assert fit(many, CPU._replace(free=2**40, is_cpu=False)).slots == 256


def test_a_size_that_is_given_stays_and_others_follow_it(caplog):
  asked = sizes.Asked(longest=150, prompts=8, responses=4)
  with caplog.at_level("INFO"):
    made = fit(asked, slots=6, max_prompt=1000)
  assert made.slots == 6 and made.max_prompt == 1000 and made.chunk == 8
  assert made.buckets == (6, 3)
  (line,) = [r.getMessage() for r in caplog.records]
  assert line == "sizes: buckets 6 3"


def test_a_resumed_run_keeps_the_sizes_that_it_began_with(tmp_path):
  """However much memory is free now; another run, or a damaged file, gives none."""
  names = [f"{part}.{name}" for part, names in sizes.OPEN.items() for name in names]
  began = commands.read_run("countdown.py:smoke", dict.fromkeys(names))
  filled = dict.fromkeys(names, 7) | {
    "rollout.buckets": (4, 2),
    "chat.date": "2026-01-31",
    "learner.buckets": ((2, 512),),
    "learner.remat": True,
  }
  ran = trees.change(began, filled)
  workdirs.record(tmp_path, ran)
  keep = functools.partial(workdirs.keep_sizes, str(tmp_path))
  assert keep(began) == ran
  longer = dataclasses.replace(began, steps=9)
  assert keep(longer) == dataclasses.replace(ran, steps=9)
  other = dataclasses.replace(began, seed=1)
  assert keep(other) == other
  fewer = trees.change(began, {"rollout.slots": 5})
  assert keep(fewer) == fewer
  assert workdirs.keep_sizes(str(tmp_path / "new"), began) == began
  drafter = trees.load("drafter:smoke", config_lib.DrafterConfig)
  whole = config_lib.DrafterTraining(**vars(drafter), run=began)
  workdirs.record(tmp_path, dataclasses.replace(whole, run=ran))
  assert keep(whole).run == ran
  for damaged in ("{", '{"rollout": 3}', "[]"):
    (tmp_path / "config.json").write_text(damaged)
    assert keep(began) == began


@pytest.fixture(scope="module")
def real_shape(home, chat):
  """A small random policy of a real one's shape; its tokenizer knows fewer tokens."""
  model = dataclasses.replace(
    tiny.CONFIG,
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    width=36,
    num_heads=9,
    num_kv_heads=3,
    head_dim=4,
    qk_norm=False,
    tie_embeddings=True,
  )
  folder = shutil.copytree(home / "chat_policy", home / "real_shape")
  hf.save(folder, model, commands.init(model))
  return folder


GSM8K = "--config=experiments/configs/smollm2.py:gsm8k"


def test_a_policy_of_a_real_shape_answers_a_file(home, real_shape):
  """With sizes that follow; `auto` draws what plain decoding draws."""
  args = [GSM8K, f"--model={real_shape}", f"--prompts={home / 'test.jsonl'}"]
  args += ["--prompt_field=question", "--max_tokens=12", "--config.rollout.chunk=8"]
  drawn = {}
  for strategy in ("off", "auto"):
    result = commands.run(home, "generate", *args, f"--strategy={strategy}")
    assert "sizes: max_prompt 128, slots 2, buckets 2" in result.stderr
    drawn[strategy] = commands.succeed(result).stdout
  assert drawn["off"] == drawn["auto"]
  assert len(drawn["off"].splitlines()) == 3


@pytest.mark.slow
def test_a_run_of_a_real_shape_trains_and_tells_its_sizes(home, real_shape):
  """In its folder's config.json, where a run that resumes finds them."""
  workdir = home / "real_shape_run"
  args = ["--config=experiments/configs/smollm2.py:smoke", f"--workdir={workdir}"]
  args += [f"--config.policy={real_shape}", "--config.drafter=", "--config.steps=1"]
  commands.succeed(commands.run(home, "train", *args))
  ran = json.loads((workdir / "config.json").read_text())
  assert ran["rollout"]["slots"] == 2 and ran["learner"]["buckets"] == [[2, 512]]
  assert (workdir / "policy" / "model.safetensors").is_file()
