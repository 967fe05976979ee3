"""The learner: what it computes does not depend on how the work is laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner
from tlt_jax.rl import optimizer

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=1)
NUM_SEQUENCES, LONGEST = 12, 16
# Rows of 16 hold one sequence each, of 9 to 16 tokens; rows of 48 hold several.
ONE_PER_ROW = ((8, 16),)
PACKED = ((8, 48),)
TWO_BUCKETS = ((8, 13), (8, 48))


def grpo(**args):
  """GRPO whose advantages are given, as rewards."""
  made = algorithm_lib.make("grpo", **args)
  return made._replace(advantages=lambda responses: responses.reward)


GRPO = grpo(kl_coef=0.1, aggregation="sequence")


def params():
  """A copy: a learner takes over what it starts from."""
  return jax.tree.map(
    jnp.copy, {k: tiny.params()[k] for k in tiny.params() if k != "layer_1"}
  )


class Batch:
  """Sequences of 9 to 16 tokens and all that an update wants to know of them."""

  def __init__(self, seed=0, shortest=9, longest=LONGEST):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(shortest, longest + 1, NUM_SEQUENCES)
    cuts = [rng.integers(1, n) for n in sizes]
    every = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in sizes]
    self.prompts = [x[:n] for x, n in zip(every, cuts, strict=True)]
    self.responses = [x[n:] for x, n in zip(every, cuts, strict=True)]
    temperature = rng.choice([0.0, 0.7, 1.0, 1.3], NUM_SEQUENCES).astype(np.float32)
    advantage = rng.normal(size=NUM_SEQUENCES).astype(np.float32)
    advantage[::4] = 0.0
    self.sequences = batch_lib.Sequences(
      advantage=advantage[:, None],
      length=np.array([len(r) for r in self.responses], np.int32),
      prompt_length=np.array([len(p) for p in self.prompts], np.int32),
      temperature=temperature,
    )
    # Log-probabilities of two other policies, by sequence and response token.
    noise = rng.normal(0, 0.3, (2, NUM_SEQUENCES, LONGEST)).astype(np.float32)
    rows = zip(whole_sequences(self)[0], self.sequences.prompt_length, strict=True)
    shifted = np.stack([np.roll(logp, 1 - n) for logp, n in rows])
    self.old, self.reference = shifted + noise

  def pack(self, buckets):
    buckets = [packing.Bucket(*b) for b in buckets]
    return packing.pack(self.prompts, self.responses, buckets)

  def halves(self, buckets):
    """The first sequences and the rest, each packed, and what is known of them."""
    n, buckets = NUM_SEQUENCES // 2, [packing.Bucket(*b) for b in buckets]
    for part in (slice(n), slice(n, None)):
      packed = packing.pack(self.prompts[part], self.responses[part], buckets)
      yield packed, jax.tree.map(lambda x, part=part: x[part], self.sequences)

  def as_step(self) -> batch_lib.Batch:
    seqs = self.sequences
    scored = algorithm_lib.Responses(seqs.advantage, seqs.length[:, None])
    return batch_lib.Batch(self.prompts, self.responses, seqs.temperature, scored)

  def as_sampled(self) -> batch_lib.Batch:
    """With all that a rollout knows of its responses."""
    step = self.as_step()
    known = dict(max_tokens=step.scored.length, logp=self.old[:, None])
    return dataclasses.replace(step, scored=step.scored.replace(**known))


def logp_of_rows(params, tokens, temperature):
  """Each row by itself, without packing or cache: f32[B T-1] of tokens 1, 2, ..."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  _, logits, _ = target.Target(CONFIG).apply(
    {"params": params}, tokens, positions, method=target.Target.features_and_logits
  )
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
  logp = jax.nn.log_softmax(scaled, -1)[:, :-1]
  return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


@jax.jit
def on_policy_loss(params, tokens, mask, sequences):
  """-sum A logp / tokens, and its gradient: GRPO at a ratio of one, in three lines."""

  def loss(params):
    logp = logp_of_rows(params, tokens, sequences.temperature)
    share = -jnp.sum(mask * sequences.advantage * logp) / jnp.sum(mask)
    return share, logp

  (_, logp), gradient = jax.value_and_grad(loss, has_aux=True)(params)
  return logp, gradient


