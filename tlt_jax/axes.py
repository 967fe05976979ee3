"""The device mesh, and per phase which mesh axis each logical axis is split on.

One mesh for everything: `data` counts slices (replicas of the target in a
rollout, FSDP shards in training), `model` is tensor parallelism within a slice.
One parameter tree, resharded by rule when the phase changes.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, MODEL = "data", "model"

# Logical axis of a parameter -> mesh axis. What is not named is replicated.
Rules = Mapping[str, str]
ROLLOUT: Rules = {"vocab": MODEL, "heads": MODEL, "kv": MODEL, "mlp": MODEL}
TRAIN: Rules = {**ROLLOUT, "embed": DATA}


def make_mesh(model: int = 1, devices=None) -> Mesh:
  """A (data, model) mesh over all devices, `model` neighbours to a slice."""
  devices = jax.devices() if devices is None else devices
  if model < 1 or len(devices) % model:
    raise ValueError(
      f"tensor parallelism over {model} devices does not divide the "
      f"{len(devices)} devices there are"
    )
  shape = (len(devices) // model, model)
  return jax.make_mesh(
    shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices
  )


def sharding(mesh: Mesh, *spec) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(mesh: Mesh, rules: Rules, abstract_params):
  """A NamedSharding for each parameter of a tree made by `abstract_params`.

  An axis that its mesh axis does not divide (2 kv heads over 4 devices) stays
  whole.
  """

  def one(param):
    if not isinstance(param, nn.LogicallyPartitioned):
      return sharding(mesh)
    axes = (rules.get(name) for name in param.names)
    return sharding(
      mesh,
      *(
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, param.value.shape, strict=True)
      ),
    )

  return jax.tree.map(
    one, abstract_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )


def like_params(opt_state, param_shardings, replicated):
  """Places each moment of an abstract optimizer state like its parameter.

  Its parameter is the one whose path ends the moment's own; the rest is replicated.
  """
  by_path = dict(jax.tree_util.tree_leaves_with_path(param_shardings))

  def one(path, x):
    suffixes = (path[i:] for i in range(len(path)))
    found = next((by_path[s] for s in suffixes if s in by_path), replicated)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=found)

  return jax.tree_util.tree_map_with_path(one, opt_state)
