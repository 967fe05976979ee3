"""Commands as a user runs them, as processes; tiny random policies keep them short.

All share one cache of compiled programs. A test file that uses the fixtures says so:
`home = commands.home`.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import resource
import subprocess

from absl import flags
import jax
import pytest
import tokenizers
import transformers

from experiments import config as config_lib
from experiments import trees
from tests import forked
from tests import tiny
from tlt_jax import metrics
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.tasks import countdown

ROOT = pathlib.Path(__file__).parents[1]
COUNTDOWN = dataclasses.replace(tiny.CONFIG, vocab_size=24, num_layers=1)
STEPS = 8
VERIFIER = '''
def digits(prompt, response, answer):
  """Share of digits, so that a random policy has something to learn from."""
  return sum(c.isdigit() for c in response) / max(1, len(response))
'''


def init(model):
  """Random parameters."""
  return jax.jit(lambda key: target.init_params(model, key))(jax.random.key(0))


def write_policy(folder: pathlib.Path, model=COUNTDOWN, params=None) -> pathlib.Path:
  """A random policy with the tokenizer of Countdown."""
  if params is None:
    params = init(model)
  hf.save(folder, model, params)
  countdown.tokenizer().save_pretrained(folder)
  return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> pathlib.Path:
  """What a user brings along: a policy, and a reward of their own."""
  folder = tmp_path_factory.mktemp("commands")
  write_policy(folder / "policy")
  (folder / "user_rewards.py").write_text(VERIFIER)
  return folder


def full_name(command: str) -> str:
  """The module of a command: of `experiments`, unless it names another folder."""
  top = command.partition(".")[0]
  return command if top in ("benchmarks", "dev") else f"experiments.{command}"


def module(name: str):
  """The module of a command, without its flags: other commands have some of these names."""
  known = flags.FlagValues()
  known.append_flag_values(flags.FLAGS)
  flags.FLAGS.remove_flag_values(known)
  try:
    return importlib.import_module(full_name(name))
  finally:
    flags.FLAGS.remove_flag_values(list(flags.FLAGS))
    flags.FLAGS.append_flag_values(known)


def start(home: pathlib.Path, command: str, *args) -> forked.Process | subprocess.Popen:
  """Starts a command in the checkout; it can import from `home`."""
  path = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
  env = os.environ | {"PYTHONPATH": path}
  return forked.start(["-m", full_name(command), *map(str, args)], str(ROOT), env)


def run(home: pathlib.Path, command: str, *args) -> subprocess.CompletedProcess:
  """Runs a command to its end."""
  return finish(start(home, command, *args))


def run_text(text: str, *args) -> subprocess.CompletedProcess:
  """Runs `python -c TEXT ...` in the checkout to its end."""
  return finish(forked.start(["-c", text, *map(str, args)], str(ROOT), os.environ))


def finish(process: forked.Process | subprocess.Popen) -> subprocess.CompletedProcess:
  """Waits for the end of a command."""
  with process:
    try:
      stdout, stderr = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
      process.kill()
      raise
  return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


def succeed(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
  assert result.returncode == 0, result.stderr
  assert "Traceback" not in result.stderr
  return result


def found(home: pathlib.Path, command: str, *args) -> dict:
  """The JSON of a command's last line."""
  return json.loads(succeed(run(home, command, *args)).stdout.splitlines()[-1])


def error(result: subprocess.CompletedProcess) -> str:
  """The one line that says what went wrong, after nothing but the usual log."""
  assert result.returncode == 1, result.stderr
  *log, last = result.stderr.strip().splitlines()
  usual = re.compile(r"\d\d:\d\d:\d\d |step \d+/\d+ ")
  assert [line for line in log if not usual.match(line)] == []
  assert last.startswith("error: ")
  return last.removeprefix("error: ")


def responses(workdir: pathlib.Path) -> list:
  """Steps, lengths and outcomes of a run's responses."""
  records = metrics.read(workdir / "rollouts.jsonl")
  return [(r["step"], r["length"], r["outcome"]) for r in records]


def weights(folder: pathlib.Path) -> bytes:
  return (folder / "model.safetensors").read_bytes()


FULL_DISK = r"cannot be written \(File too large\); free some space"


@contextlib.contextmanager
def room(size: int = 10_000):
  """No file may grow beyond so many bytes, as on a full disk; of processes that are
  started inside, too."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tiny_run(home: pathlib.Path, *overrides, flag: str = "config") -> list[str]:
  """Arguments of a Countdown run that is over in a second or two."""
  overrides = {
    "policy": home / "policy",
    "drafter": "",
    "steps": STEPS,
    "reward": "user_rewards.digits",
    "prompts.size": 64,  # the first 1,000 of a longer source would be checked
    "solved_at": 0.4,
    "sampling.max_tokens": 24,
    "rollout.slots": 4,
    "rollout.buckets": "()",
    "rollout.chunk": 8,
    "learner.buckets": "((2,64),)",
    "checkpoint.every": 2,
  } | dict(overrides)
  config = f"--{flag}=experiments/configs/countdown.py:smoke"
  return [config, *(f"--{flag}.{key}={value}" for key, value in overrides.items())]


def read_run(file: str, changes: dict | None = None) -> config_lib.RunConfig:
  """A config of a run in `experiments/configs`, with other values of some dotted keys."""
  config = trees.load(str(ROOT / "experiments" / "configs" / file), config_lib.RunConfig)
  return trees.change(config, changes or {})


# A new drafter, and its training in idle slices, of a tiny run.
DRAFTING = {
  "drafter": "eagle2",
  "strategies": "up to 9 live: 2_1_3",
  "spot.rows": 2,
  "spot.chunk_tokens": 16,
  "spot.after_rollout_share": 2.0,  # idle time may be too short to train
  "spot.micro_batches_per_update": 3,  # so that checkpoints hold some that wait
  "spot.loss.steps": 1,
}


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
  model = dataclasses.replace(
    tiny.CONFIG,
    architecture="Qwen2ForCausalLM",
    vocab_size=128,
    num_layers=1,
    qkv_bias=True,
    qk_norm=False,
  )
  hf.save(folder, model, init(model))
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
    "--config.rollout.max_prompt=192",
    "--config.learner.buckets=((2,208),)",
  ]
