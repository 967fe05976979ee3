"""The device mesh, and per phase the mesh axis of each logical axis.

`data` counts slices (replicas of the target in a rollout, FSDP shards in training), `model`
is tensor parallelism within a slice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import optax

DATA, MODEL = "data", "model"

# Logical axis of a parameter -> mesh axis; others are replicated.
Rules = Mapping[str, str]
ROLLOUT: Rules = {"vocab": MODEL, "heads": MODEL, "kv": MODEL, "mlp": MODEL}
TRAIN: Rules = {**ROLLOUT, "embed": DATA}


def make_mesh(
  model: int = 1, devices: Sequence[jax.Device] | int | None = None
) -> Mesh | AbstractMesh:
  """A (data, model) mesh; the `model` neighbouring devices of a slice.

  For `devices` None: all; a number: an abstract mesh of that size, for shapes only.

  Raises:
    ValueError: slices do not divide the devices
  """
  devices = jax.devices() if devices is None else devices
  count = devices if isinstance(devices, int) else len(devices)
  if model < 1 or count % model:
    raise ValueError(
      f"tensor_parallel={model} does not divide the {count} devices there are; take a "
      "divisor, such as 1"
    )
  shape, kinds = (count // model, model), (AxisType.Auto,) * 2
  if isinstance(devices, int):
    return AbstractMesh(shape, (DATA, MODEL), axis_types=kinds)
  return jax.make_mesh(shape, (DATA, MODEL), axis_types=kinds, devices=devices)


def sharding(mesh: Mesh, *spec: str | None) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*spec))


def model_if_divides(mesh: Mesh, size: int) -> str | None:
  """The axis `model` if it divides a dimension; None: the dimension is not split."""
  return MODEL if size % mesh.shape[MODEL] == 0 else None


def mesh_of_compiler() -> AbstractMesh | None:
  """The current mesh, if its axis `model` is left to the compiler; None otherwise."""
  mesh = jax.sharding.get_abstract_mesh()
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  return mesh if types.get(MODEL) == AxisType.Auto else None


def shardings(mesh: Mesh, rules: Rules, abstract_params: Any) -> Any:
  """The sharding of each parameter of a tree made by `abstract_params`.

  A dimension that its mesh axis does not divide (2 kv heads over 4 devices) is not split;
  flax's `logical_to_mesh_sharding` would split it.
  """

  def of_param(param):
    if not isinstance(param, nn.LogicallyPartitioned):
      return sharding(mesh)
    spec = []
    for name, size in zip(param.names, param.value.shape, strict=True):
      axis = rules.get(name)
      divides = axis is not None and size % mesh.shape[axis] == 0
      spec.append(axis if divides else None)
    return sharding(mesh, *spec)

  return jax.tree.map(
    of_param, abstract_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )


def with_shardings(mesh: Mesh, rules: Rules, abstract_params: Any) -> Any:
  params = nn.meta.unbox(abstract_params)
  return jax.tree.map(_placed, params, shardings(mesh, rules, abstract_params))


def abstract_opt_state(
  optimizer: optax.GradientTransformation, mesh: Mesh, params: Any
) -> optax.OptState:
  """Shapes and shardings of an optimizer's state; moments' are their parameters'."""

  def of_moment(moment, param):  # a MaskedNode is a parameter of another optimizer
    is_absent = isinstance(moment, optax.MaskedNode)
    return moment if is_absent else _placed(moment, param.sharding)

  return optax.tree_map_params(
    optimizer,
    of_moment,
    jax.eval_shape(optimizer.init, params),
    params,
    transform_non_params=lambda x: _placed(x, sharding(mesh)),
    is_leaf=lambda x: isinstance(x, optax.MaskedNode),
  )


def _placed(x, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
