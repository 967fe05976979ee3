"""The commands as a user runs them: what they write, how they resume, how they fail.

Each test starts real processes; a tiny random policy and small sizes keep them
short, and all share one cache of compiled programs.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

from tests import tiny
from tlt_jax import metrics
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import target
from tlt_jax.tasks import countdown

ROOT = pathlib.Path(__file__).parents[1]
COUNTDOWN = dataclasses.replace(tiny.CONFIG, vocab_size=24)
STEPS = 8
KEYS = {  # of a step's record, whatever the algorithm
  "step",
  "step/seconds_s",
  "rollout/seconds_s",
  "rollout/tokens_per_s",
  "rollout/length_mean",
  "rollout/length_p50",
  "rollout/length_p99",
  "rollout/length_max",
  "rollout/mean_acceptance_length",
  "rollout/idle_s",
  "policy/loss",
  "policy/kl",
  "policy/clip_frac",
  "policy/entropy",
  "reward/mean",
  "weight_sync/seconds_s",
}
VERIFIER = '''
def digits(prompt, response, answer):
  """Share of digits, so that a random policy has something to learn from."""
  return sum(c.isdigit() for c in response) / max(1, len(response))
'''


def write_policy(folder: pathlib.Path, model=COUNTDOWN, params=None) -> pathlib.Path:
  """A random policy with the tokenizer of Countdown."""
  if params is None:
    params = target.init_params(model, jax.random.key(0))
  convert.save_hf(folder, model, params)
  countdown.tokenizer().save_pretrained(folder)
  return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> pathlib.Path:
  """What a user brings along: a policy, and a reward of their own."""
  folder = tmp_path_factory.mktemp("commands")
  write_policy(folder / "policy")
  (folder / "user_rewards.py").write_text(VERIFIER)
  return folder


def start(home, command: str, *args) -> subprocess.Popen:
  path = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
  return subprocess.Popen(
    [sys.executable, "-m", f"experiments.{command}", *map(str, args)],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": path},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(home, command: str, *args) -> subprocess.CompletedProcess:
  """Runs a command to its end."""
  with start(home, command, *args) as process:
    try:
      stdout, stderr = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
      process.kill()
      raise
  return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def kill_after(home, step: int, seconds: float, *args) -> None:
  """Starts a training, and kills it that long after it has told of a step."""
  process = start(home, "train", *args)
  for line in process.stderr:
    if line.startswith(f"step {step}/"):
      time.sleep(seconds)
      process.kill()
      break
  process.communicate()
  assert process.returncode == -9, f"it ended before step {step} was seen"


def tiny_run(home, *overrides) -> list[str]:
  """Arguments of a Countdown run that is over in a second or two."""
  overrides = {
    "policy": home / "policy",
    "steps": STEPS,
    "reward": "user_rewards.digits",
    "sampling.max_tokens": 24,
    "rollout.slots": 4,
    "rollout.buckets": "()",
    "rollout.chunk": 8,
    "learner.buckets": "((2,64),)",
    "checkpoint.every": 2,
  } | dict(overrides)
  config = "--config=experiments/configs/countdown.py:smoke"
  return [config, *(f"--config.{key}={value}" for key, value in overrides.items())]


def succeed(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
  assert result.returncode == 0, result.stderr
  assert "Traceback" not in result.stderr
  return result


def error(result: subprocess.CompletedProcess) -> str:
  """The one line that says what went wrong, after nothing but the usual log."""
  assert result.returncode == 1, result.stderr
  *log, last = result.stderr.strip().splitlines()
  usual = re.compile(r"\d\d:\d\d:\d\d |step \d+/\d+ ")
  assert [line for line in log if not usual.match(line)] == []
  assert last.startswith("error: ")
  return last.removeprefix("error: ")


def computed(workdir) -> list[dict]:
  """The records of a run without what clock and memory allocator say."""
  measured = re.compile(r".*_s|memory/.*")
  return [
    {key: value for key, value in record.items() if not measured.fullmatch(key)}
    for record in metrics.read(workdir / "metrics.jsonl")
  ]


def responses(workdir) -> list:
  records = metrics.read(workdir / "rollouts.jsonl")
  return [(r["step"], r["length"], r["outcome"]) for r in records]


def weights(folder) -> bytes:
  return (folder / "model.safetensors").read_bytes()


def checkpointed(workdir) -> list[int]:
  names = [path.name for path in (workdir / "checkpoints").iterdir()]
  return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="session")
def whole(home) -> tuple[pathlib.Path, subprocess.CompletedProcess]:
  """A run that nothing interrupted: its workdir and what it printed."""
  workdir = home / "whole"
  return workdir, succeed(run(home, "train", *tiny_run(home), f"--workdir={workdir}"))


def test_a_run_leaves_what_it_promises(home, whole):
  """Metrics, checkpoints, TensorBoard, figures and a policy that has learnt."""
  workdir, result = whole
  records = metrics.read(workdir / "metrics.jsonl")
  assert [r["step"] for r in records] == [*range(STEPS + 1)]
  for record in records[:-1]:
    assert KEYS <= record.keys()
  assert "eval/accuracy" in records[0] and "eval/accuracy" in records[-1]
  config = json.loads((workdir / "config.json").read_text())
  assert config["steps"] == STEPS and config["reward"] == "user_rewards.digits"
  assert checkpointed(workdir) == [STEPS - 2, STEPS]
  assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
  for name in ("reward", "lengths", "live_requests"):
    assert (workdir / "figures" / f"{name}.png").stat().st_size > 5_000
  model, params = convert.load_hf(workdir / "policy")
  assert model == COUNTDOWN
  assert not np.array_equal(params["head"], convert.load_hf(home / "policy")[1]["head"])
  assert (workdir / "policy" / "tokenizer.json").is_file()
  assert result.stderr.count("\nstep ") == STEPS
  for text in ("reward mean", "eval accuracy", "all steps"):
    assert text in result.stdout


def test_running_a_finished_run_again_changes_nothing(home, whole, tmp_path):
  """It says so in the same table, and exits 0."""
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  result = succeed(run(home, "train", *tiny_run(home), f"--workdir={workdir}"))
  assert "\nstep " not in result.stderr
  assert "all steps" in result.stdout
  assert computed(workdir) == computed(whole[0])
  assert responses(workdir) == responses(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")


def test_a_run_that_is_killed_again_and_again_ends_the_same(home, whole, tmp_path):
  """Just after steps, while a checkpoint is being written, during the export."""
  workdir, dice = tmp_path / "run", random.Random(0)
  args = [*tiny_run(home), f"--workdir={workdir}"]
  for done in (1, 4, 6, STEPS):
    kill_after(home, done, dice.choice((0.0, 0.01, 0.05)), *args)
  succeed(run(home, "train", *args))
  assert computed(workdir) == computed(whole[0])
  assert responses(workdir) == responses(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")


def test_a_drafter_that_trains_changes_nothing_and_survives_kills(home, whole, tmp_path):
  """The run is the plain one. Killed in the middle of steps, and following the schedule
  of a run that was not, it ends with the same drafter, bit for bit."""
  overrides = {
    "drafter": "eagle2",
    "strategies": "up to 9 live: 2_1_3",
    "spot.rows": 2,
    "spot.carried": 1,
    "spot.chunk": 16,
    "spot.cold_s": 0.5,
  }
  args = tiny_run(home, *overrides.items())
  workdir = tmp_path / "whole"
  succeed(run(home, "train", *args, f"--workdir={workdir}"))
  assert responses(workdir) == responses(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")
  records = metrics.read(workdir / "metrics.jsonl")
  assert sum(r.get("drafter/updates", 0) for r in records) > 2
  assert (workdir / "figures" / "timeline.png").exists()

  other, dice = tmp_path / "killed", random.Random(1)
  args += [f"--workdir={other}", f"--schedule={workdir / 'rollouts.jsonl'}"]
  for done in (1, 4, 6):
    kill_after(home, done, dice.choice((0.02, 0.1, 0.3)), *args)
  succeed(run(home, "train", *args))
  assert weights(other / "policy") == weights(workdir / "policy")
  assert weights(other / "drafter") == weights(workdir / "drafter")
  trained = lambda folder: [
    [chunk["trained"] for chunk in r["chunks"]]
    for r in metrics.read(folder / "rollouts.jsonl")
  ]
  assert trained(other) == trained(workdir)


@pytest.mark.parametrize(
  "args, message",
  [
    ("--config.optimizer.lr_rate=1", "did you mean 'optimizer.learning_rate'"),
    ("--config.algorithm.clip_hgh=1", "did you mean 'algorithm.clip_high'"),
    ("--config.learning_rate=1", "did you mean 'optimizer.learning_rate'"),
    ("--noconfig.chat.aply", "did you mean 'chat.apply'"),
    ("--config.steps=abc", "--config.steps=abc: invalid literal for int"),
    ("--config=experiments/configs/cuontdown.py", "cuontdown.py: no such file"),
    ("--config=experiments/configs/countdown.py:smok", "'smoke' or none, not 'smok'"),
    ("--config.spot.evry=1", "did you mean 'spot.every'"),
    ("--schedule=none.jsonl", "none.jsonl: no such file"),
    ("--wrokdir=x", "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
    ("workdir", "unexpected argument 'workdir'"),
  ],
)
def test_a_wrong_command_line_ends_in_one_line(home, tmp_path, args, message):
  """With the default config, which is what most people run."""
  result = run(home, "train", args, f"--workdir={tmp_path / 'run'}")
  assert re.search(message, error(result))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "overrides, message",
  [
    ({"tensor_parallel": 3}, "over 3 devices does not divide the 2 devices"),
    ({"algorithm.name": "grpoo"}, "no RL algorithm 'grpoo'"),
    ({"reward": "tlt_jax.tasks.countdown.scor"}, "did you mean 'score'"),
    ({"prompts.source": "tlt_jax.tasks.countdown.Problem"}, "did you mean 'Problems'"),
    ({"prompts.split": "trian"}, "split must be 'train' or 'held_out', got 'trian'"),
    ({"policy": "nowhere"}, "nowhere: no such folder; download"),
    ({"learner.updates": 3}, "8 responses cannot be shared out over 3 updates"),
    ({"rollout.max_prompt": 4}, "prompt 0 has .* tokens, .* at most 4; raise max_prompt"),
    ({"checkpoint.every": 0}, "keep >= 1 and every >= 1, got 2, 0"),
  ],
)
def test_a_wrong_value_ends_in_one_line(home, tmp_path, overrides, message):
  """That names the value, and what would do instead where that is known."""
  args = [*tiny_run(home, *overrides.items()), f"--workdir={tmp_path / 'run'}"]
  assert re.search(message, error(run(home, "train", *args)))


@pytest.mark.parametrize(
  "content, message",
  [
    (None, "train.jsonl: no such file"),
    ("", "train.jsonl: holds no records"),
    ('{"question": "1+1?"}', "line 1: no field 'answer'"),
  ],
)
def test_unusable_prompt_files_end_in_one_line(home, chat, tmp_path, content, message):
  """Before anything is compiled."""
  path = tmp_path / "train.jsonl"
  if content is not None:
    path.write_text(content)
  args = [*chat, f"--config.prompts.path={path}", f"--workdir={tmp_path / 'run'}"]
  assert message in error(run(home, "train", *args))


def test_a_truncated_policy_ends_in_one_line(home, tmp_path):
  """And names the file."""
  policy = shutil.copytree(home / "policy", tmp_path / "policy")
  (policy / "model.safetensors").write_bytes(weights(policy)[:-100])
  args = [*tiny_run(home, ("policy", policy)), f"--workdir={tmp_path / 'run'}"]
  message = error(run(home, "train", *args))
  assert f"{policy / 'model.safetensors'} is damaged or truncated" in message


def test_a_damaged_checkpoint_names_its_remedy_and_the_remedy_works(home, whole, tmp_path):
  """The run goes on from the step before, to the same end."""
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  args = [*tiny_run(home), f"--workdir={workdir}"]
  latest = workdir / "checkpoints" / str(STEPS)
  older = workdir / "checkpoints" / str(STEPS - 2)
  before = {p: p.read_bytes() for p in older.rglob("*") if p.is_file()}
  largest = max(latest.rglob("*"), key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

  message = error(run(home, "train", *args))
  assert f"checkpoint {latest} is damaged ({largest.relative_to(latest)} has" in message
  assert message.endswith(f"delete that folder to go on from step {STEPS - 2}")
  assert before == {p: p.read_bytes() for p in older.rglob("*") if p.is_file()}

  shutil.rmtree(latest)
  result = succeed(run(home, "train", *args))
  assert f"restored {older}" in result.stderr
  assert computed(workdir) == computed(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")


def test_resuming_with_another_model_ends_in_one_line(home, whole, tmp_path):
  """Which does not advise to delete a checkpoint that is good."""
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  policy = write_policy(
    tmp_path / "policy",
    config_lib.ModelConfig(**{**vars(COUNTDOWN), "mlp_width": 64}),
  )
  args = [*tiny_run(home, ("policy", policy)), f"--workdir={workdir}"]
  message = error(run(home, "train", *args))
  assert "belongs to another configuration" in message
  assert "(48, 32) there, (64, 32) here" in message
  assert "delete" not in message
  assert checkpointed(workdir) == [STEPS - 2, STEPS]


def test_a_policy_with_nan_stops_before_anything_is_saved(home, tmp_path):
  """The first rollout says so."""
  params = target.init_params(COUNTDOWN, jax.random.key(0))
  params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(jnp.nan)
  policy = write_policy(tmp_path / "policy", params=params)
  workdir = tmp_path / "run"
  args = [*tiny_run(home, ("policy", policy)), f"--workdir={workdir}"]
  message = error(run(home, "train", *args))
  assert "the policy's log-probabilities are not finite" in message
  assert checkpointed(workdir) == []
  assert not (workdir / "policy").exists()


def test_a_run_that_diverges_stops_and_keeps_its_good_checkpoints(home, whole, tmp_path):
  """With a sane learning rate it goes on from there.

  With one update per step the metrics are fine and the policy no longer is.
  """
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  wild = {
    "steps": STEPS + 4,
    "optimizer.learning_rate": 1e30,
    "learner.updates": 1,
    "checkpoint.every": 1,
  }
  args = [*tiny_run(home, *wild.items()), f"--workdir={workdir}"]
  message = error(run(home, "train", *args))
  assert re.match(rf"step {STEPS + 1}: policy/params/.* has no finite norm", message)
  assert checkpointed(workdir) == [STEPS - 2, STEPS]

  args = [*tiny_run(home, ("steps", STEPS + 1)), f"--workdir={workdir}"]
  result = succeed(run(home, "train", *args))
  assert f"restored {workdir / 'checkpoints' / str(STEPS)}" in result.stderr
  assert computed(workdir)[:STEPS] == computed(whole[0])[:STEPS]
  assert checkpointed(workdir) == [STEPS, STEPS + 1]


def test_a_warm_start_can_be_trained_and_resumed(home, tmp_path):
  """Its export is a policy."""
  sizes = {"steps": 3, "sequences": 4, "model.width": 32, "model.mlp_width": 48}
  args = ["--config=experiments/configs/warm_start.py:smoke", f"--workdir={tmp_path}"]
  args += [f"--config.{key}={value}" for key, value in sizes.items()]
  succeed(run(home, "warm_start", *args))
  first = weights(tmp_path / "policy")
  assert convert.load_hf(tmp_path / "policy")[0].vocab_size == 24
  assert (tmp_path / "policy" / "tokenizer.json").is_file()
  assert "restored" in succeed(run(home, "warm_start", *args)).stderr
  assert weights(tmp_path / "policy") == first


def test_two_policies_are_compared_on_the_same_prompts(home, whole):
  """A policy compared with itself gains nothing, whatever the noise."""
  args = [*tiny_run(home), f"--model={whole[0] / 'policy'}", "--prompts=6", "--samples=2"]
  lines = succeed(run(home, "evaluate", *args)).stdout.splitlines()
  report = json.loads(lines[-1])
  assert (report["prompts"], report["samples"]) == (6, 2)
  (alone,) = report["models"].values()
  assert 0 < alone["accuracy"] < 1
  args.append(f"--baseline={whole[0] / 'policy'}")
  report = json.loads(succeed(run(home, "evaluate", *args)).stdout.splitlines()[-1])
  (both,) = report["models"].values()
  assert both["accuracy"] == report["baseline_accuracy"] == alone["accuracy"]
  assert both["gain"] == both["gain_half_width"] == 0


@pytest.fixture(scope="session")
def chat(home) -> list[str]:
  """Arguments of a chat run: prompt files, a chat template, the GSM8K reward."""
  folder = home / "chat_policy"
  letters = {chr(i): i for i in range(32, 127)} | {"\n": 0}
  special = {"<|im_start|>": 1, "<|im_end|>": 2}
  inner = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(letters | special, unk_token=" ")
  )
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  inner.decoder = tokenizers.decoders.Fuse()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner,
    eos_token="<|im_end|>",
    additional_special_tokens=["<|im_start|>"],
  )
  tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
  )
  model = config_lib.ModelConfig(
    **{**vars(tiny.CONFIG), "architecture": "Qwen2ForCausalLM", "vocab_size": 128},
  )
  model = config_lib.ModelConfig(**{**vars(model), "qkv_bias": True, "qk_norm": False})
  convert.save_hf(folder, model, target.init_params(model, jax.random.key(0)))
  tokenizer.save_pretrained(folder)
  for name, count in (("train", 5), ("test", 3)):
    rows = [{"question": f"{i}+1?", "answer": f"So #### {i + 1}"} for i in range(count)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (home / f"{name}.jsonl").write_text(text)
  return [
    "--config=experiments/configs/qwen2_5_7b.py:smoke",
    f"--config.policy={folder}",
    f"--config.prompts.path={home / 'train.jsonl'}",
    f"--config.held_out.path={home / 'test.jsonl'}",
  ]


def test_a_chat_model_trains_on_prompt_files(home, chat, tmp_path):
  """The documented command of the 7B config, on a tiny model and shorter prompts."""
  args = ["--config.rollout.max_prompt=192", "--config.learner.buckets=((2,208),)"]
  succeed(run(home, "train", *chat, *args, f"--workdir={tmp_path}"))
  records = metrics.read(tmp_path / "metrics.jsonl")
  assert [r["step"] for r in records] == [0, 1, 2]
  assert KEYS <= records[0].keys()
  model, _ = convert.load_hf(tmp_path / "policy")
  assert model.architecture == "Qwen2ForCausalLM"
  kept = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
  assert kept.chat_template


def test_a_file_is_answered_alike_with_and_without_n_grams(home, tmp_path):
  asked = tmp_path / "prompts.jsonl"
  problems = countdown.Problems(split="held_out", size=3, four_share=0.0, seed=0)
  asked.write_text("".join(json.dumps({"prompt": p["prompt"]}) + "\n" for p in problems))
  answer = lambda strategy: succeed(
    run(
      *(home, "generate", *tiny_run(home), f"--model={home / 'policy'}"),
      *(f"--prompts={asked}", f"--strategy={strategy}"),
    )
  )
  plain, drafted = answer("off"), answer("ngram_4")
  assert plain.stdout == drafted.stdout
  records = [json.loads(line) for line in plain.stdout.splitlines()]
  assert [r["index"] for r in records] == [0, 1, 2]
  assert "tokens per pass" in drafted.stderr.splitlines()[-1]


def test_whole_steps_are_compared_side_by_side(home):
  arms = {"drafter": "", "strategies": "up to 9 live: off or ngram_3"}
  result = succeed(
    run(
      *(home, "bench.step", *tiny_run(home, *arms.items())),
      *("--sides=plain,plain+rebalance,ngram,ngram_3", "--lengths=log-normal"),
      *("--steps=2", "--warm_up=1"),
    )
  )
  found = json.loads(result.stdout.splitlines()[-1])
  assert found["workload"]["batch"] == {"prompts": 4, "responses": 2}
  default = found["targets"]["default"]
  assert default["identical"] and default["steps"] == 2
  assert default["plain"] in ("plain", "plain+rebalance")  # the faster one
  assert default["sides"][default["plain"]]["speedup_step"] == 1
  for side in ("ngram", "ngram_3"):
    assert default["sides"][side]["mean_acceptance_length"] >= 1


def test_speculation_is_checked_token_by_token(home):
  result = succeed(
    run(
      *(home, "check_lossless", *tiny_run(home), "--strategies=ngram_4"),
      *("--tokens=100", "--batch=8"),
    )
  )
  found = json.loads(result.stdout.splitlines()[-1])
  assert found["total_tokens"] >= 100
  assert found["differing_tokens"] == 0
  without = run(home, "check_lossless", *tiny_run(home))
  assert "give --drafter" in error(without)
