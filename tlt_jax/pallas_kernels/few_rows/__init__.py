"""A decoder layer for few rows, in bfloat16: five kernels for NVIDIA GPUs.

    qkv, attend, project (of O), gate_up, project (of down)

A row's bits do not depend on the other rows of the batch: verifying a chain gives the bits
of plain decoding steps.

Between kernels a row is represented by its bfloat16 residual sum, that sum times the scale
of the next RMSNorm, and sums of squares per tile of `TILE` columns.
"""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

MOST = 128  # rows, at most
TILE = 64  # columns of a product


class Rows(NamedTuple):
  sums: jax.Array  # bf16[M D]
  scaled: jax.Array  # bf16[M D]  times the scale of the next norm
  squares: jax.Array  # f32[D/TILE M]  sums over the columns of a tile


class Projections(NamedTuple):
  q: jax.Array  # bf16[D N*H]
  k: jax.Array  # bf16[D K*H]
  v: jax.Array  # bf16[D K*H]
  bias: tuple[jax.Array, jax.Array, jax.Array] | None = None  # bf16[heads*H] each
  norm: tuple[jax.Array, jax.Array] | None = None  # bf16[H], scales of q and k


def of(impl: str):
  return importlib.import_module(f"{__name__}.{impl}")


def enter(x: jax.Array, scale: jax.Array) -> Rows:
  """Rows of bf16[M D], such as embeddings; `scale` bf16[D] is the next norm's."""
  wide = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(wide).reshape(len(x), -1, TILE), -1).T
  return Rows(x, (wide * scale.astype(jnp.float32)).astype(x.dtype), squares)
