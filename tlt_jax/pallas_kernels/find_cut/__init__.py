"""The threshold of top-k, top-p and min-p, found without a sort: see `find_cut`.

There is only `ref`: XLA makes loops of reductions of it, and a kernel could save little
but their launches. RL samples without filters, and then nothing is searched.
"""

import functools

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import shards
from tlt_jax.pallas_kernels.find_cut import ref


def find_cut(
  logits: jax.Array,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
) -> jax.Array:
  """Finds the least logit of each row that the filters keep; ties with it are kept.

  The filters act in the order of Hugging Face's processors: temperature, top-k, top-p on
  what top-k left (renormalised), min-p. The cut is an input logit, not divided by the
  temperature: a kernel may round the quotient differently and drop the last kept token.

  Worked row, top_p = 0.65 of p = 0.5 0.3 0.2: the mass above each is 0 0.5 0.8, so that
  two are kept, and the second is the cut.

  Inside a function that is automatic over the mesh axis `model`, each shard searches its
  part of the vocabulary, and numbers of [shards R 15] are exchanged.

  Takes f32[R V], and of each row: temperature, 0 counts as 1; top_k i32, 0 is off; top_p, 1
  is off; min_p, 0 is off. Returns f32[R], -inf in rows without filters; the search is
  skipped if no row has any.
  """
  backend = jax.default_backend()
  # On a CPU each sum takes as long as reading the data.
  bits, exact = 1 if backend == "cpu" else 4, backend == "gpu"

  def find(axis, logits, temperature, top_k, top_p, min_p):
    return jax.lax.cond(
      jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)),
      functools.partial(ref.find_cut, axis=axis, bits=bits, exact=exact),
      lambda logits, *_: jnp.full_like(logits[:, 0], -jnp.inf),
      logits,
      temperature,
      top_k,
      top_p,
      min_p,
    )

  return shards.over_vocabulary(find, logits, temperature, top_k, top_p, min_p)
