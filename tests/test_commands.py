"""The commands as a user runs them: what they write, how they resume, how they fail.

Each test starts real processes; a tiny random policy and small sizes keep them
short, and all share one cache of compiled programs.
"""

import dataclasses
import itertools
import json
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from experiments import outcomes
from experiments import responses as responses_lib
from tests import commands
from tests import tiny
from tlt_jax import metrics
from tlt_jax import tokenization
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.tasks import countdown

STEPS = commands.STEPS
KEYS = {  # of a step's record, whatever the algorithm
  "step",
  "step/seconds_s",
  "rollout/tokens_per_s",
  "rollout/mean_acceptance_length",
  "policy/loss",
  "reward/mean",
}
home, chat = commands.home, commands.chat
responses, weights = commands.responses, commands.weights
run, succeed, error = commands.run, commands.succeed, commands.error
tiny_run = commands.tiny_run


def kill_after(home, step: int, seconds: float, *args) -> None:
  """Starts a training, and kills it that long after the line of a step."""
  process = commands.start(home, "train", *args)
  for line in process.stderr:
    if line.startswith(f"step {step}/"):
      time.sleep(seconds)
      process.kill()
      break
  process.communicate()
  assert process.returncode == -9, f"it ended before step {step} was seen"


def computed(workdir) -> list[dict]:
  """The records of a run without what clock and memory allocator say."""
  measured = re.compile(r".*_s|memory/.*")
  return [
    {key: value for key, value in record.items() if not measured.fullmatch(key)}
    for record in metrics.read(workdir / "metrics.jsonl")
  ]


def checkpointed(workdir) -> list[int]:
  names = [path.name for path in (workdir / "checkpoints").glob("*")]
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
  for key in ("eval/accuracy", "eval/reward_mean"):
    assert key in records[0] and key in records[-1]
  evaluated = sorted(path.name for path in (workdir / "evaluations").iterdir())
  assert evaluated == ["000000.jsonl", f"{STEPS:06}.jsonl"]
  outcomes = [o for r in metrics.read(workdir / "rollouts.jsonl") for o in r["outcome"]]
  solved = np.mean([r["reward/solved"] for r in records[:-1]])
  assert outcomes.count("solved") / len(outcomes) == pytest.approx(solved)
  assert 0 < solved < 1  # of rewards that are all below 1
  config = json.loads((workdir / "config.json").read_text())
  assert config["steps"] == STEPS and config["reward"] == "user_rewards.digits"
  assert checkpointed(workdir) == [STEPS - 2, STEPS]
  assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
  for name in ("reward", "lengths", "live_requests"):
    assert (workdir / "figures" / f"{name}.png").stat().st_size > 5_000
  model, params = hf.load(workdir / "policy")
  assert model == commands.COUNTDOWN
  assert not np.array_equal(params["head"], hf.load(home / "policy")[1]["head"])
  assert (workdir / "policy" / "tokenizer.json").is_file()
  logged = re.findall(r"^step (\d+)/", result.stderr, re.M)
  shown = sorted(path.stem for path in (workdir / "samples").glob("train_*"))
  assert shown == [f"train_{int(number):06}" for number in logged]
  assert logged == [str(number) for number in range(1, STEPS + 1)]
  for record in records[:-1]:
    named = ("rollout", "reward", "policy", "weight_sync")
    parts = sum(record[f"{name}/seconds_s"] for name in named)
    assert parts == pytest.approx(record["step/seconds_s"], abs=0.5)
  assert records[0]["policy/seconds_s"] < records[0]["compile/seconds_s"]
  for text in ("reward mean", "eval accuracy", "all steps"):
    assert text in result.stdout


def test_the_commands_that_a_run_ends_with_run(home, whole):
  """As they are printed; `tlt` prints its own name."""
  workdir, result = whole
  printed = [shlex.split(x) for x in result.stdout.splitlines() if " -m experiments." in x]
  found = {command[2]: command[3:] for command in printed}
  assert [*found] == [f"experiments.{x}" for x in ("evaluate", "generate", "export")]
  for name, args in found.items():
    more = ["--prompts=4", "--samples=1"] if name.endswith("evaluate") else []
    succeed(run(home, name.removeprefix("experiments."), *args, *more))
  assert (workdir / "served" / "policy" / "config.json").is_file()
  for name in ("policy/", "figures/", "metrics.jsonl", "samples/", "checkpoints/"):
    assert f"\n  {name} " in result.stdout and (workdir / name).exists()
  assert f"--config.steps={2 * STEPS}" in result.stdout and "drafter/" not in result.stdout


