"""How many drafts stand, on fixed prompts: of drafters as they are, and at their limit.

The *headroom* of adapting a drafter to a policy is what a drafter gains that is trained
offline on this very policy until its schedule ends. Drafters are compared on the same
held-out prompts, with the same noise, all requests drafted for alike.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import logging
import pathlib
import shutil
from typing import Any

from experiments import acceptance
from experiments import from_config
from experiments import responses as responses_lib
from experiments import train_drafter
from experiments.bench import sides
from tlt_jax import checkpoint
from tlt_jax import metrics
from tlt_jax import writing
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters

_SEED = 1 << 29  # added to the seed: no noise is shared with a step


class Probe:
  """Measures drafters on held-out prompts, with the policy of the moment."""

  def __init__(self, config: dict, offline: dict, models: from_config.Models):
    """Makes the sampler; its programs are compiled when they are first used.

    Args:
      config: of a run
      offline: of a drafter's training; its `evaluation` says on how many prompts, and
        its first strategy is used
      models: policy and drafter, of which the shapes count
    """
    measured = offline["evaluation"]
    source = config["held_out"] | {"size": measured["prompts"]}
    self.strategy = measured["strategies"][0]
    self._records = from_config.prompts(config, source, whole=True)
    self._samples, self._seed = measured["samples"], config["seed"] + _SEED
    self._sampler = acceptance.sampler(config, models, self.strategy)

  def __call__(self, policy: Any, draft_params: Any) -> float:
    """Tokens per pass of the target.

    Args:
      policy, draft_params: parameters, in the layout of rollouts
    """
    scored = self._sampler(
      policy, self._records, self._samples, seed=self._seed, draft_params=draft_params
    )
    return scored.samples.mean_acceptance_length


def kept_at(folder: pathlib.Path, step: int) -> pathlib.Path:
  """Where a run of `experiments.bench.run` keeps the policy and the drafters of a step."""
  return folder / f"at_{step:06}"


def measure_kept(config: dict, offline: dict, folder: pathlib.Path) -> None:
  """Compares drafters at the steps whose policies a run kept, unless that was done.

  Args:
    config: of the run
    offline: of the training to the limit
    folder: of the run; gets headroom.jsonl
  """
  path = folder / "headroom.jsonl"
  done = {record["step"] for record in read(path)}
  trained = [s for s in config["bench"]["sides"] if sides.bare(s) == "tlt"]
  for step in sorted(set(config["bench"]["headroom"]) - done):
    kept = kept_at(folder, step)
    drafters_of_step = {name: str(kept / name) for name in trained}
    found = measure(config, offline, kept / "policy", drafters_of_step)
    logging.info("headroom at step %d: %s", step, found)
    append(path, {"step": step} | found)


def measure(
  config: dict, offline: dict, policy: pathlib.Path, found: Mapping[str, str]
) -> dict[str, float]:
  """Tokens per pass of drafters for one policy, and of one trained to its limit for it.

  What is made on the way lies beside the policy, so that a call that was killed goes on.

  Args:
    config: of the run
    offline: of the training to the limit, which starts from the config's drafter
    policy: folder of the policy
    found: name -> folder, of drafters to compare
  Returns:
    by name, `frozen` (the config's drafter) and `limit` among them
  """
  run = config | {"policy": str(policy)}
  models = from_config.load_models(run | {"drafter": ""})
  start = config["drafter"]
  frozen = from_config.load_drafter(run, models.model, models.mesh)
  if not drafters.is_kind(start):
    offline = offline | {"init": start}
  limit = _to_the_limit(run, offline, models, policy.parent)
  load = lambda folder: drafter_files.load(folder, models.model, models.mesh)
  compared = {"frozen": frozen, **{k: load(v) for k, v in found.items()}, "limit": limit}

  @functools.cache  # drafters of one shape share its programs
  def probe(drafter):
    return Probe(run, offline, dataclasses.replace(models, drafter=drafter))

  return {
    name: probe(drafter)(models.params, params)
    for name, (drafter, params) in compared.items()
  }


def _to_the_limit(run: dict, offline: dict, models: from_config.Models, folder):
  """A drafter trained offline on responses of the policy: its shape and parameters.

  Args:
    run: config of the run, with this policy
    offline: config of the training
    models: the policy
    folder: where responses, checkpoints and the drafter go
  """
  made = folder / "limit_drafter"
  if made.exists():
    return drafter_files.load(made, models.model, models.mesh)
  path = folder / "responses.npz"
  if not path.exists():
    source = run["prompts"] | {"size": offline["responses"]["prompts"]}
    records = from_config.prompts(run, source, whole=True)
    sequences = train_drafter.responses_of(models, offline, run, records)
    responses_lib.store(path, sequences)
  sequences = responses_lib.load(path, models.model.vocab_size)
  tokens = [response for _, response in sequences]
  drafter, params = train_drafter.first_drafter(models, offline, tokens)
  learner = train_drafter.make_learner(models, drafter, offline, run)
  scratch = folder / "limit"
  scratch.mkdir(exist_ok=True)
  checkpoints = checkpoint.Checkpoints(scratch / "checkpoints", **offline["checkpoint"])
  params = train_drafter.train(
    learner, params, models, offline, sequences, scratch, checkpoints
  )
  drafter_files.save(made, drafter, params)
  shutil.rmtree(scratch)
  return drafter, params


def read(path: pathlib.Path) -> list[dict]:
  """The records of a file that `append` wrote; none if there is no file."""
  return metrics.read(path) if path.exists() else []


def append(path: pathlib.Path, record: dict) -> None:
  """Adds a record; on disk when it returns, whole or not at all."""
  partial = path.with_suffix(".new")
  with writing.to(path):
    lines = [json.dumps(known) + "\n" for known in [*read(path), record]]
    partial.write_text("".join(lines))
  partial.replace(path)
