"""Measures the accuracy of policies on held-out prompts, alone or paired with another's.

    python -m experiments.evaluate --model=runs/countdown/policy \\
        --baseline=experiments/policies/countdown_9m

All policies (separated by commas) get the same prompts and noise. Intervals are 95%, over
prompts (a prompt's samples count as one observation). Accuracy is the share of solved
responses; the mean reward follows where it differs, and pass@k with several samples. Named
sets of held-out prompts (`tlt_jax.data.named_sets`) have separate results. With --output
the results of every sample go to a folder for `experiments.compare`, with some responses.
The last line is JSON.
"""

import collections
import dataclasses
import json
import pathlib

from absl import flags
import numpy as np

from experiments import config as config_lib
from experiments import evaluations
from experiments import from_config
from experiments import launch
from experiments import memory_plan
from experiments import opening
from experiments import sizes
from experiments import trees
from experiments import workdirs
from tlt_jax import metrics
from tlt_jax.rl import evaluation
from tlt_jax.rl import sample

_MODEL = flags.DEFINE_list("model", None, "Hugging Face folders.", required=True)
_BASELINE = flags.DEFINE_string("baseline", None, "Folder to compare with.")
_PROMPTS = flags.DEFINE_integer(
  "prompts",
  500,
  "Held-out prompts per set, at most.",
  lower_bound=2,
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the results of a single model.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, memory_plan.DRY_RUN)
_SAMPLES = flags.DEFINE_integer("samples", 4, "Responses per prompt.", lower_bound=1)


def answer(
  folder: str, config: config_lib.RunConfig, prompts: from_config.Prompts
) -> sample.Scored:
  """Draws and scores responses of the policy in `folder`; prints a summary."""
  records = prompts.records
  config = dataclasses.replace(config, policy=folder, drafter="")
  asked = sizes.Asked(prompts.longest, len(records), _SAMPLES.value)
  config = sizes.fill_rollout(config, asked)
  memory_plan.check(memory_plan.of_rollout(config), _DRY_RUN.value)
  opening.log(opening.of_rollout(config, None, len(records), _SAMPLES.value))
  models = from_config.load_models(config)
  sampler = from_config.make_sampler(config, models.model, models.mesh)
  scored = sampler(models.params, records, _SAMPLES.value, seed=config.seed + 2**30)
  p = np.percentile(scored.samples.length, [50, 90, 99])
  mean, half = bounds(scored.solved)
  reward = ""
  if (scored.reward != scored.solved).any():
    reward = "mean reward {:.3f} +- {:.3f}  ".format(*bounds(scored.reward))
  print(
    f"{folder}\n  accuracy {100 * mean:.1f}% +- {100 * half:.1f}  {reward}"
    f"{dict(collections.Counter(scored.outcome))}  in {scored.rollout_s:.0f} s\n"
    f"  length p50 {p[0]:.0f}  p90 {p[1]:.0f}  p99 {p[2]:.0f}  p99/p50 {p[2] / p[0]:.1f}",
    flush=True,
  )
  for line in figures(evaluation.metrics(scored, _SAMPLES.value, prefix="")):
    print(f"  {line}", flush=True)
  return scored


def figures(found: dict[str, float]) -> list[str]:
  """Lines of pass@k and of the accuracy on each named set, with intervals."""
  return [
    f"{name.replace('pass_at_', 'pass@').replace('/', ' ')} {100 * value:.1f}% "
    f"+- {100 * found[f'{name}_half_width']:.1f}"
    for name, value in found.items()
    if f"{name}_half_width" in found and name != "accuracy"
  ]


def bounds(values: np.ndarray) -> tuple[float, float]:
  """Mean of [B], and half the width of its 95% interval over prompts."""
  return metrics.interval(values.reshape(-1, _SAMPLES.value).mean(1))


def main(config: config_lib.RunConfig):
  launch.start()
  if len(_MODEL.value) > 1 and _OUTPUT.value:
    raise ValueError("--output takes the results of one --model; there are several")
  if _OUTPUT.value:
    workdirs.lock_output(pathlib.Path(_OUTPUT.value))
  folders = [*_MODEL.value, *([_BASELINE.value] if _BASELINE.value else [])]
  source = config.held_out | {"size": _PROMPTS.value}
  prompts = {}
  for folder in folders:
    rules = from_config.prompt_rules(dataclasses.replace(config, policy=folder))
    prompts[folder] = from_config.load_prompts(source, rules, True, "held_out")
  records = prompts[folders[0]].records
  if any(others.records != records for others in prompts.values()):
    raise ValueError(
      "the policies cannot get the same prompts: their tokenizers differ, and "
      "unusable_prompts drops different ones"
    )
  if len(records) < 2:
    raise ValueError("an interval over prompts needs at least two; there is one")
  baseline = None
  if _BASELINE.value:
    baseline = answer(_BASELINE.value, config, prompts[_BASELINE.value])
  result = {"models": {}, "prompts": len(records), "samples": _SAMPLES.value}
  for folder in _MODEL.value:
    scored = answer(folder, config, prompts[folder])
    found = evaluation.metrics(scored, _SAMPLES.value, prefix="")
    found["reward_mean"], found["reward_half_width"] = bounds(scored.reward)
    if _OUTPUT.value:
      output = pathlib.Path(_OUTPUT.value)
      evaluations.write(scored, _SAMPLES.value, 0, output, evaluations.EXAMPLES)
    if baseline is not None:
      gain, half = bounds(scored.solved.astype(int) - baseline.solved)
      print(f"  paired gain {100 * gain:+.1f} points, 95% within +- {100 * half:.1f}")
      found |= {"gain": gain, "gain_half_width": half}
    result["models"][folder] = found
  if baseline is not None:
    result["baseline_accuracy"] = bounds(baseline.solved)[0]
  print(json.dumps(result))


if __name__ == "__main__":
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, joins_jobs=True, config=read)
