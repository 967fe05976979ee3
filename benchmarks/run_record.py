"""The record of a rollout in `benchmarks.run`: seconds by part, passes, training."""

import dataclasses

import numpy as np

from experiments import timeline
from tlt_jax import processes
from tlt_jax.models import config as config_lib
from tlt_jax.rl import sample
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare

# Kind of a slice's span -> its part of the rollout's seconds.
PARTS = {
  timeline.PLAIN: "plain_s",
  timeline.SPECULATIVE: "speculation_s",
  timeline.TRAIN: "idle_training_s",
  timeline.IDLE: "waiting_s",
  timeline.OUTSIDE: "outside_s",
}


def of_rollout(scored: sample.Scored) -> dict[str, float]:
  """Times and counts of a side's rollout.

  Returns:
    `rollout_s` until the last token; `training_s` that the drafter trained after it; the
    parts of `rollout_s` (see `seconds_by_part`); `idle_s` and `harvested_s` summed over
    slices; tokens and passes of the target, of all chunks and of those that speculated;
    `updates` of the drafter; and, where drafts were made, the share of passes that keep
    the first one, `first_accepted`
  """
  s = scored.samples
  rollout_s = scored.rollout_s - s.training_s
  fast = [chunk for chunk in s.chunks if chunk.strategy != "off"]
  rate = s.acceptance_rate
  return {
    "rollout_s": rollout_s,
    "training_s": s.training_s,
    **seconds_by_part(s, rollout_s),
    "idle_s": s.idle_s,
    "harvested_s": s.harvested_s,
    "tokens": int(s.length.sum()),
    "passes": s.passes,
    "speculative_tokens": sum(chunk.tokens for chunk in fast),
    "speculative_passes": sum(chunk.passes for chunk in fast),
    "updates": s.updates,
    **({"first_accepted": rate[0]} if rate else {}),
  }


def seconds_by_part(samples: samples_lib.Samples, rollout_s: float) -> dict[str, float]:
  """Splits a rollout's seconds into `PARTS`, as means over slices.

  `idle_training_s` is the time of micro-batches in slices that only train
  (`timeline.split`); outside of chunks are prefills, the host, and moves between buckets.
  """
  chunks = [dataclasses.asdict(chunk) for chunk in samples.chunks]
  found = dict.fromkeys(PARTS.values(), 0.0)
  found["outside_s"] = rollout_s - samples.chunks[-1].end_s
  slices = timeline.spans({"chunks": chunks, "micro_batch_s": samples.micro_batch_s})
  for spans in slices:
    for span in spans:
      found[PARTS[span.kind]] += (span.end_s - span.start_s) / len(slices)
  return found


def differences(
  model: config_lib.ModelConfig,
  policy,
  expected: sample.Scored,
  found: sample.Scored,
) -> dict[str, float]:
  """Compares a side's responses with those of another to the same requests.

  Returns:
    `near_ties` and `differing_tokens` (see `rollout.compare`), and `logp_apart`, the
    largest difference in log-probability of equal tokens
  """
  a, b = expected.samples, found.samples
  near_ties = differing = 0
  if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.length, b.length)):
    result = compare.compare(model, processes.fetch(policy), expected.requests, a, b)
    near_ties, differing = result.near_ties, result.differing_tokens
  same = np.cumprod(a.tokens == b.tokens, axis=1) > 0
  return {
    "near_ties": near_ties,
    "differing_tokens": differing,
    "logp_apart": float(np.max(np.abs(a.logp - b.logp), where=same, initial=0.0)),
  }
