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
from tlt_jax.spec_decode import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which hidden states of the target are kept next to its KV."""

  width: int  # E
  taps: tuple[int, ...] = ()  # layers; without any the states after the final norm
  final: bool = False  # with taps: the states after the final norm too, behind them


@flax.struct.dataclass
class Context:
  """What the target has computed of some rows: KV, and features if kept."""

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
  context: Context


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


def context_shardings(mesh: Mesh, config: config_lib.ModelConfig, keep: Keep | None):
  """Rows over `data`, kv heads over `model` where they divide."""
  tensor = mesh.shape[axes.MODEL]
  heads = axes.MODEL if config.num_kv_heads % tensor == 0 else None
  layer = axes.sharding(mesh, axes.DATA, heads)
  return Context(
    kv=(cache_lib.LayerCache(layer, layer),) * config.num_layers,
    features=axes.sharding(mesh, axes.DATA) if keep else None,
  )


def abstract_context(mesh, config, rows: int, length: int, keep: Keep | None) -> Context:
  """Shapes and shardings of a context of `rows` rows a slice."""
  B = rows * mesh.shape[axes.DATA]

  def make():
    kept = jnp.zeros((B, length, keep.width), config.dtype) if keep else None
    return Context(cache_lib.init(config, B, length), kept)

  return _abstract(jax.eval_shape(make), context_shardings(mesh, config, keep))


def init_context(mesh, config, rows: int, length: int, keep: Keep | None) -> Context:
  """Empty context of `rows` rows a slice, array by array."""
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
    abstract_context(mesh, config, rows, length, keep),
  )


def abstract_slots(
  mesh, config, batch: int, length: int, stop_tokens: int, keep: Keep | None
) -> Slots:
  """Shapes and shardings of `batch` slots a slice, E = `stop_tokens`."""
  B = batch * mesh.shape[axes.DATA]
  i32, u32, f32 = (
    jax.ShapeDtypeStruct((B,), dtype, sharding=axes.sharding(mesh, axes.DATA))
    for dtype in (jnp.int32, jnp.uint32, jnp.float32)
  )
  return Slots(
    pending=i32,
    position=i32,
    remaining=i32,
    stop_tokens=i32.update(shape=(B, stop_tokens)),
    sampling=sampling_lib.Sampling(
      seed=u32, request=u32, temperature=f32, top_k=i32, top_p=f32, min_p=f32
    ),
    context=abstract_context(mesh, config, batch, length, keep),
  )


def _abstract(shapes, shardings):
  return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)


def slots_shardings(mesh, config, keep) -> Slots:
  shapes = abstract_slots(mesh, config, 1, 1, 1, keep)
  return jax.tree.map(lambda x: x.sharding, shapes)


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
  config, keep, params, context, tokens, positions, mask=None, slots=None, rotations=None
):
  """Runs the target over the context, and writes into it.

  Args:
    mask, slots, rotations: see `target.Target.with_taps`
  Returns:
    features f[B T D], what is kept of them f[B T E], and the new context
  """
  run = functools.partial(
    target.Target(config).apply,
    {"params": params},
    method=target.Target.with_taps,
  )
  taps = keep.taps if keep else ()
  args = (tokens, positions, taps, mask, context.kv, slots, rotations)
  features, tapped, kv = run(*args)
  states = tapped if taps else features
  if taps and keep.final:
    states = jnp.concatenate([tapped, features.astype(tapped.dtype)], -1)
  kept = context.features
  if kept is not None:
    b = jnp.arange(tokens.shape[0])[:, None]
    at = positions if slots is None else slots
    kept = kept.at[b, at].set(states.astype(kept.dtype), mode="drop")
  return features, states, Context(kv, kept)


def make_prefill(config: config_lib.ModelConfig, mesh: Mesh, keep: Keep | None):
  """(params, store, tokens i32[r T], start i32[r], row i32[r]) -> store.

  Computes a block of prompt tokens and writes it into rows of the prompt store
  (donated). Rows outside the store are computed and dropped.
  """

  def local(params, store, tokens, start, row):
    gathered = jax.tree.map(lambda x: x.at[row].get(mode="clip"), store)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    _, _, updated = forward(config, keep, params, gathered, tokens, positions)
    return jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), store, updated)

  return jax.jit(
    per_slice(mesh, local, 5, replicated=(0,)),
    donate_argnums=1,
    out_shardings=context_shardings(mesh, config, keep),
  )


def make_admit(config: config_lib.ModelConfig, mesh: Mesh, keep: Keep | None):
  """(context, store, row i32[B]) -> context.

  Rows whose `row` is not negative take over that row of the prompt store; the
  others stay as they are (donated).
  """

  def local(context, store, row):
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

    return Context(
      kv=tuple(
        jax.tree.map(copy, old, stored, cache_lib.SLOT_AXIS)
        for old, stored in zip(context.kv, store.kv, strict=True)
      ),
      features=None
      if store.features is None
      else copy(context.features, store.features, 1),
    )

  return jax.jit(
    per_slice(mesh, local, 3),
    donate_argnums=0,
    out_shardings=context_shardings(mesh, config, keep),
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
    rotations = layers.rotation(config, jnp.arange(slots.context.kv[0].length))

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
  args = (config, keep, params, slots.context, tokens, positions)
  features, _, context = forward(*args, rotations=rotations)
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
      context=context,
    ),
    drawn,
  )


def make_resize(mesh: Mesh, slot_axis, shardings, move: bool):
  """(tree, row i32[b], length) -> the chosen rows of every array, cut or filled up.

  Rows are counted over all slices; -1 takes any. Without `move` every row stays on
  its slice, and the program has no communication. New slots are zero; `slot_axis`
  tells, per array, which axis counts them.
  """

  def resized(x, axis, row, length):
    x = x[jnp.maximum(row, 0)]
    if length <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, length, axis=axis)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, pad)

  def resize(tree, row, length):
    def across(tree, row):
      return jax.tree.map(lambda x, a: resized(x, a, row, length), tree, slot_axis)

    def local(tree, row):
      start = jax.lax.axis_index(axes.DATA) * jax.tree.leaves(tree)[0].shape[0]
      return across(tree, row - start)

    return (across if move else per_slice(mesh, local, 2))(tree, row)

  return jax.jit(resize, static_argnames="length", out_shardings=shardings)


def make_programs(
  config: config_lib.ModelConfig, mesh: Mesh, width: int, keep: Keep | None, move: bool
) -> dict:
  """Every jitted function of a rollout, by name; see `rollout`."""
  shardings = context_shardings(mesh, config, keep)
  programs = {
    "prefill": make_prefill(config, mesh, keep),
    "admit": make_admit(config, mesh, keep),
    "chunk": make_chunk(config, mesh, width, keep),
    "resize": make_resize(mesh, cache_lib.SLOT_AXIS, shardings.kv[0], move),
  }
  if keep:
    programs["resize_features"] = make_resize(mesh, 1, shardings.features, move)
  return programs
