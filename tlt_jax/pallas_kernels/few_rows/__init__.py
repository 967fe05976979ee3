"""A decoder layer for few rows, in bfloat16: five kernels of NVIDIA GPUs.

    qkv, attend, project (of O), gate_up, project (of down)

What a row gets does not depend on the rows that are computed with it: the same bits alone
and among 64. So a chain that is verified gives the bits of plain steps. `triton` has the
kernels, `ref` the same operations in jax.numpy, rounded at the same places.

Between kernels a row is kept as its bfloat16 sum, that sum times the scale of the next
RMSNorm, and sums of squares per tile of `TILE` columns.
"""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

MOST = 128  # rows
TILE = 64  # columns of a product


class Rows(NamedTuple):
  """Rows between two kernels."""

  sums: jax.Array  # bf16[M D]
  scaled: jax.Array  # bf16[M D]  times the scale of the next norm
  squares: jax.Array  # f32[D/TILE M]  sums over the columns of a tile


class Projections(NamedTuple):
  """The weights of `qkv`; bias and norm may be None."""

  q: jax.Array  # bf16[D N*H]
  k: jax.Array  # bf16[D K*H]
  v: jax.Array  # bf16[D K*H]
  bias: tuple[jax.Array, jax.Array, jax.Array] | None = None  # bf16[heads*H] each
  norm: tuple[jax.Array, jax.Array] | None = None  # bf16[H], scales of q and k


def of(impl: str):
  """The module of an implementation, "triton" or "ref", with the five operations."""
  return importlib.import_module(f"{__name__}.{impl}")


def enter(x: jax.Array, scale: jax.Array) -> Rows:
  """Rows bf16[M D] that no kernel made, such as embeddings.

  Args:
    scale: bf16[D] of the next norm
  """
  wide = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(wide).reshape(len(x), -1, TILE), -1).T
  return Rows(x, (wide * scale.astype(jnp.float32)).astype(x.dtype), squares)
