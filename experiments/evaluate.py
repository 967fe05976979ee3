"""Accuracy of a policy on held-out prompts, alone or paired with another.

    python -m experiments.evaluate --model=runs/countdown/policy \\
        --baseline=experiments/warm_start/countdown

Both policies answer the same prompts under the same noise. Intervals are 95%,
over prompts (a prompt's samples count as one observation). The last line is JSON.
"""

import collections
import json
import pathlib
import tempfile

from absl import flags
import numpy as np

from experiments import setup
from tlt_jax import axes
from tlt_jax.models import convert

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder.", required=True)
_BASELINE = flags.DEFINE_string("baseline", None, "Folder to compare with.")
_PROMPTS = flags.DEFINE_integer("prompts", 500, "Held-out prompts.", lower_bound=2)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Responses per prompt.", lower_bound=1)


def answer(folder: str, config: dict, records, mesh):
  """The scored responses of the policy in `folder`."""
  model, params = convert.load_hf(folder, mesh, axes.ROLLOUT)
  sampler = setup.sampler(config | {"policy": folder}, model, mesh)
  scored = sampler(
    params, records, _SAMPLES.value, seed=config["seed"] + 2**30, first_request=0
  )
  length = scored.samples.length
  print(
    f"{folder}\n  accuracy {interval(scored.reward)}  "
    f"{dict(collections.Counter(scored.outcome))}\n"
    f"  length p50 {np.percentile(length, 50):.0f}  p90 {np.percentile(length, 90):.0f}"
    f"  p99 {np.percentile(length, 99):.0f}  max {length.max()}  "
    f"p99/p50 {np.percentile(length, 99) / np.percentile(length, 50):.1f}",
    flush=True,
  )
  return scored


def bounds(reward: np.ndarray) -> tuple[float, float]:
  """Mean of f32[B], and half the width of its 95% interval over prompts."""
  per_prompt = reward.reshape(-1, _SAMPLES.value).mean(1)
  half = 1.96 * per_prompt.std(ddof=1) / np.sqrt(len(per_prompt))
  return float(per_prompt.mean()), float(half)


def interval(reward: np.ndarray) -> str:
  mean, half = bounds(reward)
  return f"{100 * mean:.1f}% +- {100 * half:.1f}"


def main():
  config = setup.start(pathlib.Path(tempfile.mkdtemp()), _CONFIG.value)
  mesh = axes.make_mesh(config["tensor_parallel"])
  records = list(setup.build(config["held_out"] | {"size": _PROMPTS.value}))
  scored = answer(_MODEL.value, config, records, mesh)
  accuracy, half = bounds(scored.reward)
  result = {"accuracy": accuracy, "accuracy_half_width": half}
  if _BASELINE.value:
    other = answer(_BASELINE.value, config, records, mesh)
    gain = scored.reward - other.reward
    mean, half = bounds(gain)
    print(f"paired gain {100 * mean:+.1f} points, 95% within +- {100 * half:.1f}")
    result |= {"baseline_accuracy": bounds(other.reward)[0]}
    result |= {"gain": mean, "gain_half_width": half}
  result |= {"prompts": _PROMPTS.value, "samples": _SAMPLES.value}
  print(json.dumps(result))


if __name__ == "__main__":
  setup.run(main)
