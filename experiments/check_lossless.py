"""Checks that speculation changes no token, on as many tokens as you like.

    python -m experiments.check_lossless --drafter=DIR --tokens=1000000

Responses to the config's held-out prompts are drawn plainly and with each strategy in
turn, the same requests with the same noise. At a first difference the margin of the
draw tells a near-tie, which rounding decides, from a bug (`spec_decode.compare`).
`--dtype=bfloat16` rounds so coarsely that this says little: what is reported then is
the share of identical responses, beside that of plain rollouts in smaller batches.
The last line is JSON; the exit status is 1 if tokens differ in float32.
"""

import dataclasses
import json
import logging
import pathlib
import sys
import tempfile

from absl import flags
import numpy as np

from experiments import setup
from tlt_jax import axes
from tlt_jax.models import convert
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder; default: the config's.")
_TOKENS = flags.DEFINE_integer("tokens", 100_000, "To compare, at least.", lower_bound=1)
_STRATEGIES = flags.DEFINE_list(
  "strategies", ["5_1_6", "8_1_9", "3_4_16", "ngram_5"], "In turn, a batch each."
)
_BATCH = flags.DEFINE_integer("batch", 128, "Responses at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the policy.")


class InTurn:
  """The strategy that is set, for every live batch."""

  def __init__(self, strategies):
    self.strategies = tuple(strategies)
    self.now = None

  def choose(self, live: int, bucket) -> strategy_lib.Strategy | None:
    return self.now

  def arms(self, live: int) -> tuple[strategy_lib.Strategy | None, ...]:
    return None, *self.strategies

  def observe(self, seen: strategy_lib.Observation) -> None:
    pass


def identical(a, b) -> int:
  """How many responses are the same in both."""
  alike = (a.tokens == b.tokens).all(1) & (a.length == b.length)
  return int(np.sum(alike))


def main():
  config = setup.start(pathlib.Path(tempfile.mkdtemp()), _CONFIG.value)
  config["drafter"] = _DRAFTER.value or config["drafter"]
  strategies = [strategy_lib.parse(name) for name in _STRATEGIES.value]
  if not config["drafter"] and any(s.source == strategy_lib.MODEL for s in strategies):
    raise ValueError("nothing to speculate with: give --drafter, or n-grams only")
  mesh = axes.make_mesh(config["tensor_parallel"])
  model, params = convert.load_hf(config["policy"], mesh, axes.ROLLOUT, _DTYPE.value)
  model = dataclasses.replace(model, dtype=_DTYPE.value)
  drafter, _, draft_params = setup.load_drafter(config, model, mesh)
  policy = InTurn(strategies)
  plain = setup.sampler(config, model, mesh)
  speculative = setup.sampler(config, model, mesh, drafter, policy)
  fewer = {**config["rollout"], "slots": max(config["rollout"]["slots"] // 8, 1)}
  other = setup.sampler(config | {"rollout": fewer | {"buckets": ()}}, model, mesh)

  records = setup.build(config["held_out"] | {"size": 10**9})
  names = ("total_tokens", "differing_tokens", "near_ties")
  found = {str(s): dict.fromkeys(names, 0) for s in strategies}
  count = {"responses": 0, "identical": 0, "identical_in_smaller_batches": 0}
  batch = 0
  while sum(f["total_tokens"] for f in found.values()) < _TOKENS.value:
    asked = [records[batch * _BATCH.value + i] for i in range(_BATCH.value)]
    args = (asked, 1, config["seed"], batch * _BATCH.value)
    policy.now = strategies[batch % len(strategies)]
    a, b = plain(params, *args), speculative(params, *args, draft_params)
    if _DTYPE.value == "bfloat16":
      smaller = other(params, *args).samples
      count["identical_in_smaller_batches"] += identical(a.samples, smaller)
      total = dict(total_tokens=int(a.samples.length.sum()))
    else:
      result = compare.compare(model, params, a.requests, a.samples, b.samples)
      total = dataclasses.asdict(result)
      for i, t, margin in result.where:
        i += batch * _BATCH.value
        logging.info("request %d, token %d: margin %.1e", i, t, margin)
    count["responses"] += len(asked)
    count["identical"] += identical(a.samples, b.samples)
    sums = found[str(policy.now)]
    for name in sums:
      sums[name] += total.get(name, 0)
    batch += 1
    logging.info("%s: %s; %s", policy.now, sums, count)
  totals = {name: sum(f[name] for f in found.values()) for name in names}
  if _DTYPE.value == "bfloat16":
    share = lambda name: count[name] / count["responses"]
    totals = {
      "total_tokens": totals["total_tokens"],
      "responses": count["responses"],
      "identical": share("identical"),
      "identical_in_smaller_batches": share("identical_in_smaller_batches"),
    }
  print(json.dumps({"dtype": _DTYPE.value, "strategies": found} | totals))
  if totals.get("differing_tokens"):
    sys.exit(1)


if __name__ == "__main__":
  setup.run(main)
