"""What the nodes of a draft tree see of the KV cache, in a few words per node.

All nodes of a row see everything before the row's `start`. From there on each has bits:
in slots start, start+1, ... are the nodes' own keys and values, and a node sees its
ancestors and itself. A chain of tokens is the tree whose bits form a triangle.

Worked rows, start = 3, size = 4, of nodes 1 and 3 of the tree in `speculation/tree.py`:

    slot    0 1 2 3 4 5 6 7      bits, the first slot's as the lowest
    node 1  1 1 1 1 1 0 0 0      0b0011
    node 3  1 1 1 1 1 0 1 0      0b1011
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Seen:
  """Which slots of its row's cache each of J nodes sees, in every layer the same.

  Slots beyond the end of the cache do not exist, whatever the bits say of them.
  """

  start: jax.Array  # i32[B]  the nodes see every slot before it; 0 to the cache's length
  # i32[B J ceil(size/32)]  slot start+i: bit i % 32 of word i // 32; 0 from `size` on
  bits: jax.Array
  size: int = flax.struct.field(pytree_node=False)  # slots from `start` on with bits

  def mask(self, first: jax.Array | int, length: int) -> jax.Array:
    """What they see of `length` slots from slot `first` on: bool[B J length]."""
    chex.assert_shape(self.bits, (*self.start.shape, None, -(-self.size // 32)))
    offset = (first + jnp.arange(length) - self.start[:, None])[:, None]  # i32[B 1 S]
    shape = (*self.bits.shape[:2], length)
    shift = jnp.broadcast_to(offset & 31, shape)
    bit = jnp.zeros(shape, jnp.int32)
    for i in range(self.bits.shape[-1]):
      word = jnp.broadcast_to(self.bits[..., i, None], shape)
      shifted = jax.lax.shift_right_logical(word, shift)
      bit = jnp.where(offset >> 5 == i, shifted & 1, bit)
    return (offset < 0) | (bit == 1)


def causal(start: jax.Array, num_tokens: int) -> Seen:
  """What consecutive tokens see, each itself and all before it.

  Args:
    start: i32[B]  the slot of the first
    num_tokens: J
  """
  triangle = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
  return of_mask(start, jnp.broadcast_to(triangle, (*start.shape, *triangle.shape)))


def of_mask(start: jax.Array, mask: jax.Array) -> Seen:
  """Packs a mask.

  Args:
    start: i32[B]  the nodes see every slot before it
    mask: bool[B J size]  what they see of the slots from there on
  """
  size = mask.shape[-1]
  chex.assert_shape(mask, (*start.shape, None, size))
  words = -(-size // 32)
  bits = jnp.pad(mask, ((0, 0), (0, 0), (0, words * 32 - size)))
  bits = bits.reshape(*mask.shape[:2], words, 32).astype(jnp.uint32)
  # Every bit once, so that the sum is their disjunction.
  packed = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), -1, dtype=jnp.uint32)
  return Seen(start, jax.lax.bitcast_convert_type(packed, jnp.int32), size)
