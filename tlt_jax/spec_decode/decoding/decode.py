"""Device programs of a rollout: prefill, admit, decode a chunk, resize.

Slots are the rows of a batch; each holds one running request. All programs run
per slice (manual over `data`): a slice with nothing left to do leaves its loop
at once, whatever its neighbours do. Tensor parallelism inside a slice is left to
the compiler.

A slot's last known token is *pending*: its KV is not computed yet. A prompt's
prefill therefore stops before its last token, and every token that is drawn is
drawn in the same loop.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import pages as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which hidden states of the target are kept next to its KV."""

  width: int  # E
  taps: tuple[int, ...] = ()  # layers; without any the states after the final norm
  final: bool = False  # with taps: the states after the final norm too, behind them


@flax.struct.dataclass
class Context:
  """What the target has computed of some prompts: KV, and features if kept."""

  kv: cache_lib.KVCache
  features: jax.Array | None  # f[B S E]


@flax.struct.dataclass
class Slots:
  """The running requests; row b of every array belongs to slot b."""

  pending: jax.Array  # i32[B]  last known token
  position: jax.Array  # i32[B]  its index in the sequence, prompt included
  remaining: jax.Array  # i32[B]  tokens that may still be drawn; 0 frees the slot
  stop_tokens: jax.Array  # i32[B E]
  sampling: sampling_lib.Sampling
  kv: cache_lib.KVCache
  features: features_lib.Features | None


@flax.struct.dataclass
class Emitted:
  """What a chunk drew; row b holds `count[b]` tokens."""

  tokens: jax.Array  # i32[B N]
  logp: jax.Array  # f32[B N]
  logp_filtered: jax.Array  # f32[B N]
  count: jax.Array  # i32[B]
  remaining: jax.Array  # i32[B]  of the slots, after the chunk
  steps: jax.Array  # i32[slices]  iterations that each slice ran
  seconds: jax.Array  # f32[slices]  what it was told
  # i32[slices R], how often a live row drew more than r tokens in one pass of the
  # target; None without speculation, where every pass draws one
  accepted: jax.Array | None = None


def cache_shardings(mesh: Mesh, config: config_lib.ModelConfig) -> cache_lib.KVCache:
  """Rows over `data`, kv heads over `model` where they divide."""
  tensor = mesh.shape[axes.MODEL]
  heads = axes.MODEL if config.num_kv_heads % tensor == 0 else None
  layer = axes.sharding(mesh, axes.DATA, heads)
  return (cache_lib.LayerCache(layer, layer),) * config.num_layers


def abstract_cache(mesh, config, rows: int, length: int) -> cache_lib.KVCache:
  """Shapes and shardings of the KV of `rows` rows a slice."""
  B = rows * mesh.shape[axes.DATA]
  shapes = jax.eval_shape(lambda: cache_lib.init(config, B, length))
  shardings = cache_shardings(mesh, config)
  return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)


def abstract_store(mesh, config, rows: int, length: int, keep: Keep | None) -> Context:
  """Shapes and shardings of a store of `rows` prompts a slice."""
  kept = None
  if keep:
    shape = (rows * mesh.shape[axes.DATA], length, keep.width)
    over = axes.sharding(mesh, axes.DATA)
    kept = jax.ShapeDtypeStruct(shape, config.dtype, sharding=over)
  return Context(abstract_cache(mesh, config, rows, length), kept)


def zeros(abstract):
  """Arrays of these shapes and shardings, one by one."""
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract
  )


def abstract_slots(
  mesh,
  config,
  batch: int,
  length: int,
  stop_tokens: int,
  keep: Keep | None,
  sizes: features_lib.Sizes | None,
) -> Slots:
  """Shapes and shardings of `batch` slots a slice, E = `stop_tokens`."""
  B = batch * mesh.shape[axes.DATA]
  i32, u32, f32 = (
    jax.ShapeDtypeStruct((B,), dtype, sharding=axes.sharding(mesh, axes.DATA))
    for dtype in (jnp.int32, jnp.uint32, jnp.float32)
  )
  kept = None
  if keep:
    kept = features_lib.abstract(mesh, keep.width, config.dtype, batch, sizes)
  return Slots(
    pending=i32,
    position=i32,
    remaining=i32,
    stop_tokens=i32.update(shape=(B, stop_tokens)),
    sampling=sampling_lib.Sampling(
      seed=u32, request=u32, temperature=f32, top_k=i32, top_p=f32, min_p=f32
    ),
    kv=abstract_cache(mesh, config, batch, length),
    features=kept,
  )


def _shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)


def slots_shardings(mesh, config, keep) -> Slots:
  return _shardings(abstract_slots(mesh, config, 1, 1, 1, keep, features_lib.Sizes(1, 1)))


