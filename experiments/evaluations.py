"""Evaluations and sample responses in a workdir.

    evaluations/STEP.jsonl    the results of each held-out problem
    samples/train_STEP.jsonl  some responses of a step
    samples/eval_STEP.jsonl   some responses of an evaluation

There is one file per step, which a resumed run replaces.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from experiments import config as config_lib
from tlt_jax import json_objects
from tlt_jax.rl import evaluation
from tlt_jax.rl import sample

FOLDER = "evaluations"
EXAMPLES = 8  # responses of each step, and of each evaluation, that are written to read


def evaluate(
  options: config_lib.Evaluation,
  sampler: sample.Sampler,
  params: Any,
  records: Sequence[dict],
  seed: int,
  step: int,
  workdir: pathlib.Path,
) -> dict[str, float]:
  """The metrics of an evaluation on held-out `records`; writes results by problem.

  Args:
    params: the policy's, sharded as for rollouts
  """
  n = options.samples
  scored = sample.evaluate(sampler, params, records, n, seed)
  write(scored, n, step, workdir, EXAMPLES)
  return evaluation.metrics(scored, n)


def is_due(options: config_lib.Evaluation, step: int, steps: int) -> bool:
  """Whether a step has an evaluation; the last of `steps` does."""
  return step == steps or bool(options.every and step % options.every == 0)


def write(
  scored: sample.Scored, n: int, step: int, workdir: pathlib.Path, examples: int
) -> None:
  """Writes the results of an evaluation with n samples per problem, and some responses."""
  path = workdir / FOLDER / f"{step:06}.jsonl"
  evaluation.write(path, evaluation.problems(scored, n))
  write_examples(scored, examples, workdir, f"eval_{step:06}")


def read(workdir: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
  """The problems of each evaluation of a workdir, by step; see `evaluation.problems`."""
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
  if count:
    path = workdir / "samples" / f"{name}.jsonl"
    evaluation.write(path, evaluation.examples(scored, count))
