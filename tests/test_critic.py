"""A critic: its values, what it learns, and a run of PPO that is resumed."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import commands
from tests import tiny
from tlt_jax import metrics
from tlt_jax.models import target
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer

home = commands.home
CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=1)
SEQUENCES, LONGEST, STEPS = 12, 16, 30


def params():
  """A copy: a learner takes over what it starts from."""
  return jax.tree.map(jnp.copy, {k: x for k, x in tiny.params().items() if k != "layer_1"})


def random_batch() -> batch_lib.Batch:
  """Of sequences of 9 to 16 tokens, half of which are worth one."""
  rng = np.random.default_rng(0)
  sizes = rng.integers(9, LONGEST + 1, SEQUENCES)
  sequences = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in sizes]
  cuts = [rng.integers(1, len(x)) for x in sequences]
  pairs = list(zip(sequences, cuts, strict=True))
  length = np.int32([len(x) - n for x, n in pairs])
  reward = np.float32(np.arange(SEQUENCES) % 2)
  return batch_lib.Batch(
    prompts=[x[:n] for x, n in pairs],
    responses=[x[n:] for x, n in pairs],
    temperature=np.ones(SEQUENCES, np.float32),
    scored=algorithm.Responses(reward[:, None], length[:, None]),
  )


def values_by_row(config, params, batch) -> list[np.ndarray]:
  """The value before each response token, one sequence at a time, without packing."""
  found = []
  for prompt, response in zip(batch.prompts, batch.responses, strict=True):
    tokens = jnp.concatenate([prompt, response])[None]
    tokens = jnp.pad(tokens, ((0, 0), (0, LONGEST - tokens.shape[1])))
    features, _ = target.Target(config).apply(
      {"params": params}, tokens, jnp.arange(tokens.shape[1])[None]
    )
    value = features[0] @ params["value_head"]
    found.append(value[len(prompt) - 1 :][: len(response)])
  return found


def test_a_critic_learns_what_responses_are_worth():
  """From zero to most of the variance of rewards that differ from response to response."""
  made = learner_lib.make(
    CONFIG,
    algorithm.make("ppo", critic_learning_rate=1e-2),
    optimizer.make("adamw", 1e-3),
    tiny.mesh(2),
    ((8, 48),),
    only="mlp",
  )
  critic = critic_lib.make(made.algorithm.critic, made, params())
  batch = random_batch()
  scored = batch.scored
  assert not critic.values(batch).any()
  size, chosen = made.buckets[-1].length, np.ones(SEQUENCES, bool)
  for _ in range(STEPS):
    scored = scored.replace(value=critic.values(batch))
    tables = {
      "advantage": scored.reward,
      "value": scored.value,
      "return_": made.algorithm.critic.returns(scored),
    }
    found = critic.train(batch, batch_lib.sequences(batch, tables, size), chosen)
  assert found["critic/explained_variance"] > 0.8 and found["critic/loss"] < 0.05
  assert critic.state.step == STEPS

  before = params() | {"value_head": np.zeros(CONFIG.width)}
  after = critic.state.params
  before = {k: before[k] for k in after}
  changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, after)
  trained = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, x in jax.tree.leaves_with_path(changed)
    if x
  }
  assert "value_head" in trained and all("mlp" in k or k == "value_head" for k in trained)
  values = critic.values(batch)
  config = critic.trainer.config
  expected = jax.jit(lambda p: values_by_row(config, p, batch))(jax.device_get(after))
  for i, row in enumerate(expected):
    np.testing.assert_allclose(values[i, 0, : len(row)], row, atol=2e-5)
    assert not values[i, 0, len(row) :].any()


@pytest.mark.slow
def test_a_run_with_a_critic_goes_on_where_it_was(home, tmp_path):
  """Its second step is done twice, and ends in the same policy, bit for bit."""
  changes = [("algorithm.name", "ppo"), ("steps", 2), ("checkpoint.every", 1)]
  run = [*commands.tiny_run(home, *changes), f"--workdir={tmp_path}"]
  commands.succeed(commands.run(home, "train", *run))
  policy = tmp_path / "policy" / "model.safetensors"
  whole, first = policy.read_bytes(), metrics.read(tmp_path / "metrics.jsonl")
  for step in first[:2]:
    assert step["critic/loss"] > 0 and step["critic/grad_norm"] > 0
    assert "critic/explained_variance" in step
  assert abs(first[0]["critic/explained_variance"]) < 1e-6  # values are zero at first
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  policy.unlink()
  commands.succeed(commands.run(home, "train", *run))
  again = metrics.read(tmp_path / "metrics.jsonl")
  assert policy.read_bytes() == whole
  assert again[1]["critic/loss"] == first[1]["critic/loss"]