def whole_sequences(batch, advantage=None, kept=None):
  """f32[B LONGEST] log-probabilities of targets, and the gradient, row by row.

  Args:
    advantage: f32[B T] of each response token; default: the sequences' own
    kept: bool[B], the sequences that count; default: all
  """
  tokens = np.zeros((NUM_SEQUENCES, LONGEST + 1), np.int32)
  mask = np.zeros((NUM_SEQUENCES, LONGEST), bool)
  for b, (p, r) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
    tokens[b, : len(p) + len(r)] = np.concatenate([p, r])
    mask[b, len(p) - 1 : len(p) + len(r) - 1] = True
  sequences = batch.sequences
  if advantage is not None:
    by_position = np.zeros(mask.shape, np.float32)
    for b, row in enumerate(mask):
      by_position[b, row] = advantage[b, : row.sum()]
    sequences = sequences.replace(advantage=by_position)
  if kept is not None:
    mask &= kept[:, None]
  return on_policy_loss(params(), tokens, mask, sequences)


@functools.cache
def batch(seed=0, **sizes):
  return Batch(seed, **sizes)


@functools.cache
def make(data=1, model=1, buckets=PACKED, algorithm=GRPO, **options):
  """A learner whose update is one step of plain descent: new = old - gradient."""
  descent, mesh = optax.sgd(1.0), tiny.mesh(data, model)
  return learner.make(CONFIG, algorithm, descent, mesh, buckets, **options)


def difference(before, after):
  return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), before, after)


def step(made, packed, batch):
  """(gradient, metrics) of one update, off policy and with a reference."""
  known = batch.sequences.replace(old_logp=batch.old, reference_logp=batch.reference)
  state = made.init(params())
  after, metrics = made.update(state, packing.place(packed, made.mesh), known)
  assert after.step == 1
  return difference(params(), after.params), jax.device_get(metrics)


def assert_close(a, b, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), a, b)


def assert_nothing_vanishes(gradient):
  for path, x in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.isfinite(x).all() and np.abs(x).max() > 1e-4, path


def test_log_probabilities_are_those_of_unpacked_sequences():
  """At each sequence's own temperature; greedy ones count at temperature 1."""
  packed = batch().pack(TWO_BUCKETS)
  made = make(buckets=TWO_BUCKETS)
  temperature = batch().sequences.temperature
  found = made.score(params(), packing.place(packed, made.mesh), temperature)
  expected = whole_sequences(batch())[0]
  assert max(p.segments.max() for p in packed) > 2
  for p, logp in zip(packed, found, strict=True):
    known = (p.segments > 0) & (p.targets > 0)
    expected_here = np.asarray(expected)[p.sequence_idx, p.positions]
    np.testing.assert_allclose(logp[known], expected_here[known], atol=2e-5)


def test_a_sequence_does_not_see_its_neighbours():
  """Another sequence in the same row is exchanged: not a bit changes elsewhere."""
  packed = batch().pack(TWO_BUCKETS)
  made, temperature = make(buckets=TWO_BUCKETS), batch().sequences.temperature
  before = made.score(params(), packing.place(packed, made.mesh), temperature)
  changed = [
    p.replace(tokens=np.where(p.segments % 2 == 1, 63 - p.tokens, p.tokens)) for p in packed
  ]
  after = made.score(params(), packing.place(changed, made.mesh), temperature)
  for p, x, y in zip(packed, before, after, strict=True):
    even = (p.segments > 0) & (p.segments % 2 == 0)
    np.testing.assert_array_equal(x[even], y[even])
    odd = p.segments % 2 == 1
    assert np.abs(np.asarray(x - y))[odd].max() > 0.1
  assert any((p.segments == 2).any() for p in packed)


