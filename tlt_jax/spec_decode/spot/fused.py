"""The fused chunk: slices decode, and one that becomes idle trains the drafter meanwhile.

One program: busy, idle and training are data. TLT (https://arxiv.org/abs/2511.16665)
trains in a separate process group, on weights that are copied back and forth.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


def with_training(
  decode: chunk_lib.Decode, trainer: trainer_lib.Trainer
) -> Callable[..., chunk_lib.Done]:
  """Decodes, and trains until the other slices are done."""

  def run(weights, slots, draft_state, limits, training) -> chunk_lib.Done:
    # Until this slice is idle, or the chunk over.
    slots, draft_state, emitted = decode(weights, slots, draft_state, limits)
    mine = quota(training, emitted)
    trained = trainer.train(weights.target, training, mine)
    return chunk_lib.Done(slots, draft_state, emitted, trained)

  return run


def quota(training: trainer_lib.Training, emitted: slots_lib.Emitted) -> jax.Array:
  """Micro-batches that this slice may train, i32[]; 0 while it has a request left.

  The share of its quota that the chunk's remaining expected steps are, rounded down.
  """
  idle = ~jnp.any(emitted.remaining > 0) & (training.rows.filled > 0)
  steps, expected = emitted.steps[0], training.expected_steps
  most = jnp.where(steps > 0, training.quota_if_idle_midway, training.most)
  left = jnp.maximum(expected - steps, 0)
  return jnp.where(idle, most * left // jnp.maximum(expected, 1), 0)


def make(
  trainer: trainer_lib.Trainer,
  decode: chunk_lib.Decode,
  shardings: chunk_lib.Done,
  kernels: str | None = None,
) -> Callable[..., chunk_lib.Done]:
  """The fused program of a chunk, see `chunk`.

  The drafters in training are not donated: they survive a program that runs out of memory.
  """
  return chunk_lib.make(
    trainer.mesh,
    with_training(decode, trainer),
    shardings.replace(training=trainer.trained_shardings),
    training=(trainer_lib.TRAINING_SPECS, trainer_lib.TRAINED_SPECS),
    kernels=kernels,
  )
