"""Speculative decoding of a chunk, on the devices.

An iteration drafts a tree, runs the target over all its nodes in one pass, and accepts
the tokens that plain decoding would have drawn (`verify`). Its output is plain decoding's
token for token, so plain and speculative chunks can alternate in any order.
"""

import chex
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode as decode_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify


def decode(
  source: source_lib.Source, strategy: strategy_lib.Strategy, tokens: int
) -> chunk_lib.Decode:
  """Speculative decoding of one slice, at `Limits.depth`.

  Runs `Limits.steps` iterations, or until a slot might exceed `Limits.tokens` in the next.
  """
  setting = source.setting
  config, most = setting.config, setting.room.longest

  def run(weights, slots, draft_state, limits):
    emitted = slots_lib.nothing_emitted(slots, tokens, most)
    propose, absorb = source.bind(strategy, weights, slots.length)
    draft_state = source.begin(slots, draft_state)

    def running(carry):
      i, slots, _, emitted = carry
      live = slots.remaining > 0
      fullest = jnp.max(jnp.where(live, emitted.count, 0))
      room = fullest + limits.depth + 1 <= limits.tokens
      return (i < limits.steps) & jnp.any(live) & room

    def iteration(carry):
      i, slots, state, emitted = carry
      proposal = propose(slots, state, limits.depth)
      slots, output = verify_and_accept(
        config,
        setting.layout,
        weights.target,
        weights.rotations,
        slots,
        proposal.tree,
        most=most,
        width=strategy.width,
      )
      emitted = emitted.extend(
        output.tokens, output.logp, output.logp_filtered, output.count
      )
      drew_more = jnp.arange(most) < output.count[:, None]
      accepted = emitted.accepted + jnp.sum(drew_more, 0, keepdims=True)
      emitted = emitted.replace(accepted=accepted)
      return i + 1, slots, absorb(proposal.state, output), emitted

    start = (slices.varying(jnp.int32(0)), slots, draft_state, emitted)
    i, slots, state, emitted = jax.lax.while_loop(running, iteration, start)
    emitted = emitted.replace(remaining=slots.remaining, steps=i[None])
    return slots, source.end(state), emitted

  return run


def verify_and_accept(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  rotations: layers.Rotation,
  slots: slots_lib.Slots,
  tree: tree_lib.Tree,
  *,
  most: int,
  width: int,
) -> tuple[slots_lib.Slots, verify.Output]:
  """Runs the target over the trees once; keeps up to A = `most` accepted tokens of each."""
  B, J = tree.tokens.shape
  chex.assert_shape(slots.position, (B,))
  positions = slots.position[:, None] + tree.depth
  if width == 1:
    nodes, seen = few_rows.chain(slots.position, J), seen_lib.causal(slots.position, J)
  else:
    ancestors = tree_lib.ancestors(tree.parent)
    nodes = few_rows.tree(slots.position, tree.depth, ancestors, deepest=most - 1)
    seen = seen_lib.of_mask(slots.position, ancestors)
  logits, features, kv = decode_lib.draw_pass(
    config, layout, params, slots.kv, tree.tokens, positions, nodes, seen, rotations
  )
  drawn = sampling_lib.sample(
    logits.reshape(B * J, -1),
    sampling_lib.repeat(slots.sampling, J),
    (positions + 1).reshape(-1),
    slots.kernels,
  )
  drawn = jax.lax.optimization_barrier(drawn)  # see `decode.decode_step`
  drawn = jax.tree.map(lambda x: x.reshape(B, J), drawn)

  walk = verify.walk_chain if width == 1 else verify.walk
  path, accepted = walk(tree, drawn.token, most)
  drawn = jax.tree.map(lambda x: jnp.take_along_axis(x, path, 1), drawn)
  features = jnp.take_along_axis(features, path[..., None], 1)
  if width > 1:  # the accepted path moves to where a sequence has its tokens
    source = slots.position[:, None] + path
    kv = kv.with_layers(layer.move(source, slots.position) for layer in kv)

  live = slots.remaining > 0
  count, stopped = verify.cut(drawn.token, accepted + 1, slots.stop_tokens, slots.remaining)
  count = jnp.where(live, count, 0)
  last = jnp.take_along_axis(drawn.token, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
  place = slots.position[:, None] + jnp.arange(most)
  remaining = jnp.where(live & ~stopped, slots.remaining - count, 0)
  new = slots.with_features(place, features).replace(
    pending=jnp.where(live, last, slots.pending),
    position=jnp.where(remaining > 0, slots.position + count, 0),
    remaining=remaining,
    kv=kv,
  )
  return new.without_pages(), verify.Output(
    tokens=drawn.token,
    logp=drawn.logp,
    logp_filtered=drawn.logp_filtered,
    features=features,
    count=count,
  )