def test_the_update_does_not_depend_on_the_layout():
  """One sequence per row on one device, or packed over eight, recomputing layers.

  Off policy, clipped, with a KL to a reference and a mean over sequences: the same
  gradient and the same metrics.
  """
  rows = batch().pack(ONE_PER_ROW)
  assert rows[0].segments.max() == 1
  gradient, metrics = step(make(buckets=ONE_PER_ROW, remat=False), rows, batch())
  assert_nothing_vanishes(gradient)
  assert 0.02 < metrics["policy/clip_frac"] < 0.98
  packed = batch().pack(PACKED)
  assert packed[0].segments.max() > 2
  assert_close(step(make(4, 2), packed, batch()), (gradient, metrics))


def test_a_step_of_two_updates_keeps_the_policy_that_sampled():
  """The second update's ratios are to the policy before the first; the KL stays fixed."""
  made = make(2, 2, updates=2)
  other = jax.tree.map(lambda x: x * 1.05, made.init(params()).params)
  state, metrics = made.train(made.init(params()), batch().as_step(), other)

  by_hand, every = made.init(params()), []
  update, size = made.pool.get("update", (6,), None), made.buckets[-1].length

  def score(params):
    return made.score_responses(params, batch().as_step())[:, 0]

  tables = {"old_logp": score(by_hand.params), "reference_logp": score(other)}

  def wide(x):
    return np.pad(x, ((0, 0), (0, size - x.shape[1])))

  for i, (packed, known) in enumerate(batch().halves(PACKED)):
    half = slice(6 * i, 6 * i + 6)
    known = known.replace(**{name: wide(x[half]) for name, x in tables.items()})
    packed = packing.place(packed, made.mesh)
    by_hand, found = update(by_hand, packed, batch_lib.place(known, made.mesh))
    every.append(jax.device_get(found))
  assert state.step == 2
  assert_close(state.params, by_hand.params)
  assert every[0]["policy/clip_frac"] == 0 < every[1]["policy/clip_frac"]
  for name in every[0]:
    mean = (every[0][name] + every[1][name]) / 2
    np.testing.assert_allclose(metrics[name], mean, rtol=1e-3, atol=1e-6)
  assert metrics["policy/kl"] > 0 and metrics["memory/policy_bytes"] > 0


def test_every_batch_takes_one_program_to_the_gradient_of_its_response_tokens():
  """Against the loss written down for whole sequences: no prompt, no padding counts.

  Traced once: sequences in both buckets, other ones, then one bucket is empty, then
  the other, then both, as no response is better than another.
  """
  traces, algorithm = [], grpo()

  def loss(tokens):
    traces.append(1)
    return algorithm.loss(tokens)

  made = make(2, 2, TWO_BUCKETS, algorithm._replace(loss=loss), remat=False)
  batches = [batch(), batch(1), batch(2, longest=13), batch(3, shortest=14)]
  for i, b in enumerate(batches):
    packed = b.pack(TWO_BUCKETS)
    assert (packed[0].count == 0, packed[1].count == 0) == (i == 3, i == 2)
    state, metrics = made.train(made.init(params()), b.as_step())
    gradient = difference(params(), state.params)
    assert_nothing_vanishes(gradient)
    assert_close(gradient, whole_sequences(b)[1])
    np.testing.assert_allclose(
      metrics["policy/grad_norm"], optax.tree.norm(gradient), rtol=1e-4
    )
    assert metrics["policy/clip_frac"] == 0 and metrics["policy/kl"] == 0
    assert np.isfinite(metrics["policy/entropy"])
    if i == 0:
      first = len(traces)
  equal = b.as_step().scored.replace(reward=np.zeros((NUM_SEQUENCES, 1), np.float32))
  equal = dataclasses.replace(b.as_step(), scored=equal)
  state, metrics = made.train(made.init(params()), equal)
  assert not any(x.any() for x in jax.tree.leaves(difference(params(), state.params)))
  assert all(np.isfinite(x) for x in metrics.values())
  assert len(traces) == first and len(made.pool) == 1


