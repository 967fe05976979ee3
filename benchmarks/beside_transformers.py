"""Tokens per second of rollouts, plain and with speculation, and of transformers' generate.

    python -m benchmarks.beside_transformers --config=one_gpu --python=PYTHON \\
        --config.policy=FOLDER [--config.drafter=FOLDER]

Both sides answer the same prompts of the config's task, all of one length, with as many
tokens each, which nothing stops, at temperature 1, in the model's dtype. `PYTHON` has torch
and transformers, and runs in another process (see `transformers_generate`); of a GPU's
memory each side has less than half. Sides take turns, after two in which they compile. The
prompts are computed in every turn, and count. Medians, with the range. The last line is
JSON.
"""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import tables
from experiments import trees
from tlt_jax.models import hf
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_PYTHON = flags.DEFINE_string(
  "python",
  os.environ.get("TORCH_PYTHON", sys.executable),
  "With torch and transformers; '': ours only. Default: $TORCH_PYTHON, or this one.",
)
_LIVE = flags.DEFINE_list("live", ["1", "4", "16", "64"], "Requests at a time.")
_TOKENS = flags.DEFINE_integer("tokens", 128, "Of each response.", lower_bound=2)
_STRATEGIES = flags.DEFINE_list(
  "strategies", [], "To compare with plain decoding; default: those of the config."
)
_MINUTES = flags.DEFINE_float(
  "minutes", 60.0, "After which no other number of requests is begun.", lower_bound=0.0
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=1)

THEIRS, PLAIN = "transformers", "plain"
_OTHER = pathlib.Path(__file__).with_name("transformers_generate.py")
_PROMPTS = 64  # of which those of the commonest length are asked
_WARM_UP = 2  # turns; CUDA graphs are recorded in the second
_MEMORY_SHARE = "0.45"  # of a GPU


