"""The responses of one RL step: `Batch` on the host, `Sequences` on the devices."""

from collections.abc import Sequence
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import processes
from tlt_jax.rl import algorithm as algorithm_lib


@dataclasses.dataclass(frozen=True)
class Batch:
  prompts: Sequence[np.ndarray]  # i32[...] per response
  responses: Sequence[np.ndarray]  # i32[...] per response
  temperature: np.ndarray  # f32[B]
  scored: algorithm_lib.Responses  # numpy arrays
  # bool[P R T]: tokens that the policy of this step drew; None: all, or it does not matter
  fresh: np.ndarray | None = None


@flax.struct.dataclass
class Sequences:
  """What an update needs of each packed sequence; tables [B T] by response token."""

  advantage: jax.Array  # f32[B 1], or f32[B T] for each response token
  length: jax.Array  # i32[B]  response tokens
  prompt_length: jax.Array  # i32[B]
  temperature: jax.Array  # f32[B]
  counts: jax.Array | None = None  # bool[B]  in the totals; None: all do
  max_tokens: jax.Array | None = None  # i32[B]  limit of the response; None: its length
  # f32[B T] each; None of a log-probability: that of the policy before this update.
  old_logp: jax.Array | None = None  # under the policy that sampled, by the learner
  sampler_logp: jax.Array | None = None  # under the one that drew the token, see `fresh`
  reference_logp: jax.Array | None = None  # under the frozen reference
  value: jax.Array | None = None  # of a critic, before the first update
  return_: jax.Array | None = None  # that the critic predicts
  # bool[B T]: tokens whose `sampler_logp` is `old_logp`; None: none
  fresh: jax.Array | None = None

  def at_targets(self, name: str, packed: packing.Packed) -> jax.Array | None:
    """The entry of a table for each target, f32[rows T]; None if there is no such table.

    Worked row, prompt a b and response x y z: the target of position 1 is x, the first
    response token; positions 1 2 3 have its entries 0 1 2.
    """
    table = getattr(self, name)
    if table is None:
      return None
    index = packed.positions + 1 - self.prompt_length[packed.sequence_idx]
    return table[packed.sequence_idx, jnp.clip(index, 0, table.shape[1] - 1)]


def sequences(batch: Batch, tables: dict[str, np.ndarray | None], size: int) -> Sequences:
  """What updates need of a batch, on the host; `tables` are fields of `Sequences`.

  `size` T is the same for all batches, so that one program serves all.
  """
  B = len(batch.responses)

  def flatten(x):
    if x is None:
      return None
    if np.ndim(x) < 3:
      return np.asarray(x).reshape(B)
    x = np.asarray(x)
    x = x.astype(bool if x.dtype == bool else np.float32).reshape(B, -1)
    return np.pad(x, ((0, 0), (0, size)))[:, :size]

  fields = {name: flatten(x) for name, x in tables.items()}
  if fields["advantage"].ndim == 1:
    fields["advantage"] = fields["advantage"][:, None].astype(np.float32)
  return Sequences(
    length=np.array([len(r) for r in batch.responses], np.int32),
    prompt_length=np.array([len(p) for p in batch.prompts], np.int32),
    temperature=batch.temperature,
    **fields,
  )


def pack(
  batch: Batch,
  share: np.ndarray,
  buckets: Sequence[packing.Bucket],
  chosen: np.ndarray | None = None,
) -> list[packing.Packed]:
  """Packs sequences i32[b] of one update, or the `chosen` bool[b] among them."""
  prompts = [batch.prompts[i] for i in share]
  responses = [batch.responses[i] for i in share]
  return packing.pack(prompts, responses, buckets, chosen)


def by_response(
  batch: Batch, packed: Sequence[packing.Packed], values: Sequence[np.ndarray]
) -> np.ndarray:
  P, R = batch.scored.reward.shape
  logp = batch.scored.logp
  T = max(map(len, batch.responses)) if logp is None else logp.shape[-1]
  first = np.array([len(p) for p in batch.prompts]) - 1  # position of the first target
  table = np.zeros((P * R, T), np.float32)
  for rows, found in zip(packed, values, strict=True):
    sequence = rows.sequence_idx[rows.mask]
    table[sequence, rows.positions[rows.mask] - first[sequence]] = found[rows.mask]
  return table.reshape(P, R, T)


def blank(P: int, R: int) -> Batch:
  """A batch of the form of a step's, of one token each: for the shapes of what follows."""
  zero, one = np.zeros((P, R), np.float32), np.ones((P, R), np.int32)
  token, no = [np.zeros(1, np.int32)] * (P * R), np.zeros((P, R), bool)
  scored = algorithm_lib.Responses(
    reward=zero,
    length=one,
    max_tokens=one,
    truncated=no,
    solved=no,
    logp=zero[..., None],
  )
  return Batch(token, token, np.ones(P * R, np.float32), scored)


def place(x: Sequences, mesh: jax.sharding.Mesh) -> Sequences:
  whole = axes.sharding(mesh)
  return jax.tree.map(lambda x: processes.place(x, whole), x)


def abstract(
  mesh: jax.sharding.Mesh, buckets: Sequence[packing.Bucket], count: int
) -> tuple[tuple[packing.Packed, ...], Sequences]:
  """Shapes of the inputs of an update of `count` responses, without a critic."""

  def shape_of(sharding, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  by_rows, whole = axes.sharding(mesh, None, axes.DATA), axes.sharding(mesh)

  def packed(bucket: packing.Bucket) -> packing.Packed:
    shape = -(-count // bucket.rows), bucket.rows, bucket.length
    names = [f.name for f in dataclasses.fields(packing.Packed)]
    arrays = {name: shape_of(by_rows, jnp.int32, *shape) for name in names}
    mask = shape_of(by_rows, jnp.bool, *shape)
    return packing.Packed(**arrays | dict(mask=mask, count=shape_of(whole, jnp.int32)))

  known = Sequences(
    advantage=shape_of(whole, jnp.float32, count, 1),
    length=shape_of(whole, jnp.int32, count),
    prompt_length=shape_of(whole, jnp.int32, count),
    temperature=shape_of(whole, jnp.float32, count),
  )
  return tuple(map(packed, buckets)), known
