"""Device programs of speculative decoding: fill the drafter's cache, run a chunk.

An iteration drafts a tree, lets the target look at all its nodes in one pass, keeps
what stands, and takes these tokens with the target's own features into the drafter's
cache. It changes nothing else than plain decoding does; plain and speculative chunks
may follow each other in any order.

Three ways to draft and to verify:

- coupled: drafter and target draw with the same noise; what stands is what plain
  decoding would have drawn, token for token (`verify`).
- likeliest: verified alike, but the drafter's likeliest tokens are guessed, as EAGLE-2
  does; as lossless, and worse wherever the temperature is not 0.
- rejection: the drafter draws with noise of its own; tokens are distributed as the
  target's, and are not those of plain decoding (`rejection`).
"""

from collections.abc import Iterable
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import ngram
from tlt_jax.spec_decode.speculation import rejection
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify

COUPLED, LIKELIEST, REJECTION = VERIFICATIONS = ("coupled", "likeliest", "rejection")


@dataclasses.dataclass(frozen=True)
class Room:
  """What strategies need; the same for all, so that they share the caches."""

  longest: int = 1  # R, tokens that an iteration may draw
  target: int = 0  # slots behind the longest sequence: the nodes of a tree
  drafter: int = 0  # slots behind the longest pair: nodes of a tree that have children

  @classmethod
  def of(cls, strategies: Iterable[strategy_lib.Strategy]):
    trees = [s for s in strategies if s.width > 1]
    nodes = max((s.verify for s in trees), default=0)
    return cls(
      longest=1 + max((s.longest for s in strategies), default=0),
      target=nodes,
      drafter=max([nodes, *(s.width * (s.depth - 1) for s in trees)]),
    )


_FILL_BLOCK = 256  # pairs per row and step of a fill


def keep(drafter: drafter_lib.DrafterConfig, train: bool = False) -> decode.Keep:
  """What the target must keep for a drafter to draft, or also to be trained."""
  width, both = drafter.feature_width, train and bool(drafter.taps)
  return decode.Keep(width + both * drafter.layer.width, drafter.taps, both)


def state_shardings(mesh: Mesh, drafter: drafter_lib.DrafterConfig):
  """Rows over `data`, kv heads over `model` where they divide."""
  tensor = mesh.shape[axes.MODEL]
  heads = axes.MODEL if drafter.layer.num_kv_heads % tensor == 0 else None
  layer, rows = axes.sharding(mesh, axes.DATA, heads), axes.sharding(mesh, axes.DATA)
  return draft_lib.DraftState(cache_lib.LayerCache(layer, layer), rows, rows, rows)