def per_slice(
  mesh: Mesh, f, num_args: int, replicated: tuple[int, ...] = (), whole_out=None
):
  """Runs `f` once per slice on its rows; arguments in `replicated` are whole.

  Args:
    whole_out: bool for each result: whether it is the same on every slice
  """
  spec = lambda whole: PartitionSpec() if whole else PartitionSpec(axes.DATA)
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=tuple(spec(i in replicated) for i in range(num_args)),
    out_specs=spec(False) if whole_out is None else tuple(map(spec, whole_out)),
    axis_names={axes.DATA},
  )


def place(mesh: Mesh, x: np.ndarray) -> jax.Array:
  """[slices, b, ...] on the host -> [slices * b, ...] over the slices."""
  flat = x.reshape(-1, *x.shape[2:])
  return jax.device_put(flat, axes.sharding(mesh, axes.DATA))


def forward(
  config, keep, params, kv, tokens, positions, mask=None, slots=None, rotations=None
):
  """Runs the target over the KV, and writes into it.

  Args:
    mask, slots, rotations: see `target.Target.with_taps`
  Returns:
    features f[B T D], what is kept of them f[B T E], and the new KV
  """
  run = functools.partial(
    target.Target(config).apply,
    {"params": params},
    method=target.Target.with_taps,
  )
  taps = keep.taps if keep else ()
  features, tapped, kv = run(tokens, positions, taps, mask, kv, slots, rotations)
  states = tapped if taps else features
  if taps and keep.final:
    states = jnp.concatenate([tapped, features.astype(tapped.dtype)], -1)
  return features, states, kv


def make_prefill(config: config_lib.ModelConfig, mesh: Mesh, keep: Keep | None):
  """(params, store, tokens i32[r T], start i32[r], row i32[r]) -> store.

  Computes a block of prompt tokens and writes it into rows of the prompt store
  (donated). Rows outside the store are computed and dropped.
  """

  def local(params, store, tokens, start, row):
    gathered = jax.tree.map(lambda x: x.at[row].get(mode="clip"), store)
    at = start[:, None] + jnp.arange(tokens.shape[1])
    _, states, kv = forward(config, keep, params, gathered.kv, tokens, at)
    kept = gathered.features
    if kept is not None:
      b = jnp.arange(tokens.shape[0])[:, None]
      kept = kept.at[b, at].set(states.astype(kept.dtype), mode="drop")
    updated = Context(kv, kept)
    return jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), store, updated)

  return jax.jit(
    per_slice(mesh, local, 5, replicated=(0,)),
    donate_argnums=1,
    out_shardings=_shardings(abstract_store(mesh, config, 1, 1, keep)),
  )


def make_admit(config: config_lib.ModelConfig, mesh: Mesh, keep: Keep | None):
  """(kv, features, store, row i32[B]) -> kv, features.

  Slots whose `row` is not negative take over that row of the prompt store; the others
  stay as they are. KV and features are donated.
  """

  def local(kv, features, store, row):
    taken = row >= 0

    def copy(old, stored, axis):
      prompt = stored[jnp.maximum(row, 0)]
      size = min(old.shape[axis], prompt.shape[axis])
      prompt = jax.lax.slice_in_dim(prompt, 0, size, axis=axis)
      head = jax.lax.slice_in_dim(old, 0, size, axis=axis)
      mask = taken.reshape((-1,) + (1,) * (old.ndim - 1))
      return jax.lax.dynamic_update_slice_in_dim(
        old, jnp.where(mask, prompt, head), 0, axis
      )

    kv = tuple(
      jax.tree.map(copy, old, stored, cache_lib.SLOT_AXIS)
      for old, stored in zip(kv, store.kv, strict=True)
    )
    if features is not None:
      nowhere = features.page.shape[1] * features_lib.PAGE
      at = jnp.where(taken[:, None], jnp.arange(store.features.shape[1]), nowhere)
      features = features.write(at, store.features[jnp.maximum(row, 0)])
    return kv, features

  slots = slots_shardings(mesh, config, keep)
  return jax.jit(
    per_slice(mesh, local, 4),
    donate_argnums=(0, 1),
    out_shardings=(slots.kv, slots.features),
  )


def varying(x: jax.Array) -> jax.Array:
  """The same value on every slice, as one that may differ from now on."""
  return jax.lax.pcast(x, axes.DATA, to="varying")


