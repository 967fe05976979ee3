"""The products of a mixture of experts: each expert's with the rows that chose it.

Each expert's hidden units are split over the axis `model`, as those of a dense MLP: all
devices then have the same work, whatever the router chooses, and no row moves.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from tlt_jax import axes
from tlt_jax import few_rows_matmul
from tlt_jax.pallas_kernels import varying

linear = few_rows_matmul.linear
# Most rows for which GPUs multiply all experts with all rows: the products take about as
# long as reading the weights.
_DENSE_ROWS = 512
# Rows of a block, which has one expert: more make more padding, fewer read weights more
# often.
_LEAST_BLOCK, _MOST_BLOCK = 128, 512


@jax.custom_vjp
def mix(
  x: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  chosen: jax.Array,
  weight: jax.Array,
) -> jax.Array:
  """The weighted sums of the chosen experts' outputs, f[R D], summed in float32.

  Its gradient keeps only the arguments. XLA's of `jax.lax.ragged_dot` multiplies all
  experts with all rows, and so does the product itself on CPUs and GPUs.

  Args:
    x: f[R D]
    gate: f[E F D]
    up: f[E F D]
    down: f[E D F]
    chosen: i32[R k]
    weight: f[R k]
  """
  return _on_devices(_sums, False, x, gate, up, down, chosen, weight)


def _on_devices(f: Callable, is_gradient: bool, *args: jax.Array):
  """Calls `f` with the axis over which hidden units are split, and each device's part.

  It takes the arguments of `mix`, or those of `_gradients`, which has their results.
  """
  mesh = axes.mesh_of_compiler()
  if mesh is None:
    return f(None, *args)
  axis, whole = axes.model_if_divides(mesh, args[1].shape[1]), PartitionSpec()
  of_matrices = PartitionSpec(None, axis), PartitionSpec(None, axis)
  of_matrices += (PartitionSpec(None, None, axis),)
  run = jax.shard_map(
    functools.partial(f, axis),
    in_specs=(whole, *of_matrices, *(whole for _ in args[4:])),
    out_specs=(whole, *of_matrices, whole) if is_gradient else whole,
    axis_names={axes.MODEL},
    check_vma=False,
  )
  return jax.tree.map(lambda x: varying.like(x, *args), run(*args))


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
  return x if axis is None else jax.lax.psum(x, axis)


def _sums(axis, x, gate, up, down, chosen, weight) -> jax.Array:
  args = x, gate, up, down, chosen
  if len(x) > _DENSE_ROWS:
    outputs = _in_blocks(*args)
  else:
    on_gpu = _gathered if chosen.size <= len(gate) else _dense
    outputs = jax.lax.platform_dependent(*args, cuda=on_gpu, default=_in_blocks)
  return _sum(_weighted(outputs, weight).astype(x.dtype), axis)


def _weighted(outputs: jax.Array, weight: jax.Array) -> jax.Array:
  return jnp.sum(outputs.astype(jnp.float32) * weight[..., None].astype(jnp.float32), 1)


def _gathered(x, gate, up, down, chosen) -> jax.Array:
  """Outputs f[R k D] that read the chosen experts only.

  XLA reads gathered matrices within these sums on GPUs, and copies them for products.
  """
  # Rows with the same expert follow each other, and find it in the cache.
  order = jnp.argsort(chosen.reshape(-1)) if len(x) > 1 else np.arange(chosen.size)
  place = jnp.argsort(order) if len(x) > 1 else order
  experts = chosen.reshape(-1)[order]

  def times(w, rows):
    made = w[experts].astype(jnp.float32) * rows[:, None].astype(jnp.float32)
    return jnp.sum(made, -1).astype(x.dtype)

  rows = x[order // chosen.shape[1]]
  out = times(down, jax.nn.silu(times(gate, rows)) * times(up, rows))
  return out[place].reshape(*chosen.shape, -1)


def _dense(x, gate, up, down, chosen) -> jax.Array:
  """Outputs f[R k D] of products of all experts with all rows."""

  def project(w):
    return jnp.einsum("rd,efd->erf", x, w)

  out = jnp.einsum("erf,edf->erd", jax.nn.silu(project(gate)) * project(up), down)
  return out[chosen, jnp.arange(len(x))[:, None]]


class _Blocks(NamedTuple):
  """Pairs of a row and an expert, by expert, in blocks of one expert each."""

  size: int
  most: int  # blocks
  count: jax.Array  # i32[]  of blocks that are not empty
  pairs: jax.Array  # i32[P+size]  of rows and choices, sorted; zeros at the end
  place: jax.Array  # i32[P]  of each pair in `pairs`
  expert: jax.Array  # i32[most]
  start: jax.Array  # i32[most]  in `pairs`
  rows: jax.Array  # i32[most]  of a block that are its own; others follow


def _make_blocks(chosen: jax.Array, E: int) -> _Blocks:
  P, R = chosen.size, len(chosen)
  usual = 1 << max(P // E // 2, 1).bit_length() - 1
  size = min(R, max(_LEAST_BLOCK, min(usual, _MOST_BLOCK)))
  most = min(P, E if size == R else P // size + E)
  experts = chosen.reshape(-1)
  pairs = jnp.argsort(experts)
  sizes = jnp.bincount(experts, length=E)
  blocks = -(-sizes // size)
  ends, i = jnp.cumsum(blocks), jnp.arange(most)
  expert = jnp.minimum(jnp.sum(ends <= i[:, None], 1), E - 1)
  before = (i - (ends - blocks)[expert]) * size
  rows = jnp.clip(sizes[expert] - before, 0, size)
  start = jnp.where(rows > 0, (jnp.cumsum(sizes) - sizes)[expert] + before, P)
  # On GPUs the host would wait for the number after every block.
  count = jax.lax.platform_dependent(
    ends[-1], cuda=lambda n: jnp.full_like(n, most), default=lambda n: n
  )
  padded, place = jnp.pad(pairs, (0, size)), jnp.argsort(pairs)
  return _Blocks(size, most, count, padded, place, expert, start, rows)


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, 0)


def _in_step(i: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
  """All experts' matrices, as step i of a loop slices them.

  CPUs multiply bfloat16 in float32: without the barrier XLA casts all experts beforehand.
  """
  return jax.lax.platform_dependent(
    i,
    matrices,
    cpu=lambda *args: jax.lax.optimization_barrier(args)[1],
    default=lambda _, matrices: matrices,
  )


def _in_blocks(x, gate, up, down, chosen) -> jax.Array:
  """Outputs f[R k D], block by block.

  A block's last rows may be the next one's, which then overwrites them.
  """
  k, blocks = chosen.shape[1], _make_blocks(chosen, len(gate))

  def step(i, out):
    rows = x[_slice(blocks.pairs, blocks.start[i], blocks.size) // k]
    every = _in_step(i, gate, up, down)
    w_gate, w_up, w_down = (w[blocks.expert[i]] for w in every)
    hidden = jax.nn.silu(linear(rows, w_gate)) * linear(rows, w_up)
    return _put(out, linear(hidden, w_down), blocks.start[i])

  out = jnp.zeros((len(blocks.pairs), x.shape[1]), x.dtype)
  out = jax.lax.fori_loop(0, blocks.count, step, out)
  return out[blocks.place].reshape(*chosen.shape, -1)


def _forward(*args):
  return mix(*args), args


def _backward(args, dy):
  with jax.default_matmul_precision("highest" if dy.dtype == jnp.float32 else "default"):
    dx, *dmatrices, dweight = _on_devices(_gradients, True, *args, dy)
  return dx, *dmatrices, None, dweight


def _gradients(axis, x, gate, up, down, chosen, weight, dy):
  """Computes the hidden units again. Gradients of matrices are summed in float32."""
  k, blocks = chosen.shape[1], _make_blocks(chosen, len(gate))
  weights = jnp.asarray(weight.reshape(-1), jnp.float32)

  def add(total, a, b, e):
    """Adds a product over rows to an expert's gradient."""
    made = jnp.matmul(a.T, b, preferred_element_type=jnp.float32)
    return total.at[e].add(made)

  def step(i, carry):
    dx, dweight, dgate, dup, ddown = carry
    start, e = blocks.start[i], blocks.expert[i]
    pairs = _slice(blocks.pairs, start, blocks.size)
    is_own = jnp.arange(blocks.size) < blocks.rows[i]
    by = jnp.where(is_own, weights[pairs], 0.0)[:, None].astype(x.dtype)
    rows, dout = x[pairs // k], dy[pairs // k]
    w_gate, w_up, w_down = (w[e] for w in _in_step(i, gate, up, down))
    g, u = linear(rows, w_gate), linear(rows, w_up)
    hidden, back = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g, u)
    dhidden = dout @ w_down
    dg, du = back(dhidden * by)
    dpair = jnp.sum((hidden * dhidden).astype(jnp.float32), -1)
    return (
      _put(dx, dg @ w_gate + du @ w_up, start),
      _put(dweight, dpair, start),
      add(dgate, dg, rows, e),
      add(dup, du, rows, e),
      add(ddown, dout * by, hidden, e),
    )

  P = len(blocks.pairs)
  carry = jnp.zeros((P, x.shape[1]), x.dtype), jnp.zeros(P)
  carry += tuple(jnp.zeros(w.shape) for w in (gate, up, down))
  dx, dweight, *dmatrices = jax.lax.fori_loop(0, blocks.count, step, carry)
  dx = dx[blocks.place].reshape(*chosen.shape, -1).astype(jnp.float32)
  dweight = dweight[blocks.place].reshape(chosen.shape).astype(weight.dtype)
  dmatrices = (d.astype(w.dtype) for d, w in zip(dmatrices, (gate, up, down), strict=True))
  dx = jnp.sum(dx, 1).astype(x.dtype)
  return _sum(dx, axis), *dmatrices, _sum(dweight, axis)


mix.defvjp(_forward, _backward)
