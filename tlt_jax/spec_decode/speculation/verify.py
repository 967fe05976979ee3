"""Which drafted tokens stand: those that plain decoding would have drawn.

The target draws its own token at every node of the draft tree, with that position's
noise, whatever was drafted. From the root on, the walk goes to the child that holds
the token drawn at its parent, until there is none: the tokens drawn on the way are
the output, token for token that of plain decoding. (Daliri, Musco & Suresh 2024,
https://arxiv.org/abs/2408.07978, analyse the chain.)
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.spec_decode.speculation import tree as tree_lib


@flax.struct.dataclass
class Output:
  """What an iteration draws; row b holds `count[b]` tokens."""

  tokens: jax.Array  # i32[B R]
  logp: jax.Array  # f32[B R]
  logp_filtered: jax.Array  # f32[B R]
  features: jax.Array  # f[B R E]  of the token before each
  count: jax.Array  # i32[B]


def walk_chain(
  tree: tree_lib.Tree, drawn: jax.Array, longest: int
) -> tuple[jax.Array, jax.Array]:
  """`walk` for a chain."""
  agrees = (tree.tokens[:, 1:] == drawn[:, :-1]) & tree.valid[:, 1:]
  accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), 1), 1)
  path = jnp.broadcast_to(jnp.arange(longest), (drawn.shape[0], longest))
  return path, accepted


def walk(
  tree: tree_lib.Tree, drawn: jax.Array, longest: int
) -> tuple[jax.Array, jax.Array]:
  """The accepted path.

  Args:
    drawn: i32[B J]  the target's token after each node
    longest: R, most nodes that a path has, the root included
  Returns:
    path i32[B R], nodes from the root on (beyond its end: the last one again), and
    how many drafted nodes are on it, i32[B]
  """
  B = drawn.shape[0]
  rows = jnp.arange(B)
  now, accepted = jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32)
  path = [now]
  for _ in range(longest - 1):
    child = (tree.parent == now[:, None]) & tree.valid & (tree.depth > 0)
    child &= tree.tokens == drawn[rows, now][:, None]
    found = jnp.any(child, 1)
    now = jnp.where(found, jnp.argmax(child, 1).astype(jnp.int32), now)
    accepted += found
    path.append(now)
  return jnp.stack(path, 1), accepted


def cut(
  tokens: jax.Array, count: jax.Array, stop_tokens: jax.Array, remaining: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Ends an accepted run at the first stop token and at the limit.

  Args:
    tokens: i32[B R]  the output, `count` i32[B] of it valid
    stop_tokens: i32[B E]
    remaining: i32[B]  tokens that may still be drawn
  Returns:
    how many tokens are left, i32[B], and whether the last of them is a stop token
  """
  R = tokens.shape[1]
  is_stop = jnp.any(tokens[:, :, None] == stop_tokens[:, None], -1)
  is_stop &= jnp.arange(R) < count[:, None]
  first = jnp.min(jnp.where(is_stop, jnp.arange(R), R), 1)
  kept = jnp.minimum(jnp.minimum(count, first + 1), remaining)
  return kept, (first < kept)
