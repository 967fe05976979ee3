"""The decoder for training: its layers in a loop, so that programs do not grow with depth.

`stack` puts the parameters of the layers of a loop in one array each, `unstack` takes
gradients back. Where kinds of layers alternate, an iteration runs a whole period of them.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.models import moe
from tlt_jax.models import target
from tlt_jax.pallas_kernels import packed_attention

Run = tuple[range, ...]  # of a loop: the layers of each iteration, place by place


def runs(trained: dict, config: config_lib.ModelConfig) -> list[Run]:
  """The loops over layers that have equal kinds and equal parts trained."""
  found, period = [], max(len(config.layers), 1)
  grouped = itertools.groupby(
    range(config.num_layers), lambda i: jax.tree.structure(trained.get(_layer(i)))
  )
  for _, group in grouped:
    left = [*group]
    periods = len(left) // period
    if periods > 1:
      whole = left[: periods * period]
      found.append(tuple(range(whole[i], whole[-1] + 1, period) for i in range(period)))
      left = left[len(whole) :]
    for _, alike in itertools.groupby(left, config.layer_kind):
      first, *others = alike
      found.append((range(first, first + len(others) + 1),))
  return found


def stack(params: dict, runs: Sequence[Run]) -> dict:
  """A parameter tree, or part of it, with the layers of each place stacked."""
  stacked = {k: x for k, x in params.items() if not _is_layer(k)}
  for place in itertools.chain(*runs):
    of_place = [params[_layer(i)] for i in place if _layer(i) in params]
    if of_place:
      stacked[_stack(place)] = jax.tree.map(lambda *x: jnp.stack(x), *of_place)
  return stacked


def unstack(stacked: dict, runs: Sequence[Run]) -> dict:
  params = {k: x for k, x in stacked.items() if not _is_layer(k)}
  for place in itertools.chain(*runs):
    for at, i in enumerate(place):
      if _stack(place) in stacked:
        params[_layer(i)] = jax.tree.map(lambda x, at=at: x[at], stacked[_stack(place)])
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
  watch: Callable[[dict], Any] | None = None,
) -> tuple[jax.Array, Any]:
  """Runs the decoder on packed rows i32[B T]: the states after the final norm, f[B T D].

  `params` are of `stack`; `gather` gathers a layer's in every iteration of the loop.
  Without `remat` all activations and gathered parameters are kept. `watch` takes what a
  block puts into `moe.ROUTING`; its results are returned too, [L ...] in the order of
  `runs`.
  """
  family = families.find(config.architecture)
  block, by_tokens = family.block(config), (None, axes.MODEL)

  def layer(kind, x, params):
    # Gathered here, so that the backward pass keeps the parts.
    x = _laid_out(_laid_out(x, *by_tokens))
    inputs = layers.of_kind(config, kind, by, seen)
    variables = {"params": gather(params)}
    (x, _), sown = block.apply(variables, x, *inputs, mutable=[moe.ROUTING])
    return _laid_out(x, *by_tokens), watch and watch(sown)

  if remat:  # in a loop's body, XLA cannot merge the recomputation with the forward pass
    layer = jax.checkpoint(layer, prevent_cse=False, static_argnums=0)

  def iteration(run, x, params):
    watched = []
    for place, of_layer in zip(run, params, strict=True):
      x, of_place = layer(config.layer_kind(place[0]), x, of_layer)
      watched.append(of_place)
    return x, watched

  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    x = target.embed(config, params["embedding"], tokens)
    x, watched = _laid_out(x, *by_tokens), []
    for run in runs:
      of_run = tuple(params[_stack(place)] for place in run)
      x, of_places = jax.lax.scan(functools.partial(iteration, run), x, of_run)
      watched += of_places
    norm = family.norm(config.norm_eps)
    x = norm.apply({"params": params["final_norm"]}, _laid_out(x))
    return x, jax.tree.map(lambda *x: jnp.concatenate(x), *watched)


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


def _stack(place: range) -> str:
  return f"layer_{place[0]}_to_{place[-1]}"


def _is_layer(name: str) -> bool:
  return name.startswith("layer_")
