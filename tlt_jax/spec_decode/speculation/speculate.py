"""Speculative decoding of a chunk, on the devices.

An iteration drafts a tree, lets the target look at all its nodes in one pass, keeps
what stands, and tells the source of drafts what that was. It changes nothing else than
plain decoding does; plain and speculative chunks may follow each other in any order.

Three ways to draft and to verify:

- coupled: drafter and target draw with the same noise; what stands is what plain
  decoding would have drawn, token for token (`verify`).
- likeliest: verified alike, but the drafter's likeliest tokens are guessed, as EAGLE-2
  does; as lossless, and worse wherever the temperature is not 0.
- rejection: the drafter draws with noise of its own; tokens are distributed as the
  target's, and are not those of plain decoding (`rejection`).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode as decode_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import rejection
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify


def decode(
  source: source_lib.Source, strategy: strategy_lib.Strategy, tokens: int
) -> chunk_lib.Decode:
  """Speculative decoding of one slice.

  It goes on for `Limits.steps` iterations, while no slot can draw more than
  `Limits.tokens` by the next one.

  Args:
    source: of the drafts
    strategy: its width and nodes are compiled in, its depth is `Limits.depth`
    tokens: of a slot for which there is room; `Limits.tokens` is at most that
  """
  setting = source.setting
  config, most = setting.config, setting.room.longest

  def run(weights, slots, draft_state, limits):
    emitted = slots_lib.nothing_emitted(slots, tokens, most)
    S = slots.length
    rotations = layers.rotation(config, jnp.arange(S))
    propose, absorb = source.bind(strategy, weights, S)

    def running(carry):
      i, slots, _, emitted = carry
      live = slots.remaining > 0
      fullest = jnp.max(jnp.where(live, emitted.count, 0))
      room = fullest + limits.depth + 1 <= limits.tokens
      return (i < limits.steps) & jnp.any(live) & room

    def iteration(carry):
      i, slots, state, emitted = carry
      drafted = slots.replace(position=slots.start)  # drafting reads nothing for free ones
      proposal = propose(drafted, state, limits.depth)
      q = proposal.q
      if setting.verification == source_lib.REJECTION and q is None:
        q = _certain(proposal.tree, config.vocab_size)
      live = slots.remaining > 0
      slots, output = verify_and_accept(
        config,
        setting.layout,
        weights.target,
        rotations,
        slots,
        proposal.tree,
        q,
        most=most,
        width=strategy.width,
      )
      emitted = _emit(emitted, output, live, slots.remaining)
      return i + 1, slots, absorb(proposal.state, output), emitted

    start = (slices.varying(jnp.int32(0)), slots, draft_state, emitted)
    return jax.lax.while_loop(running, iteration, start)[1:]

  return run


def _certain(tree: tree_lib.Tree, vocab_size: int) -> jax.Array:
  """q f32[B J V] of a chain whose guesses were not drawn: all on the guess."""
  return jax.nn.one_hot(jnp.roll(tree.tokens, -1, 1), vocab_size)


def _emit(
  emitted: slots_lib.Emitted, output: verify.Output, live: jax.Array, remaining: jax.Array
) -> slots_lib.Emitted:
  """Puts the output of an iteration behind what was emitted before.

  Args:
    live: bool[B]  slots that ran in this iteration
    remaining: i32[B]  of the slots, after it
  """
  (B, most), tokens = output.tokens.shape, emitted.tokens.shape[1]
  inside = jnp.arange(most) < output.count[:, None]
  at = jnp.where(inside, emitted.count[:, None] + jnp.arange(most), tokens)
  b = jnp.arange(B)[:, None]
  put = lambda x, y: x.at[b, at].set(y.astype(x.dtype), mode="drop")
  return emitted.replace(
    tokens=put(emitted.tokens, output.tokens),
    logp=put(emitted.logp, output.logp),
    logp_filtered=put(emitted.logp_filtered, output.logp_filtered),
    count=emitted.count + output.count,
    remaining=remaining,
    steps=emitted.steps + 1,
    accepted=emitted.accepted + jnp.sum(inside & live[:, None], 0, keepdims=True),
  )


class Accepted(NamedTuple):
  """The path that stands, and the tokens that follow from it."""

  path: jax.Array  # i32[B A]  nodes from the root on; beyond its end the last one again
  count: jax.Array  # i32[B]  drafted nodes on it
  tokens: jax.Array  # i32[B A]  the token after each node
  logp: jax.Array  # f32[B A]
  logp_filtered: jax.Array  # f32[B A]


def verify_and_accept(
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  params,
  rotations: layers.Rotation,
  slots: slots_lib.Slots,
  tree: tree_lib.Tree,
  q: jax.Array | None,
  *,
  most: int,
  width: int,
) -> tuple[slots_lib.Slots, verify.Output]:
  """Runs the target over the trees once, and keeps the tokens that follow from it.

  Args:
    config: the target's
    params: its parameters
    layout: of the features that are kept; None: none are
    rotations: of positions 0, 1, ..., see `target.Target.with_taps`
    tree: the guesses, J nodes per slot
    q: f32[B J V], what the children of each node were drawn from, for verification by
      rejection; None for the tokens of plain decoding
    most: A
    width: W; 1 for a chain
  """
  B, J = tree.tokens.shape
  chex.assert_shape(slots.position, (B,))
  if q is not None:
    chex.assert_shape(q, (B, J, config.vocab_size))
  logits, features, kv = _look(config, layout, params, rotations, slots, tree, width)
  if q is None:
    stands = _couple(logits, slots, tree, min(J, most), width)
  else:
    stands = _reject(logits, slots, tree, q, min(J, most), width)
  pad = lambda x: jnp.pad(x, ((0, 0), (0, most - x.shape[1])), mode="edge")
  stands = stands._replace(path=pad(stands.path))
  live = slots.remaining > 0
  tokens = pad(stands.tokens)
  count, stopped = verify.cut(tokens, stands.count + 1, slots.stop_tokens, slots.remaining)
  count = jnp.where(live, count, 0)
  last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
  features = jnp.take_along_axis(features, stands.path[..., None], 1)
  place = slots.position[:, None] + jnp.arange(most)
  if width > 1:  # the accepted path moves to where a sequence has its tokens
    source = slots.start[:, None] + stands.path
    kv = cache_lib.with_layers(kv, [layer.move(source, slots.start) for layer in kv])
  remaining = jnp.where(live & ~stopped, slots.remaining - count, 0)
  new = slots.replace(
    pending=jnp.where(live, last, slots.pending),
    position=slots.position + count,
    remaining=remaining,
    kv=cache_lib.of_live(kv, remaining > 0),
    features=slots.features and slots.features.write(place, features),
  )
  return new, verify.Output(
    tokens=tokens,
    logp=pad(stands.logp),
    logp_filtered=pad(stands.logp_filtered),
    features=features,
    count=count,
  )


def _look(config, layout, params, rotations, slots, tree, width):
  """One pass of the target over all nodes: logits f32[B J V], features, and the KV."""
  if width == 1:
    seen = seen_lib.causal(slots.start, tree.tokens.shape[1])
  else:
    seen = seen_lib.of_mask(slots.start, tree_lib.ancestors(tree.parent))
  final, features, kv = decode_lib.forward(
    config,
    layout,
    params,
    slots.kv,
    tree.tokens,
    slots.position[:, None] + tree.depth,
    seen,
    slots.start,
    rotations,
  )
  logits = target.Target(config).apply(
    {"params": params}, final, method=target.Target.logits
  )
  return logits, features, kv


def _couple(logits, slots, tree, most: int, width: int) -> Accepted:
  """The tokens that plain decoding would have drawn, as far as the tree holds them."""
  B, J = tree.tokens.shape
  positions = slots.position[:, None] + tree.depth
  drawn = sampling_lib.sample(
    logits.reshape(B * J, -1),
    sampling_lib.repeat(slots.sampling, J),
    (positions + 1).reshape(-1),
    slots.kernels,
  )
  drawn = jax.tree.map(lambda x: x.reshape(B, J), drawn)
  walk = verify.walk_chain if width == 1 else verify.walk
  path, count = walk(tree, drawn.token, most)
  on_path = lambda x: jnp.take_along_axis(x, path, 1)
  return Accepted(
    path, count, on_path(drawn.token), on_path(drawn.logp), on_path(drawn.logp_filtered)
  )


def _reject(logits, slots, tree, q, most: int, width: int) -> Accepted:
  """The tokens that rejection sampling keeps, and one drawn from what is left."""
  B, J = tree.tokens.shape
  sampling = sampling_lib.repeat(slots.sampling, J)
  flat = logits.reshape(B * J, -1)
  p = rejection.target_distribution(flat, sampling).reshape(logits.shape)
  path, count, tokens = rejection.verify(
    tree, p, q, slots.sampling, slots.position, most, width
  )
  scaled = sampling_lib.scale(flat, sampling).reshape(logits.shape)
  on_path = lambda x: jnp.take_along_axis(x, path[..., None], 1)
  chosen = lambda x: jnp.take_along_axis(x, tokens[..., None], 2)[..., 0]
  logp = chosen(jax.nn.log_softmax(on_path(scaled), -1))
  return Accepted(path, count, tokens, logp, jnp.log(chosen(on_path(p))))
