"""A pass of the target over few rows, by kernels whose bits do not depend on the rows.

Verification of chains and trees then computes, bit for bit, what plain decoding does; see
`pallas_kernels.few_rows`. Prompts, the learner, and what does not fit use `target.Target`.
"""

from collections.abc import Sequence
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import varying


class Pass(NamedTuple):
  logits: jax.Array  # f32[B J V]
  final: jax.Array  # bf16[B J D]  after the final norm
  tapped: jax.Array | None  # bf16[B J len(taps)*D]  the residual stream after layers
  kv: cache_lib.KVCache


def fits(config: config_lib.ModelConfig, kv: cache_lib.KVCache, rows: int) -> bool:
  """Whether there are kernels for a model and a number of rows, on this device."""
  mesh = axes.mesh_of_compiler()
  page, H = kv.pools[0].k.shape[2:]
  sizes = config.width, config.mlp_width, config.vocab_size, page
  return (
    rows <= few_rows.MOST
    and config.dtype == "bfloat16"
    and families.find(config.architecture).block is layers.Block
    and not any(size % few_rows.TILE for size in sizes)
    and H in (64, 128)
    and (mesh is None or mesh.shape[axes.MODEL] == 1)
    and implementations.choose(kv.kernels) == "triton"
  )


def run(
  config: config_lib.ModelConfig,
  params: dict,
  kv: cache_lib.KVCache,
  tokens: jax.Array,
  positions: jax.Array,
  nodes: few_rows.Nodes,
  rotations: layers.Rotation,
  taps: Sequence[int] = (),
  impl: str = "triton",
) -> Pass:
  """Runs the target on tokens i32[B J], node j in slot start + j, and writes the KV."""
  whole = functools.partial(_run, few_rows.of(impl), config, taps)
  if axes.mesh_of_compiler() is not None:
    # XLA cannot partition kernels, not even over an axis of one device.
    spec = jax.sharding.PartitionSpec()
    whole = jax.shard_map(
      whole, in_specs=spec, out_specs=spec, axis_names={axes.MODEL}, check_vma=False
    )
  made = whole(params, kv, tokens, positions, nodes, rotations)
  logits, final, tapped, pools = jax.tree.map(
    lambda x: varying.like(x, tokens, positions), made
  )
  return Pass(logits, final, tapped, kv.replace(pools=pools))


def _run(
  impl: types.ModuleType,
  config: config_lib.ModelConfig,
  taps: Sequence[int],
  params: dict,
  kv: cache_lib.KVCache,
  tokens: jax.Array,
  positions: jax.Array,
  nodes: few_rows.Nodes,
  rotations: layers.Rotation,
):
  (B, J), N, K, H = tokens.shape, config.num_heads, config.num_kv_heads, config.head_dim
  eps, params = config.norm_eps, jax.tree.map(lambda x: x.astype(config.dtype), params)
  at = few_rows.Places(*rotations, positions.reshape(-1), nodes.start, kv.pages)
  most = max(N + 2 * K, config.width // few_rows.TILE, config.mlp_width // few_rows.TILE)
  blocks = [params[f"layer_{i}"] for i in range(config.num_layers)]
  following = [w["input_norm"]["scale"] for w in blocks[1:]]
  following.append(params["final_norm"]["scale"])
  first = blocks[0]["input_norm"]["scale"]
  counts = max(most, B * J * K)
  x, count = impl.enter(tokens.reshape(-1), params["embedding"], first, counts)
  pools, tapped = [], []
  for i, (w, pool) in enumerate(zip(blocks, kv.pools, strict=True)):
    with jax.named_scope(f"layer_{i}"):
      matrices = projections(config, w["attention"])
      q, k, v = impl.qkv(x, matrices, at, count, pool.k, pool.v, eps)
      pools.append(cache_lib.Pool(k, v))
      out = impl.attend(q.reshape(B, J, N, H), k, v, nodes, kv.pages, count)
      o, scale = w["attention"]["o_proj"], w["post_norm"]["scale"]
      x = impl.project(out.reshape(B * J, -1), o, x.sums, scale, count)
      hidden = impl.gate_up(x, w["mlp"]["gate_proj"], w["mlp"]["up_proj"], count, eps)
      x = impl.project(hidden, w["mlp"]["down_proj"], x.sums, following[i], count)
    if i in taps:
      tapped.append(x.sums)
  head = params["embedding" if config.tie_embeddings else "head"]
  logits = layers.mask_unused(impl.head(x, head, eps), config)

  def by_node(y):
    return y.reshape(B, J, -1)

  tapped = by_node(jnp.concatenate(tapped, -1)) if tapped else None
  return by_node(logits), by_node(x.normed(eps)), tapped, tuple(pools)


def projections(config: config_lib.ModelConfig, w: dict) -> few_rows.Projections:
  bias = tuple(w[f"{name}_bias"] for name in "qkv") if config.qkv_bias else None
  norm = tuple(w[f"{n}_norm"]["scale"] for n in "qk") if config.qk_norm else None
  return few_rows.Projections(w["q_proj"], w["k_proj"], w["v_proj"], bias, norm)
