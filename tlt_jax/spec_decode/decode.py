"""Device programs of a rollout: prefill, admit, decode a chunk, resize.

Slots are the rows of a batch; each holds one running request. All programs run
per slice (manual over `data`): a slice with nothing left to do leaves its loop
at once, whatever its neighbours do. Tensor parallelism inside a slice is left to
the compiler.

A slot's last known token is *pending*: its KV is not computed yet. A prompt's
prefill therefore stops before its last token, and every token that is drawn is
drawn in the same loop.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import target
from tlt_jax.spec_decode import sampling as sampling_lib


@flax.struct.dataclass
class Context:
  """What the target has computed of some rows: KV, and features if kept."""

  kv: cache_lib.KVCache
  features: jax.Array | None  # f[B S D]


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


def context_shardings(mesh: Mesh, config: config_lib.ModelConfig, features: bool):
  """Rows over `data`, kv heads over `model` where they divide."""
  tensor = mesh.shape[axes.MODEL]
  heads = axes.MODEL if config.num_kv_heads % tensor == 0 else None
  layer = axes.sharding(mesh, axes.DATA, heads)
  return Context(
    kv=(cache_lib.LayerCache(layer, layer),) * config.num_layers,
    features=axes.sharding(mesh, axes.DATA) if features else None,
  )


def abstract_context(mesh, config, rows: int, length: int, features: bool) -> Context:
  """Shapes and shardings of a context of `rows` rows a slice."""
  B = rows * mesh.shape[axes.DATA]

  def make():
    shape = (B, length, config.width)
    return Context(
      kv=cache_lib.init(config, B, length),
      features=jnp.zeros(shape, config.dtype) if features else None,
    )

  return _abstract(jax.eval_shape(make), context_shardings(mesh, config, features))


def init_context(mesh, config, rows: int, length: int, features: bool) -> Context:
  """Empty context of `rows` rows a slice, array by array."""
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
    abstract_context(mesh, config, rows, length, features),
  )


def abstract_slots(
  mesh, config, batch: int, length: int, stop_tokens: int, features: bool
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
    context=abstract_context(mesh, config, batch, length, features),
  )


def _abstract(shapes, shardings):
  return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)


def slots_shardings(mesh, config, features) -> Slots:
  shapes = abstract_slots(mesh, config, 1, 1, 1, features)
  return jax.tree.map(lambda x: x.sharding, shapes)


def per_slice(mesh: Mesh, f, num_args: int, replicated: tuple[int, ...] = ()):
  """Runs `f` once per slice on its rows; arguments in `replicated` are whole."""
  rows, whole = PartitionSpec(axes.DATA), PartitionSpec()
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=tuple(whole if i in replicated else rows for i in range(num_args)),
    out_specs=rows,
    axis_names={axes.DATA},
  )


def _forward(config, params, context: Context, tokens, positions):
  """Runs the target over the context: features f[B T D], and the new context."""
  model = target.Target(config)
  features, kv = model.apply(
    {"params": params}, tokens, positions, cache=context.kv
  )
  kept = context.features
  if kept is not None:
    b = jnp.arange(tokens.shape[0])[:, None]
    kept = kept.at[b, positions].set(features.astype(kept.dtype), mode="drop")
  return features, Context(kv, kept)


def make_prefill(config: config_lib.ModelConfig, mesh: Mesh, features: bool):
  """(params, store, tokens i32[r T], start i32[r], row i32[r]) -> store.

  Computes a block of prompt tokens and writes it into rows of the prompt store
  (donated). Rows outside the store are computed and dropped.
  """

  def local(params, store, tokens, start, row):
    gathered = jax.tree.map(lambda x: x.at[row].get(mode="clip"), store)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    _, updated = _forward(config, params, gathered, tokens, positions)
    return jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), store, updated)

  return jax.jit(
    per_slice(mesh, local, 5, replicated=(0,)),
    donate_argnums=1,
    out_shardings=context_shardings(mesh, config, features),
  )


def make_admit(config: config_lib.ModelConfig, mesh: Mesh, features: bool):
  """(slots, store, row i32[B], new Slots without context) -> slots.

  Slots whose `row` is not negative take over the new values and the context of
  that row of the prompt store; the others stay as they are (donated).
  """

  def local(slots, store, row, new):
    taken = row >= 0
    S = jax.tree.leaves(slots.context.kv)[0].shape[2]

    def copy(old, stored, axis):
      prompt = stored[jnp.maximum(row, 0)]
      prompt = jax.lax.slice_in_dim(prompt, 0, min(S, prompt.shape[axis]), axis=axis)
      head = jax.lax.slice_in_dim(old, 0, prompt.shape[axis], axis=axis)
      mask = taken.reshape((-1,) + (1,) * (old.ndim - 1))
      return jax.lax.dynamic_update_slice_in_dim(
        old, jnp.where(mask, prompt, head), 0, axis
      )

    context = Context(
      kv=jax.tree.map(lambda o, s: copy(o, s, 2), slots.context.kv, store.kv),
      features=None
      if store.features is None
      else copy(slots.context.features, store.features, 1),
    )
    pick = lambda old, x: jnp.where(taken.reshape((-1,) + (1,) * (x.ndim - 1)), x, old)
    rest = slots.replace(context=None)
    return jax.tree.map(pick, rest, new).replace(context=context)

  return jax.jit(
    per_slice(mesh, local, 4),
    donate_argnums=0,
    out_shardings=slots_shardings(mesh, config, features),
  )


def make_chunk(config: config_lib.ModelConfig, mesh: Mesh, width: int, features: bool):
  """(params, slots, n i32[]) -> slots, Emitted: up to n <= `width` tokens a slot.

  Slots are donated. What was emitted comes back replicated, so that every
  process sees the same.
  """

  def local(params, slots, n):
    B = slots.pending.shape[0]
    varying = functools.partial(jax.lax.pcast, axis_name=axes.DATA, to="varying")
    blank = lambda dtype: varying(jnp.zeros((B, width), dtype))
    emitted = Emitted(
      tokens=blank(jnp.int32),
      logp=blank(jnp.float32),
      logp_filtered=blank(jnp.float32),
      count=varying(jnp.zeros(B, jnp.int32)),
      remaining=slots.remaining,
      steps=varying(jnp.zeros(1, jnp.int32)),
    )

    def running(carry):
      i, slots, _ = carry
      return (i < n) & jnp.any(slots.remaining > 0)

    def step(carry):
      i, slots, emitted = carry
      slots, drawn = decode_step(config, params, slots)
      live = emitted.remaining > 0
      put = lambda x, column: jax.lax.dynamic_update_slice_in_dim(
        x, column[:, None].astype(x.dtype), i, 1
      )
      emitted = Emitted(
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

  return jax.jit(
    per_slice(mesh, local, 3, replicated=(0, 2)),
    donate_argnums=1,
    out_shardings=(slots_shardings(mesh, config, features), axes.sharding(mesh)),
  )


def decode_step(config, params, slots: Slots):
  """Draws one token for each slot; free slots stand still."""
  features, context = _forward(
    config, params, slots.context, slots.pending[:, None], slots.position[:, None]
  )
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


def make_gather(mesh: Mesh, shardings, move: bool):
  """(tree, row i32[b]) -> the chosen rows of every array; -1 takes any.

  Rows are counted over all slices. Without `move` every row stays on its slice,
  and the program has no communication.
  """

  def local(tree, row):
    start = jax.lax.axis_index(axes.DATA) * jax.tree.leaves(tree)[0].shape[0]
    row = jnp.maximum(row - start, 0)
    return jax.tree.map(lambda x: x[row], tree)

  def across(tree, row):
    return jax.tree.map(lambda x: x[jnp.maximum(row, 0)], tree)

  gather = across if move else per_slice(mesh, local, 2)
  return jax.jit(gather, out_shardings=shardings)


def make_grow(axis: int, shardings):
  """(tree, length) -> every array with `axis` cut, or filled with zeros."""

  def one(x, length):
    if length <= x.shape[axis]:
      return jax.lax.slice_in_dim(x, 0, length, axis=axis)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, pad)

  grow = lambda tree, length: jax.tree.map(lambda x: one(x, length), tree)
  return jax.jit(grow, static_argnames="length", out_shardings=shardings)


def make_programs(
  config: config_lib.ModelConfig, mesh: Mesh, width: int, features: bool, move: bool
) -> dict:
  """Every jitted function of a rollout, by name; see `rollout`."""
  shardings = slots_shardings(mesh, config, features)
  layer, rest = shardings.context.kv[0], shardings.replace(context=None)
  programs = {
    "prefill": make_prefill(config, mesh, features),
    "admit": make_admit(config, mesh, features),
    "chunk": make_chunk(config, mesh, width, features),
    "gather": make_gather(mesh, layer, move),
    "gather_rest": make_gather(mesh, rest, move),
    "grow": make_grow(2, layer),
  }
  if features:
    kept = shardings.context.features
    programs["gather_features"] = make_gather(mesh, kept, move)
    programs["grow_features"] = make_grow(1, kept)
  return programs
