import jax
from jax.experimental.pallas import tpu as pltpu


def pinned(x: jax.Array) -> jax.Array:
  """Returns `x` with a constraint, under jit, to stay in HBM for kernels.

  If a layer's cache fits into VMEM (128 MiB on a v6e), XLA otherwise copies all of it there
  and back around a kernel that reads or writes some blocks of it.
  """
  if isinstance(x, jax.core.Tracer):
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)
  return x