class Transformers:
  """Their side, in a process with another Python."""

  def __init__(self, python: str, folder: str, dtype: str):
    """Starts it, and loads the model.

    Raises:
      ValueError: this Python has no torch or no transformers, or does not know the model
    """
    # Ours may be on this path for one Python, and must not hide what the other has.
    env = {k: x for k, x in os.environ.items() if k != "PYTHONPATH"}
    env |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    self._process = subprocess.Popen(
      [python, "-P", str(_OTHER), folder, dtype],  # without this folder's modules
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=env,
    )
    self.about = self._answer()

  def _answer(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      self.close()
      raise ValueError(
        f"{_PYTHON.value} did not generate with transformers, see its error above; "
        "--python=PYTHON names one with torch and transformers, --python= leaves them out"
      )
    return json.loads(line)

  def seconds(self, prompts: Sequence[np.ndarray], seed: int) -> float:
    asked = {"prompts": [p.tolist() for p in prompts], "tokens": _TOKENS.value}
    print(json.dumps(asked | {"seed": seed}), file=self._process.stdin, flush=True)
    found = self._answer()
    if found["tokens"] != len(prompts) * _TOKENS.value:
      raise ValueError(f"transformers drew {found['tokens']} tokens; fewer were asked for")
    return found["seconds"]

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def prompts_of(config: config_lib.RunConfig) -> list[np.ndarray]:
  """Prompts of the task that have the same number of tokens, the commonest."""
  rules = from_config.prompt_rules(config)
  source = config.held_out | {"size": _PROMPTS}
  records = from_config.load_prompts(source, rules, section="held_out").records
  tokenizer = from_config.load_tokenizer(config.policy, config.chat.date)
  chat, system = config.chat.apply, config.chat.system
  found = sample.encode(tokenizer, records, chat=chat, system=system)
  counts = np.bincount([len(p) for p in found])
  return [p for p in found if len(p) == counts.argmax()]


def strategies(config: config_lib.RunConfig) -> dict[str, strategy_lib.Strategy | None]:
  """What is compared: plain decoding, and the strategies of the flag or of the config."""
  names = _STRATEGIES.value
  if not names:
    selector = from_config.make_selector(config)
    names = [str(x) for x in selector.strategies if x is not None] if selector else []
  return {PLAIN: None} | {name: strategy_lib.parse(name) for name in names}


class Ours:
  """A rollout of as many requests as slots."""

  def __init__(
    self,
    config: config_lib.RunConfig,
    models: from_config.Models,
    live: int,
    length: int,
    arm: strategy_lib.Strategy | None,
  ):
    options = config.rollout.sizes | {
      "slots": live,
      "buckets": (live,),
      "max_prompt": length,
      "max_length": length + _TOKENS.value,
      "filters": False,
    }
    drafter = models.drafter if strategy_lib.uses_drafter(arm) else None
    selector = arm and selector_lib.always(arm)
    self._params = models.params
    self._engine = rollout.make(
      models.model, models.mesh, rollout.Options(**options), drafter, selector
    )
    self._began = self._engine.state()

  def draw(self, prompts: Sequence[np.ndarray], seed: int) -> samples_lib.Samples:
    requests = requests_lib.make_requests(prompts, max_tokens=_TOKENS.value, seed=seed)
    self._engine.restore(self._began)  # n-grams have learnt from the turn before
    return self._engine(self._params, requests)


def measure(
  config: config_lib.RunConfig,
  models: from_config.Models,
  theirs: Transformers | None,
  live: int,
) -> dict[str, dict]:
  """Tokens per second of each side with so many requests.

  The seconds of the other process are its own; what it takes to ask it is none of them.
  """
  known = prompts_of(config)
  prompts = [known[i % len(known)] for i in range(live)]
  arms, length = strategies(config), len(prompts[0])
  ours = {name: Ours(config, models, live, length, arm) for name, arm in arms.items()}
  drawn = {}

  def draw(name: str, turn: int) -> float:
    timed = interleave.timed(ours[name].draw, prompts, turn)
    drawn[name] = timed.result
    return timed.seconds

  sides = {name: lambda turn, name=name: draw(name, turn) for name in ours}
  if theirs is not None:
    sides[THEIRS] = lambda turn: theirs.seconds(prompts, turn)
  measured = list(interleave.turns(sides, _REPEATS.value, _WARM_UP))
  seconds = {name: np.array(s) for name, s in interleave.results(measured).items()}
  base, found = seconds[PLAIN if theirs is None else THEIRS], {}
  for name, took in seconds.items():
    per_s = live * _TOKENS.value / took
    found[name] = {
      "tokens_per_s": float(np.median(per_s)),
      "tokens_per_s_range": [float(per_s.min()), float(per_s.max())],
      **interleave.median_ratio(base, took),
    }
    if name in drawn:
      found[name]["mean_acceptance_length"] = drawn[name].mean_acceptance_length
  return found


def report(found: Mapping[int, dict], title: str) -> None:
  names = list(next(iter(found.values())))

  def cell(side: dict) -> str:
    per_pass = side.get("mean_acceptance_length", 1.0)
    drafted = f", {per_pass:.2f} a pass" if per_pass > 1 else ""
    return f"{side['tokens_per_s']:,.0f} ({side['speedup']:.2f}x{drafted})"

  rows = [[str(n), *(cell(sides[name]) for name in names)] for n, sides in found.items()]
  tables.show(title, ["live", *names], rows)


def main(config: config_lib.RunConfig):
  ends = time.monotonic() + 60 * _MINUTES.value
  os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = _MEMORY_SHARE
  launch.start(1)
  lives = [int(n) for n in _LIVE.value]
  longest = len(prompts_of(config)[0])
  model = hf.load_config(config.policy)
  theirs = None
  if _PYTHON.value:
    theirs = Transformers(_PYTHON.value, config.policy, model.dtype)
  models = from_config.load_models(config)
  found = {}
  for live in lives:
    if found and time.monotonic() > ends:
      print(f"{live} live: no time left")
      continue
    found[live] = measure(config, models, theirs, live)
    base = PLAIN if theirs is None else THEIRS
    title = f"Tokens per second, and times those of {base}; {longest} tokens of prompt"
    report({live: found[live]}, title)
  if theirs is not None:
    theirs.close()
  about = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "model": config.policy,
    "dtype": model.dtype,
    "prompt_tokens": longest,
    "tokens": _TOKENS.value,
    THEIRS: theirs and theirs.about,
  }
  print(json.dumps(about | {"live": {str(n): sides for n, sides in found.items()}}))


if __name__ == "__main__":
  read = trees.from_flags("one_gpu", config_lib.RunConfig)
  launch.run(main, config=read)
