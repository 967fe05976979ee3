"""The decoder for training: its layers in a loop, so that programs do not grow with depth.

Parameters come as `target.Target` has them. `stack` puts those of consecutive layers in one
array each, which the loop reads; `unstack` takes gradients back.
"""

from collections.abc import Callable, Sequence
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import packed_attention

Run = tuple[int, int]  # layers from the first to before the second


def runs(trained: dict, num_layers: int) -> list[Run]:
  """The longest runs of layers of which the same parameters are trained.

  Args:
    trained: the part of a parameter tree that is trained
    num_layers: L
  """
  structure = lambda i: jax.tree.structure(trained.get(_layer(i)))
  grouped = itertools.groupby(range(num_layers), structure)
  found = [list(layers) for _, layers in grouped]
  return [(layers[0], layers[-1] + 1) for layers in found]


def stack(params: dict, runs: Sequence[Run]) -> dict:
  """A parameter tree, or part of it, with one entry per run in place of its layers'."""
  stacked = {k: x for k, x in params.items() if not _is_layer(k)}
  for run in runs:
    of_run = [params[_layer(i)] for i in range(*run) if _layer(i) in params]
    if of_run:
      stacked[_stack(run)] = jax.tree.map(lambda *x: jnp.stack(x), *of_run)
  return stacked


def unstack(stacked: dict, runs: Sequence[Run]) -> dict:
  """Undoes `stack`."""
  params = {k: x for k, x in stacked.items() if not _is_layer(k)}
  for run in runs:
    for i in range(*run):
      if _stack(run) in stacked:
        at = i - run[0]
        params[_layer(i)] = jax.tree.map(lambda x, at=at: x[at], stacked[_stack(run)])
  return params


def features(
  config: config_lib.ModelConfig,
  params: dict,
  runs: Sequence[Run],
  tokens: jax.Array,
  seen: packed_attention.Segments,
  by: layers.Rotation,
  *,
  gather: Callable[[dict], dict],
  remat: bool,
) -> jax.Array:
  """Runs the decoder on packed rows.

  Args:
    config: of the model
    params: of `stack`; what is not of a layer is ready for use
    runs: of the layers
    tokens: i32[B T]
    seen: the segments of the rows
    by: of the tokens' positions
    gather: makes a layer's parameters ready for use, in every turn of the loop
    remat: whether layers are computed again in the backward pass; if not, everything is
      kept, the layers' parameters as they are used as well
  Returns:
    features f[B T D], the hidden states after the final norm
  """
  block = families.find(config.architecture).block(config)
  by_tokens = (None, axes.MODEL)

  def layer(x, params):
    # Gathered from parts here, so that parts are what is kept for the backward pass.
    x = _laid_out(_laid_out(x, *by_tokens))
    x = block.apply({"params": gather(params)}, x, by, seen)[0]
    return _laid_out(x, *by_tokens), None

  if remat:  # a loop's body is compiled apart: nothing in it is found twice
    layer = jax.checkpoint(layer, prevent_cse=False)
  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    x = params["embedding"].astype(config.dtype)[tokens]
    x = _laid_out(x, *by_tokens)
    for run in runs:
      x, _ = jax.lax.scan(layer, x, params[_stack(run)])
    norm = layers.RMSNorm(config.norm_eps)
    return norm.apply({"params": params["final_norm"]}, _laid_out(x))


def splits(length: int, devices: int) -> bool:
  """Whether rows of so many tokens are split over the devices of a slice between layers.

  The backward pass keeps what every layer was handed, so that each device keeps a part.
  It costs nothing more to send: the sum over the devices that a layer ends with becomes a
  scattered sum here and a gather in the next layer (sequence parallelism, Korthikanti et
  al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2).
  """
  return devices > 1 and length % devices == 0


def _laid_out(x: jax.Array, *spec: str | None) -> jax.Array:
  """Has f[B T D] lie so over the devices of a slice, if `splits` says that it may."""
  mesh = axes.mesh_of_compiler()
  if mesh is None or not splits(x.shape[1], mesh.shape[axes.MODEL]):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def outside(stacked: dict) -> dict:
  """What of `stack` is of no layer."""
  return {k: x for k, x in stacked.items() if not _is_layer(k)}


def _layer(i: int) -> str:
  return f"layer_{i}"


def _stack(run: Run) -> str:
  return f"layer_{run[0]}_to_{run[1] - 1}"


def _is_layer(name: str) -> bool:
  return name.startswith("layer_")
