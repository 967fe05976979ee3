"""Attention masks of draft trees, as a few words of bits per node.

All nodes of a row see every slot before the row's `start`. Slots start, start+1, ... have
the nodes' own keys and values, and a bit per node: a node sees its ancestors and itself.
For a chain of tokens the bits form a triangle.

Worked rows, start = 3, size = 4, of nodes 1 and 3 of the tree in `speculation/tree.py`:

    slot    0 1 2 3 4 5 6 7      bits, the first slot's as the lowest
    node 1  1 1 1 1 1 0 0 0      0b0011
    node 3  1 1 1 1 1 0 1 0      0b1011

In a layer with a sliding window, nodes also see nothing before a position of their own.
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Seen:
  """The cache slots that each of J nodes sees; bits beyond the end are ignored."""

  start: jax.Array  # i32[B]  the nodes see every slot before it; 0 to the cache's length
  # i32[B J ceil(size/32)]  slot start+i: bit i % 32 of word i // 32; 0 from `size` on
  bits: jax.Array
  size: int = flax.struct.field(pytree_node=False)  # slots from `start` on with bits
  first: jax.Array | None = None  # i32[B J]  slots before it are not seen; None: all are

  def within(self, positions: jax.Array, window: int) -> "Seen":
    """Of that, the last `window` positions up to each node's own.

    Slots before `start` have their position; node i, in slot start + i, positions[:, i].
    """
    chex.assert_shape(positions, (*self.start.shape, self.size))
    inside = of_mask(self.start, near(positions, window)).bits
    return self.replace(bits=self.bits & inside, first=positions - window + 1)

  def mask(self, first: jax.Array | int, length: int) -> jax.Array:
    chex.assert_shape(self.bits, (*self.start.shape, None, -(-self.size // 32)))
    offset = (first + jnp.arange(length) - self.start[:, None])[:, None]  # i32[B 1 S]
    shape = (*self.bits.shape[:2], length)
    shift = jnp.broadcast_to(offset & 31, shape)
    bit = jnp.zeros(shape, jnp.int32)
    for i in range(self.bits.shape[-1]):
      word = jnp.broadcast_to(self.bits[..., i, None], shape)
      shifted = jax.lax.shift_right_logical(word, shift)
      bit = jnp.where(offset >> 5 == i, shifted & 1, bit)
    before = offset < 0
    if self.first is not None:
      before &= first + jnp.arange(length) >= self.first[..., None]
    return before | (bit == 1)


def near(positions: jax.Array, window: int) -> jax.Array:
  """Whether tokens s of i32[B T] are less than `window` behind tokens t: bool[B t s]."""
  return positions[:, None, :] > positions[:, :, None] - window


def causal(start: jax.Array, num_tokens: int) -> Seen:
  """The causal mask of J consecutive tokens, the first in slot `start` i32[B]."""
  triangle = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
  return of_mask(start, jnp.broadcast_to(triangle, (*start.shape, *triangle.shape)))


def of_mask(start: jax.Array, mask: jax.Array) -> Seen:
  """Packs bool[B J size]: the slots from `start` on; every slot before is seen."""
  size = mask.shape[-1]
  chex.assert_shape(mask, (*start.shape, None, size))
  words = -(-size // 32)
  bits = jnp.pad(mask, ((0, 0), (0, 0), (0, words * 32 - size)))
  bits = bits.reshape(*mask.shape[:2], words, 32).astype(jnp.uint32)
  # Every bit occurs once: the sum is a bitwise or.
  packed = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), -1, dtype=jnp.uint32)
  return Seen(start, jax.lax.bitcast_convert_type(packed, jnp.int32), size)
