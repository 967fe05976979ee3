"""Device programs of plain decoding: a pass of the target, a chunk, a resize.

Each runs once per slice on the slice's own rows, see `slices`. The arrays are in
`slots`; how a chunk is called is in `chunk`.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.pallas_kernels.verify_sample import parts
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib


def forward(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  kv: cache_lib.KVCache,
  tokens: jax.Array,
  positions: jax.Array,
  seen: seen_lib.Seen | None = None,
  start: jax.Array | None = None,
  rotations: layers.Rotation | None = None,
) -> tuple[jax.Array, jax.Array, cache_lib.KVCache]:
  """Runs the target over the KV, and writes into it.

  Args:
    config: the target's
    params: its parameters
    layout: of the features that are kept; None: none are
    kv: what it has computed of the rows so far
    tokens: i32[B T]
    positions: i32[B T]  in each row's sequence
    seen, start, rotations: see `target.Target.with_taps`
  Returns:
    the states after the final norm f[B T D]; the features to keep f[B T E]; and the
    new KV
  """
  apply = functools.partial(target.Target(config).apply, {"params": params})
  run = functools.partial(apply, method=target.Target.with_taps)
  taps = layout.taps if layout else ()
  final, tapped, kv = run(tokens, positions, taps, seen, kv, start, rotations)
  return final, layout.join(tapped, final) if layout else final, kv


def decode(
  config: config_lib.ModelConfig, tokens: int, layout: features_lib.Layout | None
) -> chunk_lib.Decode:
  """Plain decoding of one slice: a token per live slot and step.

  Args:
    tokens: of a slot for which there is room; `Limits.tokens` is at most that
    layout: of the features that are kept; None: none are
  """

  def run(weights, slots, draft_state, limits):
    emitted = slots_lib.nothing_emitted(slots, tokens)
    rotations = layers.rotation(config, jnp.arange(slots.length))

    def running(carry):
      i, slots, _ = carry
      return (i < limits.tokens) & jnp.any(slots.remaining > 0)

    def step(carry):
      i, slots, emitted = carry
      slots, drawn = decode_step(config, layout, weights.target, slots, rotations)
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

    start = (slices.varying(jnp.int32(0)), slots, emitted)
    _, slots, emitted = jax.lax.while_loop(running, step, start)
    return slots, draft_state, emitted

  return run


def make_chunk(
  config: config_lib.ModelConfig,
  mesh: Mesh,
  tokens: int,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
  paged: bool = False,
) -> Callable[..., chunk_lib.Done]:
  """The plain chunk program; see `chunk` for how it is called.

  Args:
    tokens, layout: see `decode`
    kernels: those of the slots' caches
    paged: whether these lie in pages
  """
  slots = slots_lib.slots_shardings(mesh, config, layout, kernels, paged)
  run = chunk_lib.without_training(decode(config, tokens, layout))
  return chunk_lib.make(mesh, run, chunk_lib.Done(slots, None, None), kernels=kernels)


def decode_step(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  slots: slots_lib.Slots,
  rotations: layers.Rotation,
) -> tuple[slots_lib.Slots, parts.Sample]:
  """Draws one token for each slot; free slots stand still.

  Args:
    layout: of the features that are kept; None: none are
    params: the target's
    rotations: of positions 0, 1, ..., S-1
  """
  tokens, positions = slots.pending[:, None], slots.position[:, None]
  final, features, kv = forward(
    config, layout, params, slots.kv, tokens, positions, None, slots.start, rotations
  )
  logits = target.Target(config).apply(
    {"params": params}, final[:, 0], method=target.Target.logits
  )
  drawn = sampling_lib.sample(logits, slots.sampling, slots.position + 1, slots.kernels)
  live = slots.remaining > 0
  stopped = jnp.any(drawn.token[:, None] == slots.stop_tokens, -1)
  remaining = jnp.where(live & ~stopped, slots.remaining - 1, 0)
  slots = slots.replace(
    pending=jnp.where(live, drawn.token, slots.pending),
    position=slots.position + live,
    remaining=remaining,
    kv=cache_lib.of_live(kv, remaining > 0),
    features=slots.features and slots.features.write(positions, features),
  )
  return slots, drawn


def make_resize(
  mesh: Mesh, config: config_lib.ModelConfig, move: bool
) -> Callable:
  """(layer, row i32[b], length) -> the chosen rows of a layer's KV, cut or filled up.

  Rows are counted over all slices; -1 takes any. Without `move` every row stays on its
  slice, and the program has no communication; with it, rows that change their slice are
  handed over one after the other. New cache slots are zero.
  """

  def resize(layer, row, length):
    def local(layer, row):
      start = jax.lax.axis_index(axes.DATA) * layer.k.shape[0]
      return _rows(layer, row - start, length)

    def across(layer, row, every):
      return _hand_over(layer, local(layer, row), every, length)

    if not move:
      return slices.per_slice(mesh, local, slices.ROWS, slices.ROWS)(layer, row)
    into = (slices.ROWS, slices.ROWS, slices.WHOLE)
    return slices.per_slice(mesh, across, into, slices.ROWS)(layer, row, row)

  over = slots_lib.cache_sharding(mesh, config)
  return jax.jit(resize, static_argnames="length", out_shardings=over)


def _rows(
  layer: cache_lib.LayerCache, row: jax.Array, length: int
) -> cache_lib.LayerCache:
  """Rows i32[b] of a slice's cache, cut or filled up; others' rows are any of its own."""

  def rows(x):
    x = x[jnp.clip(row, 0, x.shape[0] - 1), :, :length]
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))

  return jax.tree.map(rows, layer)


def _hand_over(
  old: cache_lib.LayerCache, new: cache_lib.LayerCache, every: jax.Array, length: int
) -> cache_lib.LayerCache:
  """Writes the rows into `new` that come from other slices' `old`, one at a time.

  Args:
    old, new: of one slice
    every: i32[slices b]  the old row of each new one of all slices; -1: any
    length: of the new rows
  """
  n, b = old.k.shape[0], new.k.shape[0]
  here, goal = jax.lax.axis_index(axes.DATA), jnp.arange(len(every))
  moves = (every >= 0) & (every // n != goal // b)
  first = jnp.argsort(~moves)

  def hand_over(i, new):
    source, goal = every[first[i]], first[i]
    sent = _rows(old, (source - here * n)[None], length)

    def write(x, sent):
      sent = slices.handed_out(sent, source // n == here)
      was = jax.lax.dynamic_slice_in_dim(x, goal % b, 1)
      row = jnp.where(goal // b == here, sent, was)
      return jax.lax.dynamic_update_slice_in_dim(x, row, goal % b, 0)

    return jax.tree.map(write, new, sent)

  return jax.lax.fori_loop(0, jnp.sum(moves), hand_over, new)
