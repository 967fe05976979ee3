"""Checks that speculation changes no token, on any number of tokens.

    python -m experiments.check_lossless --drafter=DIR --tokens=1000000

Responses to the config's held-out prompts (used repeatedly if there are too few) are drawn
plainly and with each strategy in turn, with the same noise. Where responses first differ,
the margin of the draw distinguishes a near-tie, which rounding decides, from a bug
(`spec_decode.rollout.compare`). `--dtype=bfloat16` also draws plainly in smaller batches.
On a GPU whose passes are all small enough (`Engine.exact`) every response must be the same,
near-ties included. Elsewhere near-ties are frequent in bfloat16: only the shares of
identical responses are reported. The last line is JSON, with the rule in words; the exit
status is 1 if tokens differ that must not.
"""

from collections.abc import Sequence
import dataclasses
import json
import logging
import sys

from absl import flags
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import sizes
from experiments import trees
from tlt_jax.rl import sample
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_DRAFTER = flags.DEFINE_string("drafter", "", "Folder or kind; default: the config's.")
_TOKENS = flags.DEFINE_integer("tokens", 100_000, "To compare, at least.", lower_bound=1)
_STRATEGIES = flags.DEFINE_list(
  "strategies", ["5_1_6", "8_1_9", "3_4_16", "ngram_5"], "In turn, a batch each."
)
_BATCH = flags.DEFINE_integer("batch", 128, "Responses at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the policy.")

_EXACT = (
  "every response must be the same: all passes round alike, so there are no near-ties"
)
_BUT_FOR_TIES = (
  "every token must be the same, except where the two best are less than "
  f"{compare.TOLERANCE:g} apart (near-ties, which rounding decides)"
)
_SHARES = (
  "responses may differ: passes round by their size, and in bfloat16 that decides often"
)
_COUNTED = ("total_tokens", "differing_tokens", "near_ties")


class InTurn(selector_lib.Selector):
  """A selector of the strategy `now`, at every live batch."""

  def __init__(self, strategies: Sequence[strategy_lib.Strategy]):
    self._strategies = tuple(strategies)
    self.now: selector_lib.Arm = None

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    return self._strategies

  def choose(self, live: int, step_s: selector_lib.StepSeconds) -> selector_lib.Arm:
    return self.now


def identical(a: samples_lib.Samples, b: samples_lib.Samples) -> int:
  alike = (a.tokens == b.tokens).all(1) & (a.length == b.length)
  return int(np.sum(alike))


def main(config: config_lib.RunConfig):
  launch.start()
  config = dataclasses.replace(config, drafter=_DRAFTER.value or config.drafter)
  strategies = [strategy_lib.parse(name) for name in _STRATEGIES.value]
  if None in strategies:
    raise ValueError("--strategies takes speculation only; plain decoding runs anyway")
  if not config.drafter and any(map(strategy_lib.uses_drafter, strategies)):
    raise ValueError("nothing to speculate with: give --drafter, or n-grams only")
  if all(s.source == strategy_lib.NGRAM for s in strategies):
    config = dataclasses.replace(config, drafter="")
  source, rules = config.held_out | {"size": 10**9}, from_config.prompt_rules(config)
  records, longest = from_config.load_prompts(source, rules, section="held_out")
  config = sizes.fill_rollout(config, sizes.Asked(longest, _BATCH.value, 1))
  models = from_config.load_models(config, _DTYPE.value, records)
  selector = InTurn(strategies)
  fewer = max(config.rollout.slots // 8, 1)
  smaller = trees.change(config, {"rollout.slots": fewer, "rollout.buckets": ()})
  plain, in_smaller_batches = (
    from_config.make_sampler(run, models.model, models.mesh) for run in (config, smaller)
  )
  speculative = from_config.make_sampler(
    config, models.model, models.mesh, models.drafter, selector
  )

  in_bfloat16 = _DTYPE.value == "bfloat16"
  exact = all(s.rollout.exact for s in (plain, in_smaller_batches, speculative))
  rule = _EXACT if exact else _SHARES if in_bfloat16 else _BUT_FOR_TIES
  logging.info("%s", rule)

  def draw(sampler: sample.Sampler, first: int) -> sample.Scored:
    asked = [records[i % len(records)] for i in range(first, first + _BATCH.value)]
    return sampler(models.params, asked, 1, seed=config.seed, first_request=first)

  found = {str(s): dict.fromkeys(_COUNTED, 0) for s in strategies}
  count = {"responses": 0, "identical": 0, "identical_in_smaller_batches": 0}
  while sum(f["total_tokens"] for f in found.values()) < _TOKENS.value:
    first = count["responses"]
    selector.now = strategies[first // _BATCH.value % len(strategies)]
    a, b = draw(plain, first), draw(speculative, first)
    if in_bfloat16:
      again = draw(in_smaller_batches, first)
      count["identical_in_smaller_batches"] += identical(a.samples, again.samples)
    if rule == _SHARES:
      total = {"total_tokens": int(a.samples.length.sum())}
    else:
      result = compare.compare(
        models.model, models.params, a.requests, a.samples, b.samples
      )
      total = dataclasses.asdict(result)
      for i, t, margin in result.where:
        logging.info("request %d, token %d: margin %.1e", first + i, t, margin)
    count["responses"] += _BATCH.value
    count["identical"] += identical(a.samples, b.samples)
    sums = found[str(selector.now)]
    for name in sums:
      sums[name] += total.get(name, 0)
    logging.info("%s: %s; %s", selector.now, sums, count)
  totals = {name: sum(f[name] for f in found.values()) for name in _COUNTED}
  apart = totals["differing_tokens"]
  if in_bfloat16:
    n = count["responses"]
    apart += n - count["identical_in_smaller_batches"] if exact else 0
    count = {name: x if name == "responses" else x / n for name, x in count.items()}
    totals = (totals if exact else {"total_tokens": totals["total_tokens"]}) | count
  print(json.dumps({"dtype": _DTYPE.value, "rule": rule, "strategies": found} | totals))
  if apart:
    sys.exit(1)


if __name__ == "__main__":
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, config=read)
