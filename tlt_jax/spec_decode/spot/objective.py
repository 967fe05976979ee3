"""Which loss trains which drafters."""

from collections.abc import Callable
import dataclasses

from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.spot import block_loss
from tlt_jax.spec_decode.spot import loss as loss_lib


def of(drafter: drafter_lib.DrafterConfig) -> Callable:
  return block_loss.loss if drafter.block else loss_lib.loss


def options_of(drafter: drafter_lib.DrafterConfig, options: loss_lib.Loss) -> loss_lib.Loss:
  """The options with the steps that such a drafter is trained in."""
  if not drafter.block:
    return options
  return dataclasses.replace(options, steps=drafter.block.guesses)