def nothing_emitted(slots: Slots, width: int, seconds, longest: int | None = None):
  """`Emitted` at a chunk's start, with room for `width` tokens a slot.

  Args:
    longest: R of `accepted`, for a chunk that speculates
  """
  B = slots.pending.shape[0]
  blank = lambda dtype, *shape: varying(jnp.zeros(shape, dtype))
  return Emitted(
    tokens=blank(jnp.int32, B, width),
    logp=blank(jnp.float32, B, width),
    logp_filtered=blank(jnp.float32, B, width),
    count=blank(jnp.int32, B),
    remaining=slots.remaining,
    steps=blank(jnp.int32, 1),
    seconds=seconds,
    accepted=None if longest is None else blank(jnp.int32, 1, longest),
  )


def make_chunk(config: config_lib.ModelConfig, mesh: Mesh, width: int, keep: Keep | None):
  """(params, slots, n i32[], seconds f32[slices]) -> slots, Emitted.

  Draws up to n <= `width` tokens a slot. Slots are donated. What was emitted comes
  back replicated, so that every process sees the same; so do the `seconds` that
  each process measured.
  """
  return jax.jit(
    per_slice(mesh, chunk(config, width, keep), 4, replicated=(0, 2)),
    donate_argnums=1,
    out_shardings=(slots_shardings(mesh, config, keep), axes.sharding(mesh)),
  )


def chunk(config: config_lib.ModelConfig, width: int, keep: Keep | None):
  """What `make_chunk` runs on each slice."""

  def local(params, slots, n, seconds):
    emitted = nothing_emitted(slots, width, seconds)
    rotations = layers.rotation(config, jnp.arange(slots.kv[0].length))

    def running(carry):
      i, slots, _ = carry
      return (i < n) & jnp.any(slots.remaining > 0)

    def step(carry):
      i, slots, emitted = carry
      slots, drawn = decode_step(config, keep, params, slots, rotations)
      live = emitted.remaining > 0
      put = lambda x, column: jax.lax.dynamic_update_slice_in_dim(
        x, column[:, None].astype(x.dtype), i, 1
      )
      emitted = emitted.replace(
        tokens=put(emitted.tokens, drawn.token),
        logp=put(emitted.logp, drawn.logp),
        logp_filtered=put(emitted.logp_filtered, drawn.logp_filtered),
        count=emitted.count + live,
        remaining=slots.remaining,
        steps=emitted.steps + 1,
      )
      return i + 1, slots, emitted

    start = (varying(jnp.int32(0)), slots, emitted)
    return jax.lax.while_loop(running, step, start)[1:]

  return local


def decode_step(config, keep, params, slots: Slots, rotations: layers.Rotation):
  """Draws one token for each slot; free slots stand still."""
  tokens, positions = slots.pending[:, None], slots.position[:, None]
  args = (config, keep, params, slots.kv, tokens, positions)
  features, states, kv = forward(*args, rotations=rotations)
  logits = target.Target(config).apply(
    {"params": params}, features[:, 0], method=target.Target.logits
  )
  drawn = sampling_lib.draw(logits, slots.sampling, slots.position + 1)
  live = slots.remaining > 0
  stopped = jnp.any(drawn.token[:, None] == slots.stop_tokens, -1)
  return (
    slots.replace(
      pending=jnp.where(live, drawn.token, slots.pending),
      position=slots.position + live,
      remaining=jnp.where(live & ~stopped, slots.remaining - 1, 0),
      kv=kv,
      features=slots.features and slots.features.write(positions, states),
    ),
    drawn,
  )


def make_resize(mesh: Mesh, shardings, move: bool):
  """(layer, row i32[b], length) -> the chosen rows of a layer's KV, cut or filled up.

  Rows are counted over all slices; -1 takes any. Without `move` every row stays on
  its slice, and the program has no communication. New slots are zero.
  """

  def resized(x, axis, row, length):
    x = x[jnp.maximum(row, 0)]
    if length <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, length, axis=axis)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, pad)

  def resize(layer, row, length):
    def across(layer, row):
      of = lambda x, axis: resized(x, axis, row, length)
      return jax.tree.map(of, layer, cache_lib.SLOT_AXIS)

    def local(layer, row):
      start = jax.lax.axis_index(axes.DATA) * layer.k.shape[0]
      return across(layer, row - start)

    return (across if move else per_slice(mesh, local, 2))(layer, row)

  return jax.jit(resize, static_argnames="length", out_shardings=shardings)


def make_programs(
  config: config_lib.ModelConfig, mesh: Mesh, width: int, keep: Keep | None, move: bool
) -> dict:
  """Every jitted function of a rollout, by name; see `rollout`."""
  return {
    "prefill": make_prefill(config, mesh, keep),
    "admit": make_admit(config, mesh, keep),
    "chunk": make_chunk(config, mesh, width, keep),
    "resize": make_resize(mesh, cache_shardings(mesh, config)[0], move),
    "move_features": features_lib.make_move(mesh),
  }
