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

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.models import target

# Rows of a pass that is faster so: below, the library reads the weights as they lie;
# beyond, packing is a small part of it.
ROWS = range(4, 49)

# How many of a matrix's first axes are its input's; other parameters stay as they are.
_INPUT_AXES = {
  **dict(q_proj=1, k_proj=1, v_proj=1, o_proj=2),
  **dict(gate_proj=1, up_proj=1, down_proj=1, head=1),
}


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
  if params is None or not wanted(config, mesh):
    return None
  leaves, tree = jax.tree_util.tree_flatten_with_path(params)
  inputs = tuple(_INPUT_AXES.get(path[-1].key, 0) for path, _ in leaves)
  leaves = [x for _, x in leaves]
  turn = _turning(mesh, tuple(filter(None, inputs)))
  matrices = [x for x, n in zip(leaves, inputs, strict=True) if n]
  exist = isinstance(matrices[0], jax.Array)
  turned = turn(matrices) if exist else turn.eval_shape(matrices)
  return Transposed(
    tree.unflatten(
      turned.pop(0) if n else x for x, n in zip(leaves, inputs, strict=True)
    )
  )


def wanted(config: config_lib.ModelConfig, mesh: Mesh | AbstractMesh) -> bool:
  """Whether passes are faster with transposed weights: on CPUs that split none."""
  if isinstance(mesh, AbstractMesh) or mesh.shape[axes.MODEL] > 1:
    return False
  known = families.find(config.architecture).block is layers.Block
  return known and mesh.devices.flat[0].platform == "cpu"


@functools.lru_cache
def _turning(mesh: Mesh, inputs: tuple[int, ...]) -> Callable[[list], list]:
  """The program that puts the axes of matrices' outputs first.

  Args:
    mesh: on every device of which they are whole
    inputs: how many axes the input of each has
  """

  def turn(x, n):
    return jnp.transpose(x, (*range(n, x.ndim), *range(n)))

  return jax.jit(
    lambda matrices: list(map(turn, matrices, inputs)), out_shardings=axes.sharding(mesh)
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