@pytest.mark.parametrize("kills", [(3,), tiny.slow((1, 3, 4, 6, STEPS))])
def test_a_run_that_is_killed_ends_the_same(home, whole, tmp_path, kills):
  """Once and again, after so many steps: just after them, in the middle of the next, while
  a checkpoint is being written, during the export. A drafter trains in it, which changes
  nothing of the plain run; following the schedule of a run that was not killed, it ends
  with the same drafter too. Some rollouts are repeated plainly: their tokens are the same,
  and a resumed run keeps them."""
  args = tiny_run(home, *commands.DRAFTING.items(), ("compare.every", 3))
  workdir, other = tmp_path / "whole", tmp_path / "killed"
  succeed(run(home, "train", *args, f"--workdir={workdir}"))
  records = metrics.read(workdir / "metrics.jsonl")
  repeated = {r["step"]: r for r in records if "plain/tokens" in r}
  assert [*repeated] == [2, 5]
  for step, record in repeated.items():
    assert record["plain/tokens"] == sum(responses(workdir)[step][1])
    assert record["plain/differing_tokens"] == 0 == record["plain/near_ties"]
    assert record["frozen/differing_tokens"] == 0 and record["frozen/seconds_s"] > 0
  assert responses(workdir) == responses(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")
  assert outcomes.updates(workdir) > 2
  assert (workdir / "figures" / "timeline.png").exists()

  dice = random.Random(0)
  args += [f"--workdir={other}", f"--schedule={workdir / 'rollouts.jsonl'}"]
  for done in kills:
    kill_after(home, done, dice.choice((0.0, 0.01, 0.05, 0.2)), *args)
  command = ["train"]
  if len(kills) > 1:  # it goes on as two processes, of a device each
    command = ["launch", "--processes=2", "--", "experiments.train"]
  result = succeed(run(home, *command, *args))
  assert result.stdout.count("all steps") == 1
  assert outcomes.of(other) == outcomes.of(workdir)


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line_and_the_run_goes_on(home, whole, tmp_path):
  """After the usual log; with space again it ends as if nothing had happened."""
  args = [*tiny_run(home), f"--workdir={tmp_path}"]
  with commands.room(20_000):
    process = commands.start(home, "train", *args)
  stdout, stderr = process.communicate(timeout=300)
  result = subprocess.CompletedProcess(args, process.returncode, stdout, stderr)
  assert re.match(f"a checkpoint in .* {commands.FULL_DISK}", error(result))
  succeed(run(home, "train", *args))
  assert computed(tmp_path) == computed(whole[0])
  assert responses(tmp_path) == responses(whole[0])
  assert weights(tmp_path / "policy") == weights(whole[0] / "policy")


def test_a_run_says_when_it_learns_nothing(home, tmp_path):
  """Once, after five steps, with the cause; and in how many steps at its end."""
  own = {"steps": 6, "sampling.temperature": 0.0}
  result = succeed(
    run(home, "train", *tiny_run(home, *own.items()), f"--workdir={tmp_path}")
  )
  said = re.findall(
    r"step (\d)/6|(nothing was learnt.* sampling.temperature is 0)", result.stderr
  )
  assert [number or "said" for number, _ in said] == [*"12345", "said", "6"]
  assert "In 6 of 6 steps the responses of every prompt had equal" in result.stdout


@pytest.mark.parametrize(
  "args, message",
  [
    ("--config.optimizer.lr_rate=1", "did you mean 'optimizer.learning_rate'"),
    ("--wrokdir=x", "Did you mean: workdir"),
    ("workdir", "unexpected argument 'workdir'"),
  ],
)
def test_a_wrong_command_line_ends_in_one_line(home, tmp_path, args, message):
  result = run(home, "train", args, f"--workdir={tmp_path / 'run'}")
  assert re.search(message, error(result))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("tensor_parallel", 3, "tensor_parallel=3 does not divide the 2"),
    ("policy", "nowhere", "nowhere/config.json is missing"),
    ("learner.updates", 3, "8 responses cannot be shared out over 3 updates"),
    ("rollout.max_prompt", 4, "raise"),
  ],
)
def test_a_wrong_value_ends_in_one_line(home, tmp_path, key, value, message):
  args = [*tiny_run(home, (key, value)), f"--workdir={tmp_path / 'run'}"]
  assert message in error(run(home, "train", *args))


