"""Trains a drafter offline, on responses of its policy.

The policy answers prompts once; the drafter then learns from these sequences, in
another order each time through. At the end the share of accepted drafts is measured on
held-out prompts. Running the same --workdir again resumes. The result is a folder
that rollouts take as their drafter.
"""

import json
import logging
import pathlib
import time

from absl import flags
import jax
import numpy as np

from experiments import acceptance
from experiments import setup
from tlt_jax import axes
from tlt_jax import checkpoint
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import offline as draft_learner

_CONFIG = setup.config_flag("experiments/configs/drafter.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/drafter", "Where everything goes.")

_SEED = 1 << 30  # added to the seed: the responses are none that RL trains on


def answer(sampler, params, records, samples: int, seed: int) -> list[tuple]:
  """(prompt, response) token ids of each response."""
  scored = sampler(params, records, samples, seed, first_request=0)
  prompts = [scored.requests.prompts[p] for p in scored.requests.prompt_idx]
  return [(p, scored.samples.response(i)) for i, p in enumerate(prompts)]


def store(path: pathlib.Path, sequences: list[tuple]) -> None:
  """Keeps sequences as two flat arrays and their lengths."""
  flat = {
    name: np.concatenate([s[i] for s in sequences])
    for i, name in enumerate(("prompts", "responses"))
  }
  sizes = np.array([(len(p), len(r)) for p, r in sequences])
  partial = path.with_suffix(".tmp.npz")
  np.savez(partial, sizes=sizes, **flat)
  partial.replace(path)


def load(path: pathlib.Path) -> list[tuple]:
  with np.load(path, allow_pickle=False) as stored:
    ends = np.cumsum(stored["sizes"], 0)[:-1]
    names = ("prompts", "responses")
    parts = [np.split(stored[name], ends[:, i]) for i, name in enumerate(names)]
  return list(zip(*parts, strict=True))


def main():
  workdir = pathlib.Path(_WORKDIR.value)
  config = setup.start(workdir, _CONFIG.value)
  run = setup.read_config(config["run"])
  run["policy"] = config["policy"] or run["policy"]
  mesh = axes.make_mesh(run["tensor_parallel"])
  model, policy = convert.load_hf(run["policy"], mesh, axes.ROLLOUT)

  path = workdir / "responses.npz"
  if not path.exists():
    wanted = config["responses"]
    records = setup.build(run["prompts"] | {"size": wanted["prompts"]})
    seed = config["seed"] + _SEED
    sampler = setup.sampler(run, model, mesh)
    store(path, answer(sampler, policy, list(records), wanted["samples"], seed))
  sequences = load(path)

  shape = dict(config["drafter"])
  if size := shape.pop("vocab_size"):
    tokens = [response for _, response in sequences]
    shape["vocab"] = drafter_lib.most_frequent(tokens, model.vocab_size, size)
  drafter = drafter_lib.of_target(model, **shape)
  params = drafter_lib.init_params(drafter, jax.random.key(config["seed"]))
  if config["init"]:
    drafter, params = drafter_files.load(config["init"], model)
  learner = draft_learner.make(
    model,
    drafter,
    draft_loss.Loss(**config["loss"], temperature=run["sampling"]["temperature"] or 1.0),
    optimizer.make(**config["optimizer"]),
    mesh,
    **config["learner"],
  )
  state = learner.init(params)
  checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", **config["checkpoint"])
  step = 0
  if checkpoints.latest() is not None:
    step, state, _ = checkpoints.restore(learner.abstract_state())
  n = min(config["sequences"], len(sequences))
  per_epoch = len(sequences) // n

  began, tokens = time.time(), 0
  with checkpoints:
    while step < config["steps"]:
      order = np.random.default_rng([config["seed"], step // per_epoch])
      order = order.permutation(len(sequences))
      chosen = [sequences[i] for i in order[step % per_epoch * n :][:n]]
      prompts, responses = zip(*chosen, strict=True)
      state, metrics = learner.train(state, policy, prompts, responses)
      if not np.isfinite(metrics["drafter/loss"]):
        raise FloatingPointError(f"the drafter's loss is not finite at step {step}")
      step += 1
      tokens += sum(map(len, responses))
      with (workdir / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"step": step} | metrics) + "\n")
      if step % 20 == 0 or step == config["steps"]:
        agreement = [
          metrics[f"drafter/agreement_{k + 1}"] for k in range(learner.loss.steps)
        ]
        logging.info(
          "step %d/%d  loss %.4f  agreement %s  %.0f tokens/s",
          *(step, config["steps"], metrics["drafter/loss"]),
          " ".join(f"{x:.2f}" for x in agreement),
          tokens / (time.time() - began),
        )
      checkpoints.save(step, state, {}, force=step == config["steps"])

  drafter_files.save(workdir / "drafter", drafter, state.params)
  logging.info("exported the drafter to %s", workdir / "drafter")
  measured = config["evaluation"]
  found = acceptance.measure(
    run,
    *(model, policy, drafter, state.params, mesh),
    strategies=measured["strategies"],
    verifications=("coupled",),
    prompts=measured["prompts"],
    samples=measured["samples"],
    seed=config["seed"] + _SEED,
  )
  acceptance.report(found)
  print(json.dumps(found))


if __name__ == "__main__":
  setup.run(main)
