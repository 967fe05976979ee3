"""Plain decoding on the devices: a pass of the target, a step, a chunk."""

import functools

import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import few_rows
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import few_rows as few_rows_kernels
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.pallas_kernels.verify_sample import parts
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
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

  Takes tokens and positions i32[B T]; returns the states after the final norm f[B T D], the
  features to keep f[B T E], and the new KV. For the rest see `target.Target.with_taps`.
  """
  apply = functools.partial(target.Target(config).apply, {"params": params})
  run = functools.partial(apply, method=target.Target.with_taps)
  taps = layout.taps if layout else ()
  final, tapped, kv = run(tokens, positions, taps, seen, kv, start, rotations)
  return final, layout.join(tapped, final) if layout else final, kv


def draw_pass(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  kv: cache_lib.KVCache,
  tokens: jax.Array,
  positions: jax.Array,
  nodes: few_rows_kernels.Nodes,
  seen: seen_lib.Seen | None,
  rotations: layers.Rotation,
) -> tuple[jax.Array, jax.Array, cache_lib.KVCache]:
  """A pass that tokens are drawn from, over the nodes of every request.

  Takes tokens and positions i32[B J], and what the nodes see, in two forms. Returns logits
  f32[B J V], the features to keep f[B J E], and the new KV.
  """
  if few_rows.fits(config, kv, tokens.size):
    taps = layout.taps if layout else ()
    args = config, params, kv, tokens, positions, nodes, rotations, taps
    logits, final, tapped, kv = few_rows.run(*args)
    return logits, layout.join(tapped, final) if layout else final, kv
  final, features, kv = forward(
    config, layout, params, kv, tokens, positions, seen, nodes.start, rotations
  )
  logits = target.Target(config).apply(
    {"params": params}, final, method=target.Target.logits
  )
  return logits, features, kv


def decode(
  config: config_lib.ModelConfig, tokens: int, layout: features_lib.Layout | None
) -> chunk_lib.Decode:
  """Plain decoding of one slice; `Limits.tokens` is at most `tokens`."""

  def run(weights, slots, draft_state, limits):
    B = len(slots.pending)
    if B == 1 and few_rows.fits(config, slots.kv, B):
      slots = slots.with_free_slot()  # XLA does not fuse what it makes of single numbers
    emitted = slots_lib.nothing_emitted(slots, tokens)

    def running(carry):
      slots, emitted = carry
      return jnp.any((slots.remaining > 0) & (emitted.count < limits.tokens))

    def step(carry):
      slots, emitted = carry
      live = slots.remaining > 0
      slots, drawn = decode_step(config, layout, weights.target, slots, weights.rotations)
      drawn = (x[:, None] for x in drawn)
      return slots, emitted.extend(*drawn, live.astype(jnp.int32))

    slots, emitted = jax.lax.while_loop(running, step, (slots, emitted))
    steps = jnp.max(emitted.count, keepdims=True)  # of a row that ran in all of them
    emitted = emitted.replace(remaining=slots.remaining).by_row(lambda x: x[:B])
    slots = slots.by_row(lambda x: x[:B])
    return slots, draft_state, emitted.replace(steps=steps)

  return run


def decode_step(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  slots: slots_lib.Slots,
  rotations: layers.Rotation,
) -> tuple[slots_lib.Slots, parts.Sample]:
  """Draws one token for each slot; free slots do not change."""
  tokens, positions = slots.pending[:, None], slots.position[:, None]
  nodes = few_rows_kernels.chain(slots.position, 1)
  logits, features, kv = draw_pass(
    config, layout, params, slots.kv, tokens, positions, nodes, None, rotations
  )
  drawn = sampling_lib.sample(
    logits[:, 0], slots.sampling, slots.position + 1, slots.kernels
  )
  # Else XLA draws again in each kernel that reads this, and copies what one of them writes.
  drawn = jax.lax.optimization_barrier(drawn)
  slots = slots.with_features(positions, features)
  live = slots.remaining > 0
  stopped = jnp.any(drawn.token[:, None] == slots.stop_tokens, -1)
  remaining = jnp.where(live & ~stopped, slots.remaining - 1, 0)
  slots = slots.replace(
    pending=jnp.where(live, drawn.token, slots.pending),
    position=jnp.where(remaining > 0, slots.position + 1, 0),
    remaining=remaining,
    kv=kv,
  )
  return slots.without_pages(), drawn
