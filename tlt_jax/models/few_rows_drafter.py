"""A drafter's steps over few rows, by the kernels of the target's passes.

What differs between kinds, the inputs of attention and of the head, is left to XLA, but
for products with `fc`. See `models.few_rows`; what does not fit uses `drafter.Drafter`.
"""

from collections.abc import Callable
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import few_rows
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows as kernels_lib
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import varying


class Weights(NamedTuple):
  """What all steps read; made once, outside of loops."""

  params: dict  # bf16, the drafter's
  target: dict  # `embedding` is used
  head: jax.Array  # bf16[U D]
  rotations: layers.Rotation  # of positions 0, 1, ...
  bias: jax.Array  # bf16[1 D]  of fc, or zeros
  count: jax.Array  # i32[...]  zeros of the kernels


def make_weights(
  config: drafter_lib.DrafterConfig,
  params: dict,
  target_params: dict,
  head: jax.Array,
  rotations: layers.Rotation,
) -> Weights:
  """Takes the drafter's parameters in its dtype, and the head of `Drafter.output_head`."""
  c, K = config.layer, config.layer.num_kv_heads
  tiles = max(c.width, c.mlp_width) // kernels_lib.TILE
  most = max(c.num_heads + 2 * K, tiles, kernels_lib.MOST * K)
  bias = params["fc_bias"] if config.fc_bias else jnp.zeros(c.width, c.dtype)
  # Else XLA would make constants in each step.
  fixed = jax.lax.optimization_barrier((bias[None], jnp.zeros(most, jnp.int32)))
  target = {"embedding": target_params["embedding"]}
  return Weights(params, target, head.astype(c.dtype), rotations, *fixed)


def fits(config: drafter_lib.DrafterConfig, cache: cache_lib.LayerCache, rows: int) -> bool:
  """Whether there are kernels for a drafter and a number of pairs, on this device."""
  kind, page, H = drafters.find(config.kind), *cache.k.shape[2:]
  inputs = (width(config) for width in (kind.fc_width, kind.attention_width) if width)
  sizes = config.layer.width, config.layer.mlp_width, page, *inputs
  return H in (64, 128) and _runs(config, cache.kernels, rows, *sizes)


def head_fits(
  config: drafter_lib.DrafterConfig, kernels: str | None, rows: int, head: jax.Array
) -> bool:
  return _runs(config, kernels, rows, *head.shape)


def _runs(config, kernels: str | None, rows: int, *sizes: int) -> bool:
  mesh = axes.mesh_of_compiler()
  return (
    rows <= kernels_lib.MOST
    and config.layer.dtype == "bfloat16"
    and not any(size % kernels_lib.TILE for size in sizes)
    and (mesh is None or mesh.shape[axes.MODEL] == 1)
    and implementations.choose(kernels) == "triton"
  )


def step(
  config: drafter_lib.DrafterConfig,
  weights: Weights,
  h: jax.Array,
  tokens: jax.Array,
  positions: jax.Array,
  nodes: kernels_lib.Nodes,
  cache: cache_lib.LayerCache,
  start: jax.Array,
  impl: str = "triton",
) -> tuple[jax.Array, cache_lib.LayerCache]:
  """The next features bf16[B J D] of pairs h bf16[B J D], i32[B J], and the cache.

  Pair j of a request is written to slot start + j, and is node j of `nodes`.
  """
  run = functools.partial(_step, kernels_lib.of(impl), config)
  return _on_device(run, weights, h, tokens, positions, nodes, cache, start)


def extend(
  config: drafter_lib.DrafterConfig,
  weights: Weights,
  read: jax.Array,
  tokens: jax.Array,
  start: jax.Array,
  last: jax.Array,
  cache: cache_lib.LayerCache,
  impl: str = "triton",
) -> tuple[jax.Array, cache_lib.LayerCache]:
  """Writes A pairs of the target's features bf16[B A E] and the tokens i32[B A].

  They are at positions start, start + 1, ..., and in these slots. Returns the next feature
  bf16[B 1 D] at pair `last` i32[B] of them, and the cache.
  """

  operations = kernels_lib.of(impl)

  def run(weights, read, tokens, start, last, cache):
    method = drafter_lib.Drafter.features
    h = _apply(config, weights, operations, method, read)
    pairs = start[:, None] + jnp.arange(tokens.shape[1])
    nodes = kernels_lib.chain(start + last, 1)
    return _step(operations, config, weights, h, tokens, pairs, nodes, cache, start, last)

  return _on_device(run, weights, read, tokens, start, last, cache)


