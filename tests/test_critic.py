"""A critic: its values, what it learns, and a run of PPO that is resumed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import commands
from tests import test_learner
from tests import tiny
from tlt_jax import metrics
from tlt_jax.models import target
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer

home = commands.home
STEPS = 30


def values_by_row(config, params, batch) -> list[np.ndarray]:
  """The value before each response token, one sequence at a time, without packing."""
  found = []
  for prompt, response in zip(batch.prompts, batch.responses, strict=True):
    tokens = jnp.concatenate([prompt, response])[None]
    tokens = jnp.pad(tokens, ((0, 0), (0, test_learner.LONGEST - tokens.shape[1])))
    features, _ = target.Target(config).apply(
      {"params": params}, tokens, jnp.arange(tokens.shape[1])[None]
    )
    value = features[0] @ params["value_head"]
    found.append(value[len(prompt) - 1 :][: len(response)])
  return found


def test_a_critic_learns_what_responses_are_worth():
  """From zero to most of the variance of rewards that differ from response to response."""
  made = learner_lib.make(
    test_learner.CONFIG,
    algorithm.make("ppo", critic_learning_rate=1e-2),
    optimizer.make("adamw", 1e-3),
    tiny.mesh(2),
    test_learner.PACKED,
    only="mlp",
  )
  critic = critic_lib.make(made.algorithm.critic, made, test_learner.params())
  batch = test_learner.batch().as_step()
  scored = batch.scored.replace(reward=np.float32(np.arange(12) % 2)[:, None])
  assert not critic.values(batch).any()
  size, chosen = made.buckets[-1].length, np.ones(12, bool)
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

  trained = {k for k, x in before_and_after(critic) if x}
  assert "value_head" in trained and all("mlp" in k or k == "value_head" for k in trained)
  values = critic.values(batch)
  config, params = critic.trainer.config, jax.device_get(critic.state.params)
  expected = jax.jit(lambda p: values_by_row(config, p, batch))(params)
  for i, row in enumerate(expected):
    np.testing.assert_allclose(values[i, 0, : len(row)], row, atol=2e-5)
    assert not values[i, 0, len(row) :].any()


def before_and_after(critic):
  """Yields (path, whether training changed it) of every parameter."""
  before = test_learner.params() | {"value_head": np.zeros(test_learner.CONFIG.width)}
  after = critic.state.params
  before = {k: before[k] for k in after}
  changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), before, after)
  for path, x in jax.tree.leaves_with_path(changed):
    yield jax.tree_util.keystr(path, simple=True, separator="/"), x


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
