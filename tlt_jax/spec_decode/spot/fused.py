"""The fused chunk: slices decode, and one that runs dry trains the drafter meanwhile.

One program, no threads and no second process group: busy, idle and training are data in
it. TLT (https://arxiv.org/abs/2511.16665) trains in a process group of its own instead,
on weights that are copied back and forth.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


def with_training(
  decode: chunk_lib.Decode, trainer: trainer_lib.Trainer, per_update: int
) -> Callable[..., chunk_lib.Done]:
  """The chunk of one slice that decodes, and trains until the others are done.

  Args:
    per_update: micro-batches of all slices, at least, that make an update
  """

  def run(weights, slots, draft_state, limits, training) -> chunk_lib.Done:
    # Until this slice is dry, or the chunk over.
    slots, draft_state, emitted = decode(weights, slots, draft_state, limits)
    mine = quota(training, emitted)
    sums = trainer.accumulate(weights.target, training, mine)
    trained = trainer.exchange_and_update(training, sums, mine, per_update)
    emitted = gathered_after(trained, emitted)
    return chunk_lib.Done(slots, draft_state, emitted, trained)

  return run


def quota(training: trainer_lib.Training, emitted: slots_lib.Emitted) -> jax.Array:
  """How many micro-batches this slice may train, i32[]; 0 while it has a request left.

  The share of `most` that is left of the steps which the busiest slice is expected to
  run, rounded.
  """
  idle = ~jnp.any(emitted.remaining > 0) & (training.rows.filled > 0)
  most, expected = training.most, training.expected
  left = jnp.maximum(expected - emitted.steps[0], 0)
  share = (2 * most * left + expected) // jnp.maximum(2 * expected, 1)
  return jnp.where(idle, jnp.minimum(share, most), 0)


def gathered_after(
  trained: trainer_lib.Trained, emitted: slots_lib.Emitted
) -> slots_lib.Emitted:
  """Orders the exchanges: what was emitted is gathered after gradients are summed.

  Two exchanges without an order can wait for each other, where threads are few (XLA's
  CPU devices).
  """
  return jax.tree.map(lambda x: slices.after(x, trained.state.step), emitted)


def make(
  trainer: trainer_lib.Trainer,
  decode: chunk_lib.Decode,
  shardings: chunk_lib.Done,
  per_update: int,
  kernels: str | None = None,
) -> Callable[..., chunk_lib.Done]:
  """The fused program of a chunk; see `chunk` for how it is called.

  The training's state is not donated, so that it survives a program that runs out of
  memory.

  Args:
    decode: of one slice
    shardings: of its results
    per_update: micro-batches of all slices, at least, that make an update
    kernels: that decode
  """
  return chunk_lib.make(
    trainer.mesh,
    with_training(decode, trainer, per_update),
    shardings.replace(training=trainer.trained_shardings),
    training=(trainer_lib.TRAINING_SPECS, trainer_lib.TRAINED_SPECS),
    kernels=kernels,
  )