def logits(
  config: drafter_lib.DrafterConfig, weights: Weights, h: jax.Array, impl: str = "triton"
) -> jax.Array:
  """f32[... U] of features bf16[... D]; see `Drafter.logits`."""

  operations = kernels_lib.of(impl)

  def run(weights, h):
    method = drafter_lib.Drafter.logits
    return _apply(config, weights, operations, method, weights.head, h)

  return _on_device(run, weights, h)


def _on_device(f: Callable, weights: Weights, *args):
  if axes.mesh_of_compiler() is not None:
    # XLA cannot partition kernels, not even over an axis of one device.
    spec = jax.sharding.PartitionSpec()
    f = jax.shard_map(
      f, in_specs=spec, out_specs=spec, axis_names={axes.MODEL}, check_vma=False
    )
  like = jax.tree.leaves(args)
  return jax.tree.map(lambda x: varying.like(x, *like), f(weights, *args))


def _apply(config, weights: Weights, impl: types.ModuleType, method, *args):
  """Calls a method of the drafter whose products are kernels."""
  unused = weights.params["post_norm"]["scale"]
  free = [weights.count]  # for one product: two might run at the same time

  def fc(x, w, bias):
    if not free:
      return drafter_lib.affine(x, w, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = impl.project(flat, w, weights.bias, unused, free.pop()).sums
    return y.reshape(*x.shape[:-1], -1)

  def head(h, w):
    flat = kernels_lib.plain(h.reshape(-1, h.shape[-1]))
    return impl.head(flat, w, config.layer.norm_eps).reshape(*h.shape[:-1], -1)

  module = drafter_lib.Drafter(config, fc, head)
  return module.apply({"params": weights.params}, *args, method=method)


def _step(
  impl: types.ModuleType,
  config: drafter_lib.DrafterConfig,
  weights: Weights,
  h: jax.Array,
  tokens: jax.Array,
  positions: jax.Array,
  nodes: kernels_lib.Nodes,
  cache: cache_lib.LayerCache,
  start: jax.Array,
  chosen: jax.Array | None = None,
):
  """`chosen` i32[B]: the one pair of each request that attends."""
  (B, _), c, w, count = tokens.shape, config.layer, weights.params, weights.count
  method = drafter_lib.Drafter.inputs
  x, residual = _apply(config, weights, impl, method, weights.target, h, tokens)
  at = kernels_lib.Places(*weights.rotations, positions.reshape(-1), start, cache.pages)
  x = kernels_lib.plain(x.reshape(-1, x.shape[-1]))
  matrices = few_rows.projections(c, w["attention"])
  q, k, v = impl.qkv(x, matrices, at, count, cache.k, cache.v, c.norm_eps)
  q = q.reshape(B, -1, *q.shape[1:])
  if chosen is not None:
    one = chosen[:, None, None]
    q = jnp.take_along_axis(q, one[..., None], 1)
    residual = jnp.take_along_axis(residual, one, 1)
  out = impl.attend(q, k, v, nodes, cache.pages, count)
  out, residual = (x.reshape(B * q.shape[1], -1) for x in (out, residual))
  scale, mlp = w["post_norm"]["scale"], w["mlp"]
  y = impl.project(out, w["attention"]["o_proj"], residual, scale, count)
  hidden = impl.gate_up(y, mlp["gate_proj"], mlp["up_proj"], count, c.norm_eps)
  y = impl.project(hidden, mlp["down_proj"], y.sums, scale, count).sums
  return y.reshape(B, -1, c.width), cache.replace(pool=cache_lib.Pool(k, v))
