"""Weights that lie transposed, for passes over few rows on CPUs.

A decoding pass multiplies a few rows (live requests times drafted tokens) with every
weight. On a CPU, XLA hands such a product to a library that packs the right operand, the
weights, anew in each call, which takes longer than the product. With the operands changed
over, `(w.T @ x.T).T`, it packs the few rows instead and reads `w.T` as it lies, if that is
an array of its own. On accelerators nothing is to be gained.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import traverse_util
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import hf_tensors
from tlt_jax.models import layers
from tlt_jax.models import target

# Rows of a pass that is faster so: below, the library reads the weights as they lie;
# beyond, packing is a small part of it.
ROWS = range(4, 49)


@flax.struct.dataclass
class Transposed:
  """Parameters of the target whose matrices have the axes of their output first."""

  params: Any


def transposed(
  config: config_lib.ModelConfig, mesh: Mesh | AbstractMesh, params: Any
) -> Transposed | None:
  """Transposes the target's matrices; None where passes are no faster for it.

  It takes as much memory again as they do.

  Args:
    config: the target's
    mesh: of the slices
    params: laid out by `axes.ROLLOUT`, or their shapes and shardings; None: of no model
  """
  if params is None or not _wanted(config, mesh):
    return None
  flat, layouts = traverse_util.flatten_dict(params, sep="/"), hf_tensors.layouts(config)
  orders = {path: layouts[path].permutation for path in flat}
  orders = {path: order for path, order in orders.items() if order != tuple(sorted(order))}
  matrices = [flat[path] for path in orders]
  turn = _turning(mesh, tuple(orders.values()))
  exist = isinstance(matrices[0], jax.Array)
  turned = turn(matrices) if exist else turn.eval_shape(matrices)
  flat |= zip(orders, turned, strict=True)
  return Transposed(traverse_util.unflatten_dict(flat, sep="/"))


def _wanted(config: config_lib.ModelConfig, mesh: Mesh | AbstractMesh) -> bool:
  """Whether passes are faster with transposed weights: on CPUs that split none."""
  if isinstance(mesh, AbstractMesh) or mesh.shape[axes.MODEL] > 1:
    return False
  known = families.find(config.architecture).block is layers.Block
  return known and mesh.devices.flat[0].platform == "cpu"


@functools.lru_cache
def _turning(
  mesh: Mesh, orders: tuple[tuple[int, ...], ...]
) -> Callable[[list], list]:
  """The program that puts the axes of matrices in these orders, whole on every device."""
  return jax.jit(
    lambda matrices: list(map(jnp.transpose, matrices, orders)),
    out_shardings=axes.sharding(mesh),
  )


def apply(config: config_lib.ModelConfig, params: Any, *args, method) -> Any:
  """Calls a method of the target with its parameters, however they lie.

  Args:
    config: the target's
    params: its parameters, or `Transposed`
    args, method: of `target.Target`
  """
  lie_transposed = isinstance(params, Transposed)
  params = params.params if lie_transposed else params
  model = target.Target(config, transposed=lie_transposed)
  return model.apply({"params": params}, *args, method=method)
