"""A pass of the target over few rows, by kernels whose bits do not depend on the rows.

Verification of chains and trees then computes, bit for bit, what plain decoding does; see
`pallas_kernels.few_rows`. The learner, what does not fit, and prompts where other passes do
not fit use `target.Target`.
"""

from collections.abc import Callable, Sequence
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.models import target
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
  n = 1 if mesh is None else mesh.shape[axes.MODEL]
  page, H = kv.pools[0].k.shape[2:]
  return (
    rows <= few_rows.MOST
    and config.dtype == "bfloat16"
    and families.find(config.architecture).block is layers.Block
    and not config.layers
    and config.query_scalar is None
    and not any(size % few_rows.TILE for size in (config.width, page))
    and config.mlp_width % (n * few_rows.TILE) == 0
    and config.num_kv_heads % n == 0
    and config.vocab_size >= n * few_rows.TILE
    and H in (64, 128)
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
  """Runs the target on tokens i32[B J], node j in slot start + j, and writes the KV.

  Inside a function that is automatic over the mesh axis `model`, each of its devices
  computes the heads, hidden units and logits that it has the weights of.
  """
  run = functools.partial(_run, few_rows.of(impl), config, taps)
  mesh = axes.mesh_of_compiler()
  if mesh is not None:  # XLA cannot partition kernels, not even over an axis of one device
    run = _over_devices(run, config, mesh, kv)
  made = run(params, kv, tokens, positions, nodes, rotations)
  logits, final, tapped, pools = jax.tree.map(
    lambda x: varying.like(x, tokens, positions), made
  )
  logits = layers.mask_unused(logits, config)
  return Pass(logits, final, tapped, kv.replace(pools=pools))


def _over_devices(
  run: Callable, config: config_lib.ModelConfig, mesh: AbstractMesh, kv: cache_lib.KVCache
) -> Callable:
  """Maps `_run` over the axis `model`."""
  shardings = axes.shardings(mesh, axes.ROLLOUT, target.abstract_params(config))
  weights, whole = jax.tree.map(lambda x: x.spec, shardings), PartitionSpec()
  pools = PartitionSpec(None, axes.MODEL)
  logits = PartitionSpec(None, None, axes.model_if_divides(mesh, config.vocab_size))
  return jax.shard_map(
    run,
    in_specs=(weights, kv.replace(pools=pools, pages=whole), whole, whole, whole, whole),
    out_specs=(logits, whole, whole, pools),
    axis_names={axes.MODEL},
    check_vma=False,
  )


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
  (B, J), K, H = tokens.shape, *kv.pools[0].k.shape[1::2]  # heads of this device
  devices = config.num_kv_heads // K
  N = config.num_heads // devices
  eps, params = config.norm_eps, jax.tree.map(lambda x: x.astype(config.dtype), params)
  at = few_rows.Places(*rotations, positions.reshape(-1), nodes.start, kv.pages)
  most = max(N + 2 * K, *(x // few_rows.TILE for x in (config.width, config.mlp_width)))
  counts = max(most, B * J * K)
  blocks = [params[f"layer_{i}"] for i in range(config.num_layers)]
  following = [w["input_norm"]["scale"] for w in blocks[1:]]
  following.append(params["final_norm"]["scale"])
  embedding, scale = params["embedding"], blocks[0]["input_norm"]["scale"]
  if len(embedding) == config.vocab_size:
    x, count = impl.enter(tokens.reshape(-1), embedding, scale, counts)
  else:
    own = tokens.reshape(-1) - jax.lax.axis_index(axes.MODEL) * len(embedding)
    found = embedding.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    parts = jax.lax.all_gather(found, axes.MODEL)  # zeros but for one
    x = impl.join(parts, jnp.zeros_like(found), scale)
    count = jnp.zeros(counts, jnp.int32)

  def project(x, w, residual, scale):
    if devices == 1:
      return impl.project(x, w, residual, scale, count)
    # Not a sum over the devices, whose order would depend on the number of rows.
    parts = jax.lax.all_gather(impl.product(x, w, count), axes.MODEL)
    return impl.join(parts, residual, scale)

  pools, tapped = [], []
  for i, (w, pool) in enumerate(zip(blocks, kv.pools, strict=True)):
    with jax.named_scope(f"layer_{i}"):
      matrices = projections(config, w["attention"])
      q, k, v = impl.qkv(x, matrices, at, count, pool.k, pool.v, eps)
      pools.append(cache_lib.Pool(k, v))
      out = impl.attend(q.reshape(B, J, N, H), k, v, nodes, kv.pages, count)
      o, scale = w["attention"]["o_proj"], w["post_norm"]["scale"]
      x = project(out.reshape(B * J, -1), o, x.sums, scale)
      hidden = impl.gate_up(x, w["mlp"]["gate_proj"], w["mlp"]["up_proj"], count, eps)
      x = project(hidden, w["mlp"]["down_proj"], x.sums, following[i])
    if i in taps:
      tapped.append(x.sums)
  head = params["embedding" if config.tie_embeddings else "head"]
  logits = impl.head(x, head, eps)

  def by_node(y):
    return y.reshape(B, J, -1)

  tapped = by_node(jnp.concatenate(tapped, -1)) if tapped else None
  return by_node(logits), by_node(x.normed(eps)), tapped, tuple(pools)


def projections(config: config_lib.ModelConfig, w: dict) -> few_rows.Projections:
  bias = tuple(w[f"{name}_bias"] for name in "qkv") if config.qkv_bias else None
  norm = tuple(w[f"{n}_norm"]["scale"] for n in "qk") if config.qk_norm else None
  return few_rows.Projections(w["q_proj"], w["k_proj"], w["v_proj"], bias, norm)
