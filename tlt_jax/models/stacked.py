"""The decoder for training: its layers in a loop, so that programs do not grow with depth.

`stack` puts the parameters of consecutive layers in one array each, `unstack` takes
gradients back.
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
  grouped = itertools.groupby(
    range(num_layers), lambda i: jax.tree.structure(trained.get(_layer(i)))
  )
  found = [list(layers) for _, layers in grouped]
  return [(layers[0], layers[-1] + 1) for layers in found]


def stack(params: dict, runs: Sequence[Run]) -> dict:
  """A parameter tree, or part of it, with the layers of each run stacked."""
  stacked = {k: x for k, x in params.items() if not _is_layer(k)}
  for run in runs:
    of_run = [params[_layer(i)] for i in range(*run) if _layer(i) in params]
    if of_run:
      stacked[_stack(run)] = jax.tree.map(lambda *x: jnp.stack(x), *of_run)
  return stacked


def unstack(stacked: dict, runs: Sequence[Run]) -> dict:
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
  """Runs the decoder on packed rows i32[B T]: the states after the final norm, f[B T D].

  `params` are of `stack`; `gather` gathers a layer's in every iteration of the loop.
  Without `remat` all activations and gathered parameters are kept.
  """
  block = families.find(config.architecture).block(config)
  by_tokens = (None, axes.MODEL)

  def layer(x, params):
    # Gathered here, so that the backward pass keeps the parts.
    x = _laid_out(_laid_out(x, *by_tokens))
    x = block.apply({"params": gather(params)}, x, by, seen)[0]
    return _laid_out(x, *by_tokens), None

  if remat:  # in a loop's body, XLA cannot merge the recomputation with the forward pass
    layer = jax.checkpoint(layer, prevent_cse=False)
  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    x = params["embedding"].astype(config.dtype)[tokens]
    x = _laid_out(x, *by_tokens)
    for run in runs:
      x, _ = jax.lax.scan(layer, x, params[_stack(run)])
    norm = layers.RMSNorm(config.norm_eps)
    return norm.apply({"params": params["final_norm"]}, _laid_out(x))


def splits(length: int, devices: int) -> bool:
  """Whether rows of `length` tokens are split over the devices of a slice between layers.

  Each device then keeps a part of every layer's input for the backward pass, at no more
  communication: the all-reduce at a layer's end becomes a reduce-scatter and an all-gather
  in the next layer (sequence parallelism, Korthikanti et al. 2022,
  https://arxiv.org/abs/2205.05198, section 4.2.2).
  """
  return devices > 1 and length % devices == 0


def _laid_out(x: jax.Array, *spec: str | None) -> jax.Array:
  mesh = axes.mesh_of_compiler()
  if mesh is None or not splits(x.shape[1], mesh.shape[axes.MODEL]):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def outside(stacked: dict) -> dict:
  return {k: x for k, x in stacked.items() if not _is_layer(k)}


def _layer(i: int) -> str:
  return f"layer_{i}"


def _stack(run: Run) -> str:
  return f"layer_{run[0]}_to_{run[1] - 1}"


def _is_layer(name: str) -> bool:
  return name.startswith("layer_")
