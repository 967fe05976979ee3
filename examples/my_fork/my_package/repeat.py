"""A source of drafts that repeats the last token."""

import jax.numpy as jnp

from tlt_jax.spec_decode.speculation import source
from tlt_jax.spec_decode.speculation import tree


class Repeat(source.Source):
  """Drafts the pending token again and again."""

  def bind(self, strategy, weights, length):
    def propose(slots, state, depth):
      tokens = jnp.repeat(slots.pending[:, None], strategy.verify, 1)
      return source.Proposal(tree.chain(tokens, depth), state)

    return propose, lambda state, output: state


def make(setting: source.Setting) -> Repeat:
  return Repeat(setting)
