"""Shapes of public models for benchmarks: random weights, and a drafter's training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_QWEN2_5_7B = config_lib.ModelConfig(
  architecture="Qwen2ForCausalLM",
  vocab_size=152_064,
  width=3584,
  mlp_width=18_944,
  num_layers=28,
  num_heads=28,
  num_kv_heads=4,
  head_dim=128,
  rope_theta=1e6,
  max_position=32_768,
  qkv_bias=True,
  dtype="bfloat16",
)
_QWEN2_5_1_5B = dataclasses.replace(
  _QWEN2_5_7B,
  vocab_size=151_936,
  width=1536,
  mlp_width=8960,
  num_heads=12,
  num_kv_heads=2,
  tie_embeddings=True,
)
_QWEN3_0_6B = config_lib.ModelConfig(
  architecture="Qwen3ForCausalLM",
  vocab_size=151_936,
  width=1024,
  mlp_width=3072,
  num_layers=28,
  num_heads=16,
  num_kv_heads=8,
  head_dim=128,
  rope_theta=1e6,
  max_position=40_960,
  qk_norm=True,
  tie_embeddings=True,
  dtype="bfloat16",
)
_QWEN3_30B_A3B = config_lib.ModelConfig(
  architecture="Qwen3MoeForCausalLM",
  vocab_size=151_936,
  width=2048,
  mlp_width=6144,
  num_layers=48,
  num_heads=32,
  num_kv_heads=4,
  head_dim=128,
  rope_theta=1e6,
  max_position=40_960,
  qk_norm=True,
  dtype="bfloat16",
  experts=config_lib.Experts(count=128, per_token=8, width=768, norm_weights=True),
)
MODELS = {
  "qwen2.5-7b": _QWEN2_5_7B,
  "qwen3-0.6b": _QWEN3_0_6B,
  "qwen2.5-1.5b": _QWEN2_5_1_5B,
  "qwen3-30b-a3b": _QWEN3_30B_A3B,
}
DENSE = {name: config for name, config in MODELS.items() if config.experts is None}


def tiny(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The same kind of model in a tiny size, for dry runs."""
  experts = config.experts and dataclasses.replace(
    config.experts, count=8, per_token=2, width=24
  )
  return dataclasses.replace(
    config,
    experts=experts,
    vocab_size=128,
    width=32,
    mlp_width=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
  )


def random_params(config: config_lib.ModelConfig, mesh: jax.sharding.Mesh):
  """Random weights of a target, in the dtype of its computation."""
  return random_like(target.abstract_params(config), mesh, config.dtype)


def random_like(abstract, mesh: jax.sharding.Mesh, dtype: str = "float32"):
  """Random weights of these shapes, laid out for rollouts.

  One array at a time, so that memory holds nothing twice or in another dtype.
  """
  shapes = axes.with_shardings(mesh, axes.ROLLOUT, abstract)
  keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

  @functools.partial(jax.jit, static_argnames=("shape", "sharding"))
  def normal(key, shape, sharding):
    made = 0.02 * jax.random.normal(key, shape, dtype)
    return jax.lax.with_sharding_constraint(made, sharding)

  def make(x):
    if len(x.shape) == 1:  # norms; and biases, which may have any value
      return jnp.ones(x.shape, dtype, device=x.sharding)
    return normal(next(keys), x.shape, x.sharding)

  return jax.tree.map(make, shapes)


@functools.cache
def params_bytes(config: config_lib.ModelConfig) -> int:
  count = sum(x.size for x in jax.tree.leaves(target.abstract_params(config)))
  return count * jnp.dtype(config.dtype).itemsize


def step_bytes(config: config_lib.ModelConfig, rows: int) -> int:
  """Bytes of weights that a step of so many rows reads: all but an untied embedding.

  Of experts those that are expected to be chosen, if each is as often.
  """
  size = jnp.dtype(config.dtype).itemsize
  unread = 0 if config.tie_embeddings else config.vocab_size * config.width
  if experts := config.experts:
    missed = (1 - experts.per_token / experts.count) ** rows
    each = 3 * config.width * experts.width
    unread += config.num_layers * experts.count * each * missed
  return params_bytes(config) - round(unread * size)


def drafter_trainer(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  mesh: jax.sharding.Mesh,
  longest: int,
) -> tuple[trainer_lib.Trainer, spot_lib.Options]:
  """The trainer of a run's recipe, for responses of up to `longest` tokens; its options."""
  options = spot_lib.Options(rows=8, carried_rows=4)
  trainer = spot_lib.make_trainer(
    config,
    drafter,
    mesh,
    optimizer=optimizer.make(**spot_lib.OPTIMIZER),
    longest=longest,
    loss=loss_lib.Loss(),
    options=options,
  )
  return trainer, options