@pytest.mark.parametrize("only", ["", "layer_[23]"])
@pytest.mark.parametrize("remat", [False, True])
def test_the_memory_of_an_update_is_estimated(only, remat):
  """Of long rows and four layers, all or some of which are trained.

  That without `remat`, by which it is chosen, is never below what the compiler takes.
  """
  config = dataclasses.replace(CONFIG, num_layers=4, width=128, mlp_width=512)
  made = learner.make(
    config, GRPO, optax.adamw(1.0), tiny.mesh(1, 1), ((1, 4096),), remat=remat, only=only
  )
  packed, known = batch_lib.abstract(made.mesh, made.buckets, 1)
  by_token = jax.ShapeDtypeStruct((1, 4096), jnp.float32, sharding=known.length.sharding)
  known = known.replace(reference_logp=by_token)
  compiled = made.update.lower(made.abstract_state(), packed, known).compile()
  takes, estimate = compiled.memory_analysis().temp_size_in_bytes, made.update_bytes(remat)
  assert (0.8 if remat else 1.0) * takes <= estimate <= 1.2 * takes


@pytest.mark.parametrize("size", [LONGEST, 64])
def test_every_token_can_have_an_advantage_of_its_own(size):
  """Of responses in any row; what follows a response does not count."""
  by_token = np.random.default_rng(1).normal(size=(NUM_SEQUENCES, size))
  by_token = by_token.astype(np.float32)
  b, given = batch(), grpo()._replace(advantages=lambda responses: by_token[:, None])
  made = make(2, 1, TWO_BUCKETS, given)
  state, _ = made.train(made.init(params()), b.as_step())
  assert_close(difference(params(), state.params), whole_sequences(b, by_token)[1])


def test_prompts_that_are_not_kept_do_not_count():
  """Neither in the gradient nor in the totals, even if none is left."""
  b, kept = batch(), np.arange(NUM_SEQUENCES) % 3 > 0

  def keeps(responses):
    return kept & (responses.reward[:, 0] != 99)

  made = make(2, 1, TWO_BUCKETS, grpo()._replace(keeps=keeps))
  state, metrics = made.train(made.init(params()), b.as_step())
  expected = whole_sequences(b, kept=kept)[1]
  assert_close(difference(params(), state.params), expected)
  assert metrics["policy/kept_groups"] == pytest.approx(kept.mean())
  none = b.as_step().scored.replace(reward=np.full((NUM_SEQUENCES, 1), 99, np.float32))
  none = dataclasses.replace(b.as_step(), scored=none)
  state, metrics = made.train(made.init(params()), none)
  assert not any(x.any() for x in jax.tree.leaves(difference(params(), state.params)))
  assert metrics["policy/kept_groups"] == 0 and np.isfinite(metrics["policy/loss"])


def test_only_the_chosen_parameters_are_trained():
  """The others stay, bit for bit; the gradient of the chosen is what it was."""
  packed = batch().pack(PACKED)
  every, _ = step(make(), packing.place(packed, make().mesh), batch())
  made = make(only="norm|head$")
  gradient, _ = step(made, packed, batch())
  for path, x in jax.tree_util.tree_leaves_with_path(gradient):
    name = jax.tree_util.keystr(path)
    if "norm" in name or "head" in name:
      expected = functools.reduce(lambda tree, k: tree[k.key], path, every)
      np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
    else:
      assert not x.any(), name
  moments = optimizer.make("adamw", 1e-3)
  small, whole = (jax.eval_shape(moments.init, m.trained(params())) for m in (made, make()))
  assert len(jax.tree.leaves(small)) < len(jax.tree.leaves(whole))


