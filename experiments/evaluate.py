"""Accuracy of policies on held-out prompts, alone or paired with another's.

    python -m experiments.evaluate --model=runs/countdown/policy \\
        --baseline=experiments/policies/countdown

All policies answer the same prompts under the same noise; several are separated by
commas. Intervals are 95%, over prompts (a prompt's samples count as one
observation). The last line is JSON.
"""

import collections
import json
import pathlib
import tempfile

from absl import flags
import numpy as np

from experiments import setup
from tlt_jax import axes
from tlt_jax import metrics
from tlt_jax.models import convert

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_MODEL = flags.DEFINE_list("model", None, "Hugging Face folders.", required=True)
_BASELINE = flags.DEFINE_string("baseline", None, "Folder to compare with.")
_PROMPTS = flags.DEFINE_integer("prompts", 500, "Held-out prompts.", lower_bound=2)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Responses per prompt.", lower_bound=1)


def answer(folder: str, config: dict, records, mesh) -> np.ndarray:
  """Rewards f32[B] of the policy in `folder`; prints what it did."""
  model, params = convert.load_hf(folder, mesh, axes.ROLLOUT)
  sampler = setup.sampler(config | {"policy": folder}, model, mesh)
  seed = config["seed"] + 2**30
  scored = sampler(params, records, _SAMPLES.value, seed, first_request=0)
  p = np.percentile(scored.samples.length, [50, 90, 99])
  mean, half = bounds(scored.reward)
  print(
    f"{folder}\n  accuracy {100 * mean:.1f}% +- {100 * half:.1f}  "
    f"{dict(collections.Counter(scored.outcome))}  in {scored.rollout_s:.0f} s\n"
    f"  length p50 {p[0]:.0f}  p90 {p[1]:.0f}  p99 {p[2]:.0f}  p99/p50 {p[2] / p[0]:.1f}",
    flush=True,
  )
  return scored.reward


def bounds(reward: np.ndarray) -> tuple[float, float]:
  """Mean of f32[B], and half the width of its 95% interval over prompts."""
  return metrics.interval(reward.reshape(-1, _SAMPLES.value).mean(1))


def main():
  config = setup.start(pathlib.Path(tempfile.mkdtemp()), _CONFIG.value)
  mesh = axes.make_mesh(config["tensor_parallel"])
  records = list(setup.build(config["held_out"] | {"size": _PROMPTS.value}))
  baseline = None
  if _BASELINE.value:
    baseline = answer(_BASELINE.value, config, records, mesh)
  result = {"models": {}, "prompts": _PROMPTS.value, "samples": _SAMPLES.value}
  for folder in _MODEL.value:
    reward = answer(folder, config, records, mesh)
    accuracy, half = bounds(reward)
    found = {"accuracy": accuracy, "accuracy_half_width": half}
    if baseline is not None:
      gain, half = bounds(reward - baseline)
      print(f"  paired gain {100 * gain:+.1f} points, 95% within +- {100 * half:.1f}")
      found |= {"gain": gain, "gain_half_width": half}
    result["models"][folder] = found
  if baseline is not None:
    result["baseline_accuracy"] = bounds(baseline)[0]
  print(json.dumps(result))


if __name__ == "__main__":
  setup.run(main)
