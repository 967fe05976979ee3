"""What a run writes of its evaluations and responses, in its workdir.

    evaluations/STEP.jsonl    of each held-out problem, what its samples were worth
    samples/train_STEP.jsonl  some responses of a step, for people to read
    samples/eval_STEP.jsonl   some of an evaluation

One file per step, so that a resumed run replaces what a killed one left.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from tlt_jax.rl import evaluation
from tlt_jax.rl import sample


def evaluate(
  config: dict,
  sampler: sample.Sampler,
  params: Any,
  records: Sequence[dict],
  step: int,
  workdir: pathlib.Path,
  draft_params: Any = None,
) -> dict[str, float]:
  """The metrics of an evaluation, whose results by problem go to the workdir.

  Args:
    config: of a run
    sampler: of the policy
    params: the policy's, in the layout of rollouts
    records: held-out ones
    step: that the run is at
    workdir: of the run
    draft_params: the drafter's, if one drafts and is not trained in rollouts
  """
  n = config["evaluation"]["samples"]
  scored = sample.evaluate(sampler, params, records, n, config["seed"], draft_params)
  path = workdir / "evaluations" / f"{step:06}.jsonl"
  evaluation.write(path, evaluation.problems(scored, n))
  write_examples(config, scored, workdir, f"eval_{step:06}")
  return evaluation.metrics(scored, n)


def write_examples(
  config: dict, scored: sample.Scored, workdir: pathlib.Path, name: str
) -> None:
  """Writes some responses to WORKDIR/samples/NAME.jsonl, for people to read."""
  if count := config["examples"]:
    path = workdir / "samples" / f"{name}.jsonl"
    evaluation.write(path, evaluation.examples(scored, count))
