"""Trains a Qwen3 to add with tunix's GRPO, on the rollouts of tlt_jax.

    python3 -m venv /tmp/scratch
    /tmp/scratch/bin/pip install google-tunix==0.1.7 .
    /tmp/scratch/bin/python examples/tunix_grpo.py Qwen3-0.6B [--drafter=eagle2 --spot]

The folder is one of Hugging Face (hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B).
Without --drafter n-grams draft; --spot trains the drafter in the rollouts. The only change
to a run of tunix is the line with `rollout_engine`.
"""

import argparse
import functools
import json
import pathlib
import random

import jax
import numpy as np
import optax
import transformers
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from tlt_jax.integrations import tunix as tlt
from tlt_jax.spec_decode.spot import spot

Role = rl_cluster.Role


def problems(steps: int, size: int):
  """Yields batches of sums."""
  numbers = random.Random(0)
  for _ in range(steps):
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(size)]
    yield {
      "prompts": np.array([f"{a}+{b}=" for a, b in pairs]),
      "answer": np.array([str(a + b) for a, b in pairs]),
    }


def reward(prompts, completions, answer, **kwargs) -> list[float]:
  """1 for a completion that starts with the sum."""
  return [float(c.startswith(a)) for c, a in zip(completions, answer, strict=True)]


def load(folder: pathlib.Path, mesh: jax.sharding.Mesh) -> qwen3.Qwen3:
  """The model of a folder of Hugging Face."""
  raw = json.loads((folder / "config.json").read_text())
  config = qwen3.ModelConfig(
    num_layers=raw["num_hidden_layers"],
    vocab_size=raw["vocab_size"],
    embed_dim=raw["hidden_size"],
    hidden_dim=raw["intermediate_size"],
    num_heads=raw["num_attention_heads"],
    head_dim=raw["head_dim"],
    num_kv_heads=raw["num_key_value_heads"],
    rope_theta=int(raw.get("rope_theta", 1_000_000)),
    norm_eps=raw["rms_norm_eps"],
    use_tied_embedding=raw["tie_word_embeddings"],
  )
  return qwen3_params.create_model_from_safe_tensors(str(folder), config, mesh)


def train(
  folder: pathlib.Path, engine, *, steps: int, prompts: int, responses: int, tokens: int
) -> rl_cluster.RLCluster:
  """Runs GRPO with a rollout engine: "vanilla", or one of ours."""
  mesh = jax.sharding.Mesh(np.array(jax.devices())[:, None], ("fsdp", "tp"))
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  training = rl_cluster.RLTrainingConfig(
    actor_optimizer=optax.adamw(1e-5),
    eval_every_n_steps=steps + 1,
    max_steps=steps,
    mini_batch_size=prompts,
    train_micro_batch_size=prompts,
    rollout_micro_batch_size=prompts,  # all at once: one long tail
  )
  sampling = base_rollout.RolloutConfig(
    max_prompt_length=16, max_tokens_to_generate=tokens, temperature=1.0
  )
  cluster = rl_cluster.RLCluster(
    actor=load(folder, mesh),
    tokenizer=tokenizer,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
      rollout_engine=engine,
      training_config=training,
      rollout_config=sampling,
    ),
  )
  algorithm = grpo_learner.GRPOConfig(num_generations=responses, beta=0.0)
  learner = grpo_learner.GRPOLearner(cluster, algorithm, reward)
  learner.train(problems(steps, prompts))
  return cluster


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--drafter", help="a folder, or eagle2 or eagle3 for a new one")
  parser.add_argument("--spot", action="store_true", help="train it in rollouts")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--prompts", type=int, default=16)
  parser.add_argument("--responses", type=int, default=8)
  parser.add_argument("--tokens", type=int, default=64)
  args = vars(parser.parse_args())
  options = spot.Options() if args.pop("spot") else None
  engine = functools.partial(tlt.Rollout, drafter=args.pop("drafter"), spot=options)
  train(args.pop("folder"), engine, **args)


if __name__ == "__main__":
  main()
