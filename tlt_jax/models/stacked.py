"""The decoder for training: its layers in a loop, so that programs do not grow with depth.

Parameters come as `target.Target` has them. `stack` puts those of consecutive layers in one
array each, which the loop reads; `unstack` takes gradients back.
"""

from collections.abc import Callable, Sequence
import itertools

import jax
import jax.numpy as jnp

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

  def layer(x, params):
    return block.apply({"params": gather(params)}, x, by, seen)[0], None

  if remat:  # a loop's body is compiled apart: nothing in it is found twice
    layer = jax.checkpoint(layer, prevent_cse=False)
  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    x = params["embedding"].astype(config.dtype)[tokens]
    for run in runs:
      x, _ = jax.lax.scan(layer, x, params[_stack(run)])
    norm = layers.RMSNorm(config.norm_eps)
    return norm.apply({"params": params["final_norm"]}, x)


def outside(stacked: dict) -> dict:
  """What of `stack` is of no layer."""
  return {k: x for k, x in stacked.items() if not _is_layer(k)}


def _layer(i: int) -> str:
  return f"layer_{i}"


def _stack(run: Run) -> str:
  return f"layer_{run[0]}_to_{run[1] - 1}"


def _is_layer(name: str) -> bool:
  return name.startswith("layer_")
