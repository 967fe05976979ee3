"""Counts the memory that the KV of a rollout takes, in buckets and in pages.

    python -m experiments.kv_memory
    python -m experiments.kv_memory --median=2000 --slots=128 --pages=64

No device: the real schedule decides on a simulated clock, for the model, device and chunks
of the scenario qwen2_5_7b on one slice. Peak and mean (over the simulated time) are of
what requests and prompts hold: the bucket's slots and the prompt store, or the pages in
use; a pool of as many pages as the peak would have done. A rollout allocates its pool as
large as `rollout.cache_tokens` says. Tokens drawn twice are those of requests that started
over, because the budget had no room for them. The last line is JSON.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib

from absl import flags
import numpy as np

from experiments import launch
from experiments import sizes
from experiments import tables
from tlt_jax.simulate import scenario as scenario_lib

_SCENARIO = pathlib.Path(__file__).parent / "scenarios" / "qwen2_5_7b.json"

_MEDIAN = flags.DEFINE_float(
  "median", 4096, "Tokens of the median response.", lower_bound=1.0
)
_SIGMA = flags.DEFINE_float(
  "sigma", 1.2, "Of the logarithm of their number.", lower_bound=0.0
)
_LONGEST = flags.DEFINE_integer(
  "longest", 32768, "Tokens of the longest response.", lower_bound=1
)
_PROMPTS = flags.DEFINE_integer("prompts", 32, "Each with 8 responses.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Requests that run at a time.", lower_bound=1)
_PAGES = flags.DEFINE_list("pages", ["64", "128", "512"], "Tokens of a page, each a case.")
_BUDGET = flags.DEFINE_integer(
  "budget", 8192, "Tokens of KV per slot, in cases with one.", lower_bound=1
)


def scenario() -> scenario_lib.Scenario:
  """The workload that the flags ask for."""
  found = scenario_lib.read(_SCENARIO)
  return dataclasses.replace(
    found,
    slices=(1,),
    prompts=_PROMPTS.value,
    responses=8,
    max_tokens=_LONGEST.value,
    lengths={"log_normal": {"median": _MEDIAN.value, "sigma": _SIGMA.value}},
    rollout={**found.rollout, "slots": _SLOTS.value, "prompt_rows": 8},
    rollouts=1,
  )


def cases() -> dict[str, dict]:
  """Name -> entries of the section `rollout`."""
  budget = dict(cache_tokens=_SLOTS.value * _BUDGET.value)
  free = {f"pages of {n}": dict(kv_page_tokens=int(n)) for n in _PAGES.value}
  free = {"buckets": {}, **free}
  bounded = {f"{name}, budget": given | budget for name, given in free.items()}
  return free | bounded


def measure(work: scenario_lib.Scenario, given: Mapping) -> dict[str, float]:
  """The KV of a case in bytes, and what its rollout took."""
  work = dataclasses.replace(work, rollout={**work.rollout, **given})
  samples, options = work.run("plain", 1), work.options(1)
  held = np.array(samples.kv_tokens) * sizes.kv_bytes(work.config)
  if options.kv_page_tokens is None:
    held += options.prompt_rows * options.max_prompt * sizes.kv_bytes(work.config)
  seconds = [chunk.end_s - chunk.start_s for chunk in samples.chunks]
  return {
    "peak_bytes": int(held.max()),
    "mean_bytes": float(np.average(held, weights=seconds)),
    "rollout_s": samples.timeline[-1][0],
    "drawn_twice": samples.passes - int(samples.length.sum()),
    "chunks": len(samples.chunks),
  }


def main():
  work = scenario()
  found = {name: measure(work, given) for name, given in cases().items()}
  lengths = work.draw_lengths()
  tables.show(
    f"KV of {len(lengths)} responses (median {np.median(lengths):.0f}, mean "
    f"{lengths.mean():.0f} tokens) in {_SLOTS.value} slots",
    ["case", "peak, GiB", "mean, GiB", "rollout, s (simulated)", "tokens drawn twice"],
    [
      [
        name,
        f"{r['peak_bytes'] / 2**30:.2f}",
        f"{r['mean_bytes'] / 2**30:.2f}",
        f"{r['rollout_s']:.1f}",
        str(r["drawn_twice"]),
      ]
      for name, r in found.items()
    ],
  )
  print(json.dumps({"bytes_of_token": sizes.kv_bytes(work.config), "cases": found}))


if __name__ == "__main__":
  launch.run(main)
