"""Keeps large arguments of TPU kernels in HBM."""

import jax
from jax.experimental.pallas import tpu as pltpu


def pinned(x: jax.Array) -> jax.Array:
  """Returns `x`, which kernels then read and write in HBM; for use inside a jit.

  Where a layer's cache fits into VMEM (128 MiB on a v6e), XLA moves all of it there ahead
  of a kernel that reads or writes some blocks of it, and back again: three times the bytes
  of the blocks. Outside a jit a kernel is a program of its own, and nothing is moved.
  """
  if isinstance(x, jax.core.Tracer):
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)
  return x