def test_an_unusable_prompt_file_ends_in_one_line(home, chat, tmp_path):
  path = tmp_path / "train.jsonl"
  path.write_text('{"question": "1+1?"}')
  args = [*chat, f"--config.prompts.path={path}", f"--workdir={tmp_path / 'run'}"]
  assert "line 1: no field 'answer'" in error(run(home, "train", *args))


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
  assert f"{latest} is damaged" in message and f"step {STEPS - 2}" in message
  assert before == {p: p.read_bytes() for p in older.rglob("*") if p.is_file()}

  shutil.rmtree(latest)
  result = succeed(run(home, "train", *args))
  assert f"restored {older}" in result.stderr
  assert computed(workdir) == computed(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")


def contents(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
  """All files of a folder but the one that says whose it is."""
  files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
  return {p: p.read_bytes() for p in files}


def test_a_finished_run_is_safe_from_other_settings(home, whole, tmp_path):
  """What a resumed run may not change is refused by name, and nothing is written; nor with
  the same settings: it shows its summary once more."""
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  other = shutil.copytree(home / "policy", tmp_path / "policy")
  before = contents(workdir)
  result = succeed(run(home, "train", *tiny_run(home), f"--workdir={workdir}"))
  assert "\nstep " not in result.stderr and "all steps" in result.stdout
  assert computed(workdir) == computed(whole[0])
  assert weights(workdir / "policy") == weights(whole[0] / "policy")
  before = contents(workdir)
  for overrides, message in (
    ({"steps": 4}, f"has done {STEPS} steps already"),
    ({"policy": other}, "policy was"),
    ({"batch.responses": 4, "seed": 1}, "batch.responses was 2 and is 4 now; seed was 0"),
  ):
    args = [*tiny_run(home, *overrides.items()), f"--workdir={workdir}"]
    assert message in error(run(home, "train", *args))
    assert contents(workdir) == before


@pytest.mark.slow
def test_a_run_may_become_longer(home, whole, tmp_path):
  """And be evaluated and saved at other steps; config.json says what ran last."""
  workdir = shutil.copytree(whole[0], tmp_path / "run")
  more = {"steps": STEPS + 2, "evaluation.every": 1, "checkpoint.every": 1}
  args = [*tiny_run(home, *more.items()), f"--workdir={workdir}"]
  succeed(run(home, "train", *args))
  records = computed(workdir)

  def trained(workdir):
    return [
      {k: x for k, x in r.items() if not k.startswith("eval/")}
      for r in computed(workdir)[:STEPS]
    ]

  assert trained(workdir) == trained(whole[0])
  assert all("eval/accuracy" in r for r in records[STEPS:])
  assert checkpointed(workdir) == [STEPS + 1, STEPS + 2]
  assert json.loads((workdir / "config.json").read_text())["steps"] == STEPS + 2


@pytest.mark.slow
def test_a_fork_goes_on_elsewhere_with_other_settings(home, whole, tmp_path):
  """Killed and run again too; what it starts from stays as it is."""
  before = contents(whole[0])
  changes = {"batch.responses": 4, "steps": STEPS + 4} | commands.DRAFTING
  args = [*tiny_run(home, *changes.items()), f"--workdir={whole[0]}"]
  kill_after(home, STEPS + 3, 0.05, *args, f"--fork={tmp_path / 'fork'}")
  succeed(run(home, "train", *args, f"--fork={tmp_path / 'fork'}"))
  assert contents(whole[0]) == before
  assert computed(tmp_path / "fork")[:STEPS] == computed(whole[0])[:STEPS]
  counts = [len(lengths) for _, lengths, _ in responses(tmp_path / "fork")]
  assert counts == [8] * STEPS + [16] * 4
  assert (tmp_path / "fork" / "drafter").is_dir()


def test_a_policy_with_nan_stops_before_anything_is_saved(home, tmp_path):
  """The first rollout says so."""
  params = commands.init(commands.COUNTDOWN)
  params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(jnp.nan)
  policy = commands.write_policy(tmp_path / "policy", params=params)
  workdir = tmp_path / "run"
  args = [*tiny_run(home, ("policy", policy)), f"--workdir={workdir}"]
  message = error(run(home, "train", *args))
  assert "the policy's log-probabilities are not finite" in message
  assert checkpointed(workdir) == []
  assert not (workdir / "policy").exists()


def test_a_run_that_diverges_stops_and_keeps_its_good_checkpoints(home, whole, tmp_path):
  """Those of the run that it was forked from, too."""
  wild = {
    "steps": STEPS + 4,
    "optimizer.learning_rate": 1e6,
    "optimizer.weight_decay": 1e6,
    "checkpoint.every": 1,
  }
  fork, before = tmp_path / "fork", contents(whole[0])
  args = [*tiny_run(home, *wild.items()), f"--workdir={whole[0]}", f"--fork={fork}"]
  message = error(run(home, "train", *args))
  assert re.match(rf"step {STEPS + 2}: .* the run has diverged", message)
  assert checkpointed(fork) == [STEPS + 1] and contents(whole[0]) == before


@pytest.mark.slow
def test_a_warm_start_can_be_trained_and_resumed(home, tmp_path):
  """Its export is a policy."""
  sizes = {"steps": 3, "sequences": 4, "model.width": 32, "model.mlp_width": 48}
  args = ["--config=experiments/configs/warm_start.py:smoke", f"--workdir={tmp_path}"]
  args += ["--config.export_dtype=bfloat16"]
  args += [f"--config.{key}={value}" for key, value in sizes.items()]
  succeed(run(home, "warm_start", *args))
  first = weights(tmp_path / "policy")
  model, params = hf.load(tmp_path / "policy")
  assert (model.vocab_size, model.dtype) == (24, "float32")
  assert params["head"].dtype == jnp.bfloat16
  assert (tmp_path / "policy" / "tokenizer.json").is_file()
  assert "restored" in succeed(run(home, "warm_start", *args)).stderr
  assert weights(tmp_path / "policy") == first


@pytest.mark.slow
def test_an_llm_learns_to_search(home, tmp_path):
  """With the tokenizer that it has; the end of a line stops what is exported, too."""
  model = dataclasses.replace(commands.COUNTDOWN, vocab_size=32)
  llm, found = commands.write_policy(tmp_path / "llm", model), tmp_path / "policy"
  tokenizer = countdown.tokenizer()
  tokenizer.add_special_tokens({"eos_token": "<end>"})
  tokenizer.save_pretrained(llm)
  line_end, end = tokenizer.convert_tokens_to_ids(["\n", "<end>"])
  args = ["--config=experiments/configs/warm_start.py:smoke", f"--workdir={tmp_path}"]
  args += ["--config.steps=1", "--config.sequences=2"]
  succeed(run(home, "warm_start", *args, f"--config.policy={llm}"))
  assert hf.load_config(found) == model and weights(found) != weights(llm)
  assert tokenization.Tokenizer.load(found).stop_tokens == (line_end, end)


def test_two_policies_are_compared_on_the_same_prompts(home, whole):
  """A policy compared with itself gains nothing, whatever the noise."""
  policy = whole[0] / "policy"
  args = [f"--model={policy}", f"--baseline={policy}", "--prompts=6", "--samples=2"]
  report = commands.found(home, "evaluate", *tiny_run(home), *args)
  assert (report["prompts"], report["samples"]) == (6, 2)
  (both,) = report["models"].values()
  assert 0 < both["accuracy"] == report["baseline_accuracy"] < 1
  assert 0 < both["reward_mean"] != both["accuracy"]  # a share of digits
  assert both["gain"] == both["gain_half_width"] == 0


def test_a_chat_model_trains_on_prompt_files(home, chat, tmp_path):
  """The documented command of the 7B config, on a tiny model and shorter prompts."""
  succeed(run(home, "train", *chat, f"--workdir={tmp_path}"))
  records = metrics.read(tmp_path / "metrics.jsonl")
  assert [r["step"] for r in records] == [0, 1, 2]
  assert KEYS <= records[0].keys()
  model, _ = hf.load(tmp_path / "policy")
  assert model.architecture == "Qwen2ForCausalLM"
  kept = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
  assert kept.chat_template


@pytest.fixture(scope="session")
def trained(home, chat) -> tuple[pathlib.Path, dict]:
  """The folder of a drafter that was trained on a file of prompts, and what was found."""
  sizes = {
    "steps": 2,
    "drafter.kind": "eagle3",
    "drafter.vocab_size": 16,
    "responses.temperatures": "(0.0,1.0)",
    "loss.steps": 2,
    "learner.buckets": "((2,208),)",
    "evaluation.strategies": "('2_1_3','ngram_3')",
    "evaluation.temperatures": "(0.0,1.0)",
  }
  config = ["--config=experiments/configs/drafter.py:smoke"]
  config += [f"--config.{key}={value}" for key, value in sizes.items()]
  run_of = [arg.replace("--config", "--run") for arg in chat]
  args = [*config, *run_of, f"--workdir={home / 'drafter'}"]
  found = commands.found(home, "train_drafter", *args)
  return home / "drafter" / "drafter", found


def test_a_drafter_is_trained_on_a_file_of_prompts(home, trained):
  """Of its policy's responses to them; acceptance is measured on the held-out file."""
  folder, found = trained
  cases = [(r["strategy"], r["temperature"]) for r in found["acceptance"]]
  assert cases == list(itertools.product(("2_1_3", "ngram_3"), (0.0, 1.0)))
  assert all(r["mean_acceptance_length"] >= 1 for r in found["acceptance"])
  drawn = responses_lib.load(folder.parent / "responses.npz", vocab_size=10**6)
  # Per prompt one greedy response, as all would be equal, and two samples.
  assert len(drawn) == 3 * len({tuple(prompt) for prompt, _ in drawn})
  records = metrics.read(folder.parent / "metrics.jsonl")
  assert [r["step"] for r in records] == [1, 2]
  drafter, _ = drafter_files.load(folder, hf.load_config(home / "chat_policy"))
  assert drafter.kind == "eagle3" and len(drafter.vocab) == 16
  config = json.loads((folder.parent / "config.json").read_text())
  assert config["run"]["prompts"]["path"] == str(home / "train.jsonl")


def test_a_file_is_answered_alike_with_and_without_n_grams(home, tmp_path):
  asked = tmp_path / "prompts.jsonl"
  problems = countdown.Problems(split="held_out", size=3, four_share=0.0)
  prompts = [problems[i]["prompt"] for i in range(3)]
  asked.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
  args = [*tiny_run(home), f"--model={home / 'policy'}", f"--prompts={asked}"]
  plain, drafted = (
    succeed(run(home, "generate", *args, f"--strategy={strategy}"))
    for strategy in ("off", "ngram_4")
  )
  assert plain.stdout == drafted.stdout
  records = [json.loads(line) for line in plain.stdout.splitlines()]
  assert [r["index"] for r in records] == [0, 1, 2]
  assert "tokens per pass" in drafted.stderr.splitlines()[-1]


def test_any_model_answers_any_file_without_a_config(home, trained, tmp_path):
  """Whose prompts are longer than those of the default run, by the default strategies."""
  prompts = ["x" * 300, [{"role": "user", "content": "1+1?"}]]
  (tmp_path / "prompts.jsonl").write_text(
    "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
  )
  args = [f"--model={home / 'chat_policy'}", f"--prompts={tmp_path / 'prompts.jsonl'}"]
  more = ["--max_tokens=12", f"--drafter={trained[0]}", f"--output={tmp_path / 'out'}"]
  result = succeed(run(home, "generate", *args, *more))
  assert "tokens per pass" in result.stderr
  assert f"wrapped in the chat template of {home / 'chat_policy'}" in result.stderr
  records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
  assert [r["prompt"] for r in records] == prompts
  assert all(0 < r["length"] <= 12 for r in records)
