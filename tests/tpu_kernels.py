"""Pallas kernels for TPUs without one: lowered to what a TPU's compiler is given."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh

KINDS = ("TPU v5 lite", "TPU v6 lite")  # v5e and v6e


def lowered(function: Callable, kind: str, *args) -> str:
  """The program of a function on one device, as text.

  Args:
    function: to lower; it must choose its Pallas kernels itself
    kind: of the device, as jax names it
    args: arrays or their shapes
  """
  mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "tpu"))
  with jax.sharding.use_abstract_mesh(mesh):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