def make_fill(drafter: drafter_lib.DrafterConfig, mesh: Mesh, room: Room):
  """(params, draft params, Features, following i32[B S], position i32[B]) -> DraftState.

  Fills the drafter's cache from kept features; only keys and values are computed.
  `following[b, t]` is the token after token t.
  """

  def local(params, draft_params, features, following, position):
    B, S = following.shape
    draft = draft_lib.Draft(drafter, params, draft_params, S)
    cache = drafter_lib.init_cache(drafter, B, S + room.drafter)
    block = min(_FILL_BLOCK, S)

    def step(i, cache):
      start = jnp.minimum(i * block, S - block)
      tokens = jax.lax.dynamic_slice_in_dim(following, start, block, 1)
      at = jnp.broadcast_to(start + jnp.arange(block), (B, block))
      k, v = draft.keys_values(draft.features(features.read(at)), tokens, at)
      put = lambda x, y, axis: jax.lax.dynamic_update_slice_in_dim(
        x, y.astype(x.dtype), start, axis
      )
      return cache_lib.LayerCache(put(cache.k, k, 3), put(cache.v, v, 2))

    blocks = -(-jnp.max(position) // block)
    cache = jax.lax.fori_loop(0, blocks, step, jax.tree.map(decode.varying, cache))
    last = jnp.maximum(position - 1, 0)[:, None]
    pad = lambda x: jnp.pad(x, ((0, 0), (0, room.longest - 1)) + ((0, 0),) * (x.ndim - 2))
    return draft_lib.DraftState(
      cache=cache,
      features=pad(features.read(last)),
      tokens=pad(jnp.take_along_axis(following, last, 1)),
      count=jnp.minimum(position, 1),
    )

  return jax.jit(
    decode.per_slice(mesh, local, 5, replicated=(0, 1)),
    out_shardings=state_shardings(mesh, drafter),
  )


def make_chunk(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig | None,
  mesh: Mesh,
  tokens: int,
  strategy: strategy_lib.Strategy,
  room: Room,
  kept: decode.Keep | None,
  verification: str,
):
  """(params, draft params, slots, state, depth i32[], n i32[], limit i32[],
  seconds f32[slices]) -> slots, state, Emitted.

  Up to n iterations, while no slot can draw more than `limit` tokens by the next one.
  Slots and state are donated. The state is a `draft.DraftState`, or for n-grams the
  `Corpus` (draft params are then empty).

  Args:
    tokens: per slot that `Emitted` holds
    strategy: its width and nodes are compiled in, its depth is not (see `name`)
    kept: what the slots' contexts keep of the target
    verification: one of `VERIFICATIONS`
  """
  args = (config, drafter, tokens, strategy, room, kept, verification)
  return jax.jit(
    decode.per_slice(mesh, chunk(*args), 8, replicated=(0, 1, 4, 5, 6)),
    donate_argnums=(2, 3),
    out_shardings=(
      decode.slots_shardings(mesh, config, kept),
      chunk_state_shardings(mesh, drafter, strategy),
      axes.sharding(mesh),
    ),
  )


def chunk_state_shardings(mesh: Mesh, drafter, strategy: strategy_lib.Strategy):
  """Of the state that a strategy's chunks hand on."""
  if strategy.source == strategy_lib.NGRAM:
    rows = axes.sharding(mesh, axes.DATA)
    return ngram.Corpus(rows, rows, rows)
  return state_shardings(mesh, drafter)


def chunk(config, drafter, tokens: int, strategy, room, kept, verification: str):
  """What `make_chunk` runs on each slice."""
  width, size = strategy.width, strategy.verify
  is_chain, longest = width == 1, room.longest
  is_ngram = strategy.source == strategy_lib.NGRAM

  # Three ways to guess: the tree, what `absorb` needs of the state, and q for rejection.

  def look_up(draft, slots, state, depth):
    tree = ngram.propose(state, slots.pending, depth, size)
    if verification != REJECTION:
      return tree, state, None
    return tree, state, jax.nn.one_hot(jnp.roll(tree.tokens, -1, 1), config.vocab_size)

  def couple(draft, slots, state, depth):
    contest = draft_lib.likeliest if verification == LIKELIEST else sampling_lib.contest
    if not is_chain:
      args = (draft, state, slots, depth, width, size, room.drafter, contest)
      return *draft_lib.draft_tree(*args), None
    best = lambda *args: sampling_lib.argmax(contest(*args))[:, None]
    return draft_lib.draft_chain(draft, state, slots, depth, size, best)

  def draw(draft, slots, state, depth):
    candidates = lambda logits, sampling, position: rejection.draw_candidates(
      rejection.draft_distribution(logits, sampling), sampling, position, width
    )
    if is_chain:
      args = (draft, state, slots, depth, size, candidates)
      tree, cache, logits = draft_lib.draft_chain(*args, kept=True)
    else:
      shape = tree_lib.fixed(strategy.depth, width, size)
      args = (draft, state, slots, shape, room.drafter, candidates)
      tree, cache, logits = draft_lib.draft_fixed(*args)
    sampling = sampling_lib.repeat(slots.sampling, logits.shape[1])
    q = rejection.draft_distribution(logits.reshape(-1, config.vocab_size), sampling)
    return tree, cache, q.reshape(logits.shape)

  guess = look_up if is_ngram else draw if verification == REJECTION else couple

  def absorb(state, output: verify.Output):
    """The state after an iteration."""
    if is_ngram:
      return ngram.append(state, output.tokens, output.count)
    return draft_lib.DraftState(
      cache=state, features=output.features, tokens=output.tokens, count=output.count
    )

  def local(params, draft_params, slots, state, depth, n, limit, seconds):
    emitted = decode.nothing_emitted(slots, tokens, seconds, longest)
    S = slots.kv[0].length
    rotations = layers.rotation(config, jnp.arange(S))
    draft = None if is_ngram else draft_lib.Draft(drafter, params, draft_params, S)

    def running(carry):
      i, slots, _, emitted = carry
      live = slots.remaining > 0
      fullest = jnp.max(jnp.where(live, emitted.count, 0))
      return (i < n) & jnp.any(live) & (fullest + depth + 1 <= limit)

    def iteration(carry):
      i, slots, state, emitted = carry
      tree, state, q = guess(draft, slots, state, depth)
      live = slots.remaining > 0
      args = (config, kept, params, rotations, slots, tree, q, longest, width)
      slots, output = verify_and_accept(*args)
      inside = jnp.arange(longest) < output.count[:, None]
      at = jnp.where(inside, emitted.count[:, None] + jnp.arange(longest), tokens)
      b = jnp.arange(at.shape[0])[:, None]
      put = lambda x, y: x.at[b, at].set(y.astype(x.dtype), mode="drop")
      emitted = emitted.replace(
        tokens=put(emitted.tokens, output.tokens),
        logp=put(emitted.logp, output.logp),
        logp_filtered=put(emitted.logp_filtered, output.logp_filtered),
        count=emitted.count + output.count,
        remaining=slots.remaining,
        steps=emitted.steps + 1,
        accepted=emitted.accepted + jnp.sum(inside & live[:, None], 0, keepdims=True),
      )
      return i + 1, slots, absorb(state, output), emitted

    start = (decode.varying(jnp.int32(0)), slots, state, emitted)
    return jax.lax.while_loop(running, iteration, start)[1:]

  return local


def name(strategy: strategy_lib.Strategy, verification: str) -> str:
  """Of the program that runs a strategy: whatever its depth, if that is not fixed."""
  depth = f"_{strategy.depth}" if verification == REJECTION and strategy.width > 1 else ""
  return f"speculate_{strategy.source}{depth}_{strategy.width}_{strategy.verify}"


def make_programs(
  config, drafter, mesh, tokens: int, strategies, room, kept, verification: str
) -> dict:
  """Every jitted function of speculation, by name."""
  programs = {} if drafter is None else {"fill": make_fill(drafter, mesh, room)}
  for s in strategies:
    args = (config, drafter, mesh, tokens, s, room, kept, verification)
    programs[name(s, verification)] = make_chunk(*args)
  return programs


def verify_and_accept(
  config, kept, params, rotations, slots, tree, q, longest: int, width: int
):
  """One pass of the target over the trees, and the tokens that follow from it.

  Args:
    rotations: of positions 0, 1, ..., see `target.Target.with_taps`
    q: f32[B J V], what the children of each node were drawn from, for verification by
      rejection; None for the tokens of plain decoding
  Returns:
    the new slots; and `verify.Output`
  """
  B, J = tree.tokens.shape
  is_chain = width == 1
  S = slots.kv[0].length
  positions = slots.position[:, None] + tree.depth
  at = slots.position[:, None] + jnp.arange(J)
  if is_chain:
    mask = cache_lib.visible(at, S)
  else:
    below = tree_lib.ancestors(tree.parent)
    mask = tree_lib.attention_mask(below, slots.position, S)
  args = (config, kept, params, slots.kv, tree.tokens, positions, mask, at, rotations)
  features, states, kv = decode.forward(*args)
  logits = target.Target(config).apply(
    {"params": params}, features, method=target.Target.logits
  )
  sampling = sampling_lib.repeat(slots.sampling, J)
  flat = logits.reshape(B * J, -1)
  most = min(J, longest)
  pad = lambda x: jnp.pad(x, ((0, 0), (0, longest - most)), mode="edge")
  if q is None:
    drawn = sampling_lib.draw(flat, sampling, (positions + 1).reshape(-1))
    drawn = jax.tree.map(lambda x: x.reshape(B, J), drawn)
    walk = verify.walk_chain if is_chain else verify.walk
    path, accepted = walk(tree, drawn.token, most)
    path = pad(path)
    tokens, logp, logp_filtered = (
      jnp.take_along_axis(x, path, 1)
      for x in (drawn.token, drawn.logp, drawn.logp_filtered)
    )
  else:
    p = rejection.target_distribution(flat, sampling).reshape(logits.shape)
    args = (tree, p, q, slots.sampling, slots.position, most, width)
    path, accepted, tokens = rejection.verify(*args)
    path, tokens = pad(path), pad(tokens)
    scaled = sampling_lib.scale(flat, sampling).reshape(logits.shape)
    on_path = lambda x: jnp.take_along_axis(x, path[..., None], 1)
    chosen = lambda x: jnp.take_along_axis(x, tokens[..., None], 2)[..., 0]
    logp = chosen(jax.nn.log_softmax(on_path(scaled), -1))
    logp_filtered = jnp.log(chosen(on_path(p)))
  live = slots.remaining > 0
  count, stopped = verify.cut(tokens, accepted + 1, slots.stop_tokens, slots.remaining)
  count = jnp.where(live, count, 0)
  last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]

  states = jnp.take_along_axis(states, path[..., None], 1)
  slot = slots.position[:, None] + jnp.arange(longest)
  if not is_chain:  # the accepted path moves to where a sequence has its tokens
    source = slots.position[:, None] + path
    kv = tuple(cache_lib.move(layer, source, slot) for layer in kv)
  new = slots.replace(
    pending=jnp.where(live, last, slots.pending),
    position=slots.position + count,
    remaining=jnp.where(live & ~stopped, slots.remaining - count, 0),
    kv=kv,
    features=slots.features and slots.features.write(slot, states),
  )
  return new, verify.Output(
    tokens=tokens, logp=logp, logp_filtered=logp_filtered, features=states, count=count
  )
