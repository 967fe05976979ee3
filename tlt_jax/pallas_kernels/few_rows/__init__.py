"""A decoder for few rows, in bfloat16: kernels for NVIDIA GPUs.

    enter, (qkv, attend, project (of O), gate_up, project (of down)) per layer, head

Several devices have parts of every matrix. They `enter` and `project` by a `product` of
what each has, and by a `join` of all devices' products, which adds them in order.

A row's bits do not depend on the other rows of the batch, nor on how many there are: the
nodes of chains and trees get the bits of plain decoding steps.

Between kernels a row is represented by its bfloat16 residual sum, that sum times the scale
of the next RMSNorm, and sums of squares per tile of `TILE` columns. Matrices are (outputs,
inputs), as everywhere.
"""

import importlib
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

MOST = 128  # rows, at most
TILE = 64  # columns of a product


class Rows(NamedTuple):
  sums: jax.Array  # bf16[M D]
  scaled: jax.Array  # bf16[M D]  times the scale of the next norm
  squares: jax.Array | None  # f32[D/TILE M]  sums over a tile's columns; None: no norm

  def inverse_rms(self, eps: float) -> jax.Array:
    """f32[M 1]; not bit for bit the same in every batch."""
    if self.squares is None:
      return jnp.ones((len(self.scaled), 1))
    mean = jnp.sum(self.squares, 0) / self.sums.shape[-1]
    return jax.lax.rsqrt(mean + eps)[:, None]

  def normed(self, eps: float) -> jax.Array:
    """The norm of the rows, bf16[M D], by `inverse_rms`."""
    return (self.scaled.astype(jnp.float32) * self.inverse_rms(eps)).astype(self.sums.dtype)


def plain(x: jax.Array) -> Rows:
  """Rows bf16[M *] that the next kernel takes as they are, without a norm."""
  return Rows(x, x, None)


class Projections(NamedTuple):
  q: jax.Array  # bf16[N*H D]
  k: jax.Array  # bf16[K*H D]
  v: jax.Array  # bf16[K*H D]
  bias: tuple[jax.Array, jax.Array, jax.Array] | None = None  # bf16[heads*H] each
  norm: tuple[jax.Array, jax.Array] | None = None  # bf16[H], scales of q and k


class Places(NamedTuple):
  """Where rows are in their sequences, and in the cache."""

  cos: jax.Array  # f32[S or more, H/2]  of RoPE, at positions 0, 1, ...
  sin: jax.Array  # f32[S or more, H/2]
  position: jax.Array  # i32[M]; S or more: a row without a slot
  start: jax.Array  # i32[B]  the slot of the first of a request's M / B rows
  pages: jax.Array  # i32[B S/L]


class Nodes(NamedTuple):
  """The J nodes of each request's tree, as paths from its root to its leaves.

  A plain step has one node, a chain one path. Plain decoding would have the tokens of a
  path in slots start, start + 1, ...; here they are in slots start + node.

  Worked row, start = 10, of nodes 0 1 2 3 4 with parents . 0 0 1 1:

      paths   2 leaf paths are shown, of 3
      path    10 12 12    to node 2, padded by its leaf
      path    10 11 13    to node 3
      owner   1 1 0 1 2   the path of each node; of several that pass it, one
  """

  start: jax.Array  # i32[B]  the first node's slot
  depth: jax.Array  # i32[B J]
  owner: jax.Array  # i32[B J]
  path: jax.Array  # i32[B L A]  slots of path l at depth 0, 1, ..., A - 1
  paths: jax.Array  # i32[B]  of L, which exist


def chain(start: jax.Array, count: int) -> Nodes:
  """`count` nodes in a row; of a plain step one."""
  (B,) = start.shape
  depth = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (B, count))
  return Nodes(
    start,
    depth,
    jnp.zeros_like(depth),
    (start[:, None] + depth)[:, None],
    jnp.ones_like(start),
  )


def tree(start: jax.Array, depth: jax.Array, ancestors: jax.Array, deepest: int) -> Nodes:
  """The nodes of trees.

  Takes start i32[B], depth i32[B J] of at most `deepest`, and bool[B J J]: which node i
  descends from which node j, or is it.
  """
  B, J = depth.shape
  chex.assert_shape(ancestors, (B, J, J))
  leaf = jnp.sum(ancestors, 1) == 1  # nobody's ancestor but its own
  number = jnp.cumsum(leaf, 1) - 1  # of each leaf
  node = jnp.arange(J)
  by_number = leaf[:, None] & (number[:, None] == node[:, None])  # bool[B L J]
  is_on = jnp.any(by_number[..., None] & ancestors[:, None], 2)  # bool[B L J]
  at = is_on[:, :, None] & (depth[:, None, None] == jnp.arange(deepest + 1)[:, None])
  its_leaf = jnp.argmax(by_number, -1)[..., None]
  path = jnp.where(jnp.any(at, -1), jnp.argmax(at, -1), its_leaf)
  return Nodes(
    start,
    depth,
    jnp.argmax(is_on, 1).astype(jnp.int32),
    (start[:, None, None] + path).astype(jnp.int32),
    jnp.sum(leaf, 1).astype(jnp.int32),
  )


def of(impl: str):
  return importlib.import_module(f"{__name__}.{impl}")
