"""An RL algorithm is two pure functions; one file per algorithm.

`make("grpo", clip_low=0.2)` imports `tlt_jax.rl.grpo` and calls its `make`. A
name with a dot is imported as it stands, so an algorithm may live in any
package. Algorithms see log-probabilities, advantages and masks; never the
model.
"""

from collections.abc import Callable
import importlib
import inspect
from typing import NamedTuple

import flax.struct
import jax


@flax.struct.dataclass
class Tokens:
  """One micro-batch of packed tokens, as a loss sees it.

  A loss returns this micro-batch's *share*: shares add up to the loss of the
  whole batch. For that the totals of the batch are here.
  """

  logp: jax.Array  # f32[R L]  of the target, under the policy that is trained
  entropy: jax.Array  # f32[R L]  of the policy at this position, in nats
  old_logp: jax.Array  # f32[R L]  under the policy that sampled
  reference_logp: jax.Array  # f32[R L]  under the frozen reference
  mask: jax.Array  # bool[R L]  True where the target is a response token
  advantage: jax.Array  # f32[R L]  of the target, or of its whole sequence
  length: jax.Array  # f32[R L]  response tokens of the sequence
  sequence_idx: jax.Array  # i32[R L]  in [0, num_sequences)
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch
  packed_tokens: jax.Array  # f32[]  those of them that are seen (for metrics)
  total_sequences: jax.Array  # f32[]  sequences in the whole batch


class Algorithm(NamedTuple):
  """What makes one policy-gradient method differ from another.

  advantages: f32[P R] rewards, i32[P R] response lengths -> f32[P R], or f32[P R T] for
    each token of a response, zero beyond it
  loss: Tokens -> (f32[] share of the loss, {"policy/name": f32[] share})
  uses_reference: whether the loss reads `reference_logp`
  skips_zero_advantage: whether a sequence of advantage 0 has no gradient at all, so
    that it need not be computed; it still counts in the totals
  """

  advantages: Callable[[jax.Array, jax.Array], jax.Array]
  loss: Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]
  uses_reference: bool = False
  skips_zero_advantage: bool = False


def make(name: str, **args) -> Algorithm:
  """The algorithm of that name with its own arguments.

  Raises:
    ValueError: no such module, or an argument that it does not have
  """
  path = name if "." in name else f"tlt_jax.rl.{name}"
  try:
    module = importlib.import_module(path)
    factory = module.make
  except (ImportError, AttributeError) as e:
    raise ValueError(f"no RL algorithm {name!r}: {e}") from e
  known = inspect.signature(factory).parameters
  unknown = sorted(set(args) - set(known))
  if unknown:
    raise ValueError(
      f"{path}.make has no argument {unknown[0]!r}; it takes {', '.join(known)}"
    )
  return factory(**args)
