"""The one signature of every chunk program: plain, speculative, and fused with training.

A chunk is a bounded number of decoding iterations in one jitted program; the host looks
only between chunks. Every chunk is called as

    (weights, slots, draft_state, limits, training) -> Done

with None for what it does not have.
"""

from collections.abc import Callable
import functools
from typing import Any

import flax.struct
import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib


@flax.struct.dataclass
class Weights:
  """Parameters, laid out by `axes.ROLLOUT`, and tables; equal on every slice."""

  target: Any
  draft: Any = None  # the drafter's; None: nothing drafts, or not by a model
  rotations: layers.Rotation | None = None  # of positions 0, 1, ...
  draft_rotations: layers.Rotation | None = None  # the drafter's


@flax.struct.dataclass
class Limits:
  """How far a chunk goes; equal on every slice, read at run time."""

  tokens: jax.Array  # i32[]  that a slot may draw
  steps: jax.Array | None = None  # i32[]  iterations, in a chunk that speculates
  depth: jax.Array | None = None  # i32[]  drafting steps of each iteration


@flax.struct.dataclass
class Done:
  slots: slots_lib.Slots
  draft_state: Any  # what the source of drafts continues with
  emitted: slots_lib.Emitted  # of each slice
  training: Any = None  # of a fused chunk: `trainer.Trained`


# (weights, slots, draft_state, limits) -> (slots, draft_state, emitted), on one slice.
Decode = Callable[
  [Weights, slots_lib.Slots, Any, Limits], tuple[slots_lib.Slots, Any, slots_lib.Emitted]
]


def rotations(
  config: config_lib.ModelConfig, mesh: Mesh, length: int, abstract: bool = False
) -> layers.Rotation:
  """The rotations of positions 0 to length - 1, on every device, or their shapes.

  Programs that made their own could round differently. A position's do not depend on
  `length`: it is an input, which no compiler computes beforehand.
  """
  make, over = functools.partial(layers.rotation, config), axes.sharding(mesh)
  positions = np.arange(length, dtype=np.int32)
  if abstract:
    shapes = jax.eval_shape(make, positions)
    return jax.tree.map(lambda x: x.update(sharding=over), shapes)
  return jax.jit(make, out_shardings=over)(positions)


def without_training(decode: Decode) -> Callable[..., Done]:
  def run(weights, slots, draft_state, limits, training) -> Done:
    del training  # None
    return Done(*decode(weights, slots, draft_state, limits))

  return run


def make(
  mesh: Mesh,
  run: Callable[..., Done],
  shardings: Done,
  training: tuple[Any, Any] = (PartitionSpec(), PartitionSpec()),
  kernels: str | None = None,
) -> Callable[..., Done]:
  """Jits a chunk; slots and the drafts' state are donated.

  What was emitted stays where it is: no slice waits for another in a chunk, and the host
  sees when each is done (`slices.ready_s`).
    training: partition specs of the training that goes in, and of what comes out
  """
  before, behind = training
  mapped = slices.per_slice(
    mesh,
    run,
    in_specs=(slices.WHOLE, slices.ROWS, slices.ROWS, slices.WHOLE, before),
    out_specs=Done(slices.ROWS, slices.ROWS, slices.ROWS, behind),
    kernels=kernels,
  )

  def chunk(weights, slots, draft_state, limits, training):
    return mapped(weights, slots, draft_state, limits, training)

  return jax.jit(
    chunk,
    donate_argnames=("slots", "draft_state"),
    out_shardings=shardings.replace(emitted=axes.sharding(mesh, axes.DATA)),
  )
