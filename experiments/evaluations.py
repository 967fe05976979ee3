"""What a run writes of its evaluations and responses, in its workdir.

    evaluations/STEP.jsonl    of each held-out problem, what its samples were worth
    samples/train_STEP.jsonl  some responses of a step, for people to read
    samples/eval_STEP.jsonl   some of an evaluation

One file per step, so that a resumed run replaces what a killed one left.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from experiments import config as config_lib
from tlt_jax import json_objects
from tlt_jax.rl import evaluation
from tlt_jax.rl import sample

FOLDER = "evaluations"


def evaluate(
  options: config_lib.Evaluation,
  sampler: sample.Sampler,
  params: Any,
  records: Sequence[dict],
  seed: int,
  step: int,
  workdir: pathlib.Path,
  draft_params: Any = None,
) -> dict[str, float]:
  """The metrics of a step's evaluation, whose results by problem go to the workdir.

  Args:
    options: of evaluations
    sampler: of the policy
    params: the policy's, in the layout of rollouts
    records: held-out ones
    seed: of the run
    step: that the run is at
    workdir: of the run
    draft_params: the drafter's, if one drafts and is not trained in rollouts
  """
  n = options.samples
  scored = sample.evaluate(sampler, params, records, n, seed, draft_params)
  write(scored, n, step, workdir, options.examples)
  return evaluation.metrics(scored, n)


def is_due(options: config_lib.Evaluation, step: int, steps: int) -> bool:
  """Whether a step, of so many, has an evaluation; the last one does."""
  return step == steps or bool(options.every and step % options.every == 0)


def write(
  scored: sample.Scored, n: int, step: int, workdir: pathlib.Path, examples: int
) -> None:
  """Writes what an evaluation with n samples per problem found, and some responses."""
  path = workdir / FOLDER / f"{step:06}.jsonl"
  evaluation.write(path, evaluation.problems(scored, n))
  write_examples(scored, examples, workdir, f"eval_{step:06}")


def read(workdir: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
  """The problems of each evaluation of a workdir, by step; see `evaluation.problems`.

  Raises:
    ValueError: a file is damaged; names it
  """
  found = {}
  for path in sorted((workdir / FOLDER).glob("*.jsonl")):
    try:
      problems = [json_objects.parse(line) for line in path.read_bytes().splitlines()]
      if not all({"prompt", "solved", "reward"} <= set(p) for p in problems):
        raise ValueError("has a problem without prompt, solved or reward")
      found[int(path.stem)] = problems
    except ValueError as e:
      raise ValueError(f"{path}: {e}; delete the file") from e
  return found


def write_examples(
  scored: sample.Scored, count: int, workdir: pathlib.Path, name: str
) -> None:
  """Writes some responses to WORKDIR/samples/NAME.jsonl, for people to read."""
  if count:
    path = workdir / "samples" / f"{name}.jsonl"
    evaluation.write(path, evaluation.examples(scored, count))