def shard_shapes(tree):
  """Per leaf, the shape of one device's part, by the name that ends its path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    "/".join(str(getattr(k, "key", k)) for k in path): x.addressable_shards[0].data.shape
    for path, x in leaves
  }


@pytest.mark.parametrize(("name", "rate"), [("adamw", 1e-2), ("muon", 1e-2)])
def test_supervised_training_lowers_the_loss_and_splits_the_state(name, rate):
  """Twenty steps learn twelve sequences; parameters and moments lie split."""
  mesh, steps = tiny.mesh(2, 2), 20
  made = learner.make(
    CONFIG,
    algorithm_lib.make("supervised"),
    optimizer.make(name, rate, warmup=2, total=2 * steps, weight_decay=0.01),
    mesh,
    PACKED,
  )
  state = made.init(params())
  losses = []
  for _ in range(steps):
    state, metrics = made.train(state, batch().as_step())
    losses.append(metrics["policy/loss"])
  assert losses[-1] < losses[0] / 2 and state.step == steps

  # FSDP: the width over `data`; tensor parallel: vocabulary, heads, mlp over `model`.
  c = CONFIG
  D, F, V, N, K = c.width, c.mlp_width, c.vocab_size, c.num_heads, c.num_kv_heads
  parts = shard_shapes(state.params)
  assert parts["embedding"] == (V // 2, D // 2)
  assert parts["head"] == (V // 2, D // 2)
  assert parts["layer_0/attention/q_proj"] == (N * c.head_dim // 2, D // 2)
  assert parts["layer_0/attention/k_proj"] == (K * c.head_dim // 2, D // 2)
  assert parts["layer_0/mlp/down_proj"] == (D // 2, F // 2)
  assert parts["final_norm/scale"] == (D // 2,)
  moments = shard_shapes(state.opt_state)
  sizes = jax.tree.map(jnp.size, (state.opt_state, state.params))
  split = sum(np.prod(s, dtype=int) for s in moments.values())
  assert split < 0.26 * sum(jax.tree.leaves(sizes[0]))
  assert sum(jax.tree.leaves(sizes[0])) >= sum(jax.tree.leaves(sizes[1]))
  for path, shape in parts.items():
    mine = [s for name, s in moments.items() if name.endswith(path)]
    assert mine and set(mine) == {shape}

  # The state restored from its abstract form would be laid out the same.
  jax.tree.map(
    lambda x, like: (
      (x.sharding.is_equivalent_to(like.sharding, x.ndim), x.dtype) == (True, like.dtype)
      or pytest.fail(f"{x.sharding} is not {like.sharding}")
    ),
    state,
    made.abstract_state(),
  )


@pytest.mark.parametrize("only", ["", "mlp|embedding"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_lie_like_their_parameters(name, only):
  """Of parameters that are trained, by either rule of Muon; all else is everywhere."""
  made = learner.make(
    CONFIG, GRPO, optimizer.make(name, 1e-3), tiny.mesh(2, 2), PACKED, only=only
  )
  state = made.abstract_state()

  def keys(path):
    return tuple(getattr(k, "key", None) for k in path)

  params = {
    keys(path): x for path, x in jax.tree.leaves_with_path(made.trained(state.params))
  }
  of_moments = []
  for path, x in jax.tree.leaves_with_path(state.opt_state):
    found = [p for p in params if keys(path)[-len(p) :] == p]
    spec = params[found[0]].sharding.spec if found else axes.sharding(made.mesh).spec
    assert x.sharding.spec == spec, path
    of_moments += found
  assert set(of_moments) == set(params)


def test_the_weight_sync_hands_over_the_same_numbers():
  """A copy in the rollout's layout: whole along `embed`, split over `model`."""
  made = make(2, 2)
  state = made.init(params())
  handed = made.to_rollout(state.params)
  jax.tree.map(np.testing.assert_array_equal, handed, params())
  layout = axes.shardings(tiny.mesh(2, 2), axes.ROLLOUT, target.abstract_params(CONFIG))

  def same(x, sharding):
    return x.sharding.is_equivalent_to(sharding, x.ndim)

  assert all(jax.tree.leaves(jax.tree.map(same, handed, layout)))


def test_what_waits_on_the_host_trains_alike():
  """Weights, moments and reference, through two steps of two updates, bit for bit."""
  made, found = make(2, updates=2), {}
  for offload in (False, True):
    made = dataclasses.replace(made, offloads=offload, pool=programs.Pool())
    for compile_one in made.to_compile(NUM_SEQUENCES, 1, None).values():
      compile_one()
    state, reference = made.init(params()), made.init(params()).params
    reference = made.offload(reference)
    for seed in range(2):
      state = made.offload(state)
      kinds = {x.sharding.memory_kind for x in jax.tree.leaves((state, reference))}
      assert kinds == {"pinned_host" if offload else "device"}
      state, _ = made.train(state, batch(seed).as_sampled(), reference)
    assert len(made.pool) == 2
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"device"}
    found[offload] = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, found[False], found[True])
