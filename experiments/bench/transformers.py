"""Compares our rollouts with transformers' `generate`, on the same model and prompts.

    python3 -m venv /tmp/scratch
    /tmp/scratch/bin/pip install torch transformers
    python -m experiments.bench.transformers --torch_python=/tmp/scratch/bin/python \\
        --config=experiments/configs/smollm2.py:gsm8k --model=runs/smollm2 \\
        --prompts=test.jsonl --prompt_field=question

Greedy, float32, on the same machine with as many threads as it has cores. transformers
answers requests one after the other, in a process of its own that loads the model once;
ours run all at a time, plainly and with each strategy. Sides take turns, each turn with
other prompts, and must draw the same tokens. Tokens per second are medians over the
turns; ratios are geometric means with Student's 95% interval. What our programs take to
compile does not count; an end token does. The last line is JSON.
"""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import subprocess
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import from_config
from experiments import keys
from experiments import launch
from experiments import launcher
from experiments import sizes
from experiments import tables
from experiments.bench import interleave
from tlt_jax import axes
from tlt_jax import data
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib

_PYTHON = flags.DEFINE_string(
  "torch_python", None, "Python that has torch and transformers.", required=True
)
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder.", required=True)
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder of `train_drafter`.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL or Parquet file.", required=True)
_FIELD = flags.DEFINE_string("prompt_field", "prompt", "Where a record has its prompt.")
_STRATEGIES = flags.DEFINE_list(
  "strategies", ["ngram_3"], "Beside plain decoding; as `generate --strategy` takes them."
)
_LIVE = flags.DEFINE_list("live", ["1", "2", "4", "8"], "Requests at a time, in all.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "Of a response.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Turns of each.", lower_bound=2)
_CPU_SLICES = flags.DEFINE_integer(
  "cpu_slices", 2, "Devices that a CPU is shown as, for our side.", lower_bound=1
)

THEIRS, PLAIN = "transformers", "off"
_PROGRAM = pathlib.Path(__file__).with_name("transformers_side.py")


class Transformers:
  """`generate` in a process of its own."""

  def __init__(self, command: Sequence[str]):
    """Starts it, and waits until the model is loaded.

    Raises:
      ValueError: it ends before
    """
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.versions = self._read()

  def __enter__(self) -> "Transformers":
    return self

  def __exit__(self, *_) -> None:
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()

  def answer(self, requests: requests_lib.Requests) -> tuple[list[list[int]], float]:
    """The responses' tokens, one request after the other, and the seconds they took."""
    tokens, seconds = [], 0.0
    for i in range(len(requests)):
      asked = {
        "prompt": requests.prompt(i).tolist(),
        "max_tokens": int(requests.max_tokens[i]),
        "stop": [stop for stop in requests.stop_tokens[i].tolist() if stop >= 0],
      }
      print(json.dumps(asked), file=self._process.stdin, flush=True)
      answered = self._read()
      tokens.append(answered["tokens"])
      seconds += answered["seconds"]
    return tokens, seconds

  def _read(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      raise ValueError(
        "transformers ended, see above; --torch_python takes a Python that has torch and "
        "transformers: python3 -m venv DIR && DIR/bin/pip install torch transformers"
      )
    return json.loads(line)


def turn(
  theirs: Transformers,
  ours: Mapping[str, Any],
  requests: requests_lib.Requests,
  number: int,
) -> dict[str, tuple[list[list[int]], float]]:
  """The tokens and seconds of every side on the same requests; see `interleave.in_turn`.

  Args:
    theirs: transformers
    ours: requests -> samples, by strategy
    requests: all of them live at first
    number: of the turn
  """
  found = {}
  for side in interleave.in_turn([THEIRS, *ours], number):
    if side == THEIRS:
      found[side] = theirs.answer(requests)
      continue
    timed = interleave.timed(ours[side], requests)
    tokens = [timed.result.response(i).tolist() for i in range(len(requests))]
    found[side] = tokens, timed.seconds
  return found


def summary(turns: Sequence[Mapping[str, tuple[list[list[int]], float]]]) -> dict:
  """Sums the turns up: tokens per second, ratios, and responses that differ.

  Args:
    turns: of `turn`
  """
  rate = {
    side: np.array([sum(map(len, t[side][0])) / t[side][1] for t in turns])
    for side in turns[0]
  }
  result = {}
  for side, rates in rate.items():
    pairs = [pair for t in turns for pair in zip(t[side][0], t[THEIRS][0], strict=True)]
    result[side] = {
      "tokens_per_s": float(np.median(rates)),
      "over_transformers": interleave.ratio(rates, rate[THEIRS]),
      "over_plain": interleave.ratio(rates, rate[PLAIN]),
      "responses": len(pairs),
      "differing_responses": sum(a != b for a, b in pairs),
    }
  return result


def engines(
  config: dict, models: from_config.Models, longest: int, live: int, stops: int
) -> dict[str, Any]:
  """Our sides, with every program ready: requests -> samples, by strategy.

  Args:
    config: of a run
    models: the policy, and the drafter if there is one
    longest: tokens of the longest prompt
    live: requests at a time
    stops: stop tokens per request
  """
  asked = sizes.Asked(longest, live, 1)
  machine = sizes.Machine.here(config["tensor_parallel"])
  config = sizes.fit_rollout(config, models.model, asked, machine)
  options = dict(config["rollout"]) | {"budget": {}}
  options["max_length"] = sizes.max_length(config)

  def side(text: str):
    chosen = from_config.selector_of(text, config)
    drafter = models.drafter if chosen else None
    engine = rollout.make(
      models.model, models.mesh, rollout.Options(**options), drafter, chosen
    )
    draft_params = models.draft_params if chosen else None
    engine.compile(models.params, stops, draft_params)
    engine.measure(models.params, stops, draft_params)
    return lambda requests: engine(models.params, requests, draft_params)

  return {text: side(text) for text in (PLAIN, *_STRATEGIES.value)}


def measure(
  config: dict, models: from_config.Models, prompts: list[np.ndarray], theirs, live: int
) -> dict:
  """Measures every side with so many requests at a time; see `summary`."""
  stop = from_config.tokenizer(config["policy"]).stop_tokens
  requests = lambda chosen: requests_lib.make_requests(
    chosen, max_tokens=_MAX_TOKENS.value, temperature=0, stop_tokens=stop
  )
  stops = requests(prompts[:1]).stop_tokens.shape[1]
  ours = engines(config, models, max(map(len, prompts)), live, stops)
  found = []
  for number in range(1 + _REPEATS.value):  # the first is a warm-up
    chosen = [prompts[(number * live + i) % len(prompts)] for i in range(live)]
    found.append(turn(theirs, ours, requests(chosen), number))
  return summary(found[1:])


def report(found: Mapping[str, dict]) -> None:
  """Prints the table; `found` is by live requests what `summary` gave."""
  text = lambda r: "{:.2f}x ({:.2f}-{:.2f})".format(r["mean"], *r["interval"])
  tables.show(
    "Tokens per second, greedy, float32",
    ["live", "side", "tokens/s", "over transformers", "over plain", "differ"],
    [
      [
        live,
        side,
        f"{r['tokens_per_s']:.1f}",
        text(r["over_transformers"]),
        text(r["over_plain"]),
        f"{r['differing_responses']} of {r['responses']}",
      ]
      for live, sides in found.items()
      for side, r in sides.items()
    ],
  )


def main(config):
  lives = [int(live) for live in _LIVE.value]
  launch.start(_CPU_SLICES.value)
  config |= {"policy": _MODEL.value, "drafter": _DRAFTER.value}
  config["sampling"] |= {"max_tokens": _MAX_TOKENS.value}
  config["rollout"] |= dict.fromkeys(sizes.OPEN["rollout"])
  for text in _STRATEGIES.value:
    from_config.selector_of(text, config)  # says what is wrong with it
  records = data.load_prompts(_PROMPTS.value, _FIELD.value, answer_field=None)
  records = from_config.usable(config, records, _PROMPTS.value, max_prompt=None)
  tokenizer, chat = from_config.tokenizer(_MODEL.value), config["chat"]
  records = records[: max(lives) * (1 + _REPEATS.value)]
  prompts = sample.encode(tokenizer, records, chat=chat["apply"], system=chat["system"])
  models = from_config.load_models(config, "float32")
  threads = len(launcher.cores())
  source = [_PYTHON.value, "-c", _PROGRAM.read_text(), _MODEL.value, str(threads)]
  with Transformers(source) as theirs:
    found = {}
    for live in lives:
      found[str(live)] = measure(config, models, prompts, theirs, live)
      report({str(live): found[str(live)]})  # what is known survives an interruption
  machine = {
    "device": jax.devices()[0].device_kind,
    "threads": threads,
    "slices": models.mesh.shape[axes.DATA],
    "load": os.getloadavg()[0],  # above the cores: something else ran
  }
  print(json.dumps(machine | theirs.versions | {"live": found}))


if __name__ == "__main__":
  launch.run(main, config=("smollm2", keys.RUN))
