"""RL algorithms: GRPO by hand, and what every algorithm must keep to."""

import functools
import importlib
import inspect
import pkgutil
import re
import typing

import jax
import numpy as np
import pytest

from tlt_jax import rl
from tlt_jax.rl import algorithm
from tlt_jax.rl import grpo
from tlt_jax.rl import grpo_gae


def tokens(lengths, row_length=7, seed=0, **fields):
  """One sequence per row with a prompt token before and padding behind; random values."""
  rng = np.random.default_rng(seed)
  rows, T = len(lengths), row_length
  column = np.arange(T)
  lengths = np.asarray(lengths)
  normal = lambda size=(rows, T): rng.normal(size=size).astype(np.float32)
  logp = -np.abs(normal())
  made = dict(
    logp=logp,
    entropy=np.abs(normal()),
    old_logp=logp + 0.3 * normal(),
    sampler_logp=logp + 0.3 * normal(),
    reference_logp=logp + 0.3 * normal(),
    mask=(column >= 1) & (column <= lengths[:, None]),
    advantage=np.broadcast_to(normal((rows, 1)), (rows, T)),
    length=np.broadcast_to(lengths[:, None], (rows, T)).astype(np.float32),
    sequence_idx=np.broadcast_to(np.arange(rows)[:, None], (rows, T)).astype(np.int32),
    total_tokens=np.float32(lengths.sum()),
    packed_tokens=np.float32(lengths.sum()),
    total_sequences=np.float32(rows),
    total_max_tokens=np.float32(rows * (T - 1)),
  )
  return algorithm.Tokens(**{**made, **fields})


def responses(reward, length=None, **fields):
  """Scored responses f32[P R]; of one token each by default."""
  reward = np.asarray(reward, np.float32)
  length = np.ones_like(reward) if length is None else np.asarray(length)
  return algorithm.Responses(reward, length.astype(np.int32), **fields)


def one_token(ratio, advantage, **fields):
  """A batch of one response token of the given ratio to the sampling policy."""
  row = lambda x: np.array([[x]], np.float32)
  return tokens(
    [1],
    1,
    logp=row(np.log(ratio) - 1.0),
    old_logp=row(-1.0),
    mask=np.array([[True]]),
    advantage=row(advantage),
    **fields,
  )


@pytest.mark.parametrize(
  ("ratio", "advantage", "loss", "clipped"),
  [
    (1.0, 2.0, -2.0, 0),
    (1.1, 2.0, -2.2, 0),
    (1.5, 2.0, -2.56, 1),  # a gain counts up to 1.28
    (0.5, 2.0, -1.0, 0),  # a loss of probability is never clipped if it was good
    (0.5, -2.0, 1.6, 1),  # a bad token's decrease counts down to 0.8
    (0.9, -2.0, 1.8, 0),
    (1.5, -2.0, 3.0, 0),
  ],
)
def test_grpo_clips_what_goes_too_far_in_the_right_direction(
  ratio, advantage, loss, clipped
):
  """min(r A, clip(r, 1 - 0.2, 1 + 0.28) A); the gradient is A r, or zero if clipped."""
  run = grpo.make(clip_low=0.2, clip_high=0.28).loss
  batch = one_token(ratio, advantage)
  share, metrics = run(batch)
  np.testing.assert_allclose(share, loss, rtol=1e-6)
  assert metrics["policy/clip_frac"] == clipped
  gradient = jax.grad(lambda logp: run(batch.replace(logp=logp))[0])(batch.logp)
  expected = 0.0 if clipped else -advantage * ratio
  np.testing.assert_allclose(gradient[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("estimator", "kl", "gradient"),
  [
    # d = log reference - log policy = log 2 for policy 0.25, reference 0.5.
    ("k1", -np.log(2), 1.0),
    ("k2", np.log(2) ** 2 / 2, -np.log(2)),
    ("k3", 2 - 1 - np.log(2), 1 - 2.0),
  ],
)
def test_grpo_estimates_the_kl_to_the_reference(estimator, kl, gradient):
  """k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, and their gradients."""
  made = grpo.make(kl_coef=0.1, kl_estimator=estimator)
  assert made.uses_reference and not grpo.make().uses_reference
  row = lambda x: np.array([[x]], np.float32)
  batch = one_token(1.0, 0.0, reference_logp=row(np.log(0.5)))
  batch = batch.replace(logp=row(np.log(0.25)), old_logp=row(np.log(0.25)))
  share, metrics = made.loss(batch)
  np.testing.assert_allclose(metrics["policy/kl"], kl, rtol=1e-6)
  np.testing.assert_allclose(share, 0.1 * kl, rtol=1e-6)
  found = jax.grad(lambda logp: made.loss(batch.replace(logp=logp))[0])(batch.logp)
  np.testing.assert_allclose(found[0, 0], 0.1 * gradient, rtol=1e-5)


def test_grpo_without_a_reference_reports_the_kl_to_the_sampling_policy():
  row = lambda x: np.array([[x]], np.float32)
  batch = one_token(2.0, 1.0, reference_logp=row(np.nan))
  share, metrics = grpo.make().loss(batch)
  np.testing.assert_allclose(metrics["policy/kl"], 0.5 - 1 + np.log(2), rtol=1e-6)
  assert np.isfinite(share)


@pytest.mark.parametrize(
  ("aggregation", "loss"), [("token", -(1 * 1 + 3 * 5) / 4), ("sequence", -(1 + 5) / 2)]
)
def test_grpo_averages_over_tokens_or_over_sequences(aggregation, loss):
  """Responses of 1 and of 3 tokens, on policy, with advantages 1 and 5."""
  batch = tokens([1, 3])
  advantage = np.broadcast_to(np.array([[1.0], [5.0]], np.float32), batch.logp.shape)
  batch = batch.replace(old_logp=batch.logp, advantage=advantage)
  share, _ = grpo.make(aggregation=aggregation).loss(batch)
  np.testing.assert_allclose(share, loss, rtol=1e-6)


def test_grpo_advantages_compare_responses_of_one_prompt():
  """Rewards 0 0 1 1 and 2 2 2 6: means 0.5 and 3, deviations 0.5 and sqrt(3)."""
  scored = responses([[0.0, 0.0, 1.0, 1.0], [2.0, 2.0, 2.0, 6.0]])
  centred = [[-0.5, -0.5, 0.5, 0.5], [-1.0, -1.0, -1.0, 3.0]]
  found = grpo.make(normalize_std=False).advantages(scored)
  np.testing.assert_allclose(found, centred)
  np.testing.assert_allclose(
    grpo.make().advantages(scored),
    np.array(centred) / [[0.5], [np.sqrt(3.0)]],
    rtol=1e-5,
  )


def by_hand(rewards, lengths, trace_decay, prior):
  """GAE of the baseline that `grpo_gae` describes, a response and a token at a time."""
  P, R = rewards.shape
  everyone = [(p, r) for p in range(P) for r in range(R)]

  def value(p, r, t):
    others = [i for i in everyone if i != (p, r) and lengths[i] > t]
    own = [rewards[i] for i in others if i[0] == p]
    mean = np.mean([rewards[i] for i in others]) if others else 0.0
    return (sum(own) + prior * mean) / (len(own) + prior)

  found = np.zeros((P, R, 1 << int(lengths.max() - 1).bit_length()))
  for p, r in everyone:
    if len(set(rewards[p])) > 1:
      n, after = lengths[p, r], 0.0
      worth = [*(value(p, r, t) for t in range(n)), rewards[p, r]]
      for t in reversed(range(n)):
        after = worth[t + 1] - worth[t] + trace_decay * after
        found[p, r, t] = after
  return found


@pytest.mark.parametrize("trace_decay", [0.0, 0.9, 1.0])
def test_gae_compares_with_the_responses_that_are_still_running(trace_decay):
  rng = np.random.default_rng(0)
  rewards = rng.integers(0, 2, (4, 3)).astype(np.float32)
  rewards[1] = 1.0
  lengths = rng.integers(1, 12, (4, 3)).astype(np.int32)
  made = grpo_gae.make(trace_decay=trace_decay, prior=2.0)
  found = made.advantages(responses(rewards, lengths))
  expected = by_hand(rewards, lengths, trace_decay, 2.0)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_gae_blames_what_is_worse_than_to_go_on():
  """Of two, one ends well after a token; the other fails by not ending there as well."""
  made = grpo_gae.make(trace_decay=0.5, prior=1.0)
  found = made.advantages(responses([[1.0, 0.0]], [[1, 2]]))
  np.testing.assert_allclose(found, [[[1.0, 0.0], [-1.0, 0.0]]])


@pytest.mark.parametrize("args", [dict(trace_decay=1.1), dict(prior=0)])
def test_gae_options_out_of_range_are_errors(args):
  with pytest.raises(ValueError, match=f"{list(args)[0]} must be"):
    grpo_gae.make(**args)


@pytest.mark.parametrize("args", [dict(kl_estimator="k4"), dict(aggregation="words")])
def test_grpo_options_that_do_not_exist_are_errors(args):
  with pytest.raises(
    ValueError, match=f"{list(args)[0]} must be .*{list(args.values())[0]}"
  ):
    grpo.make(**args)


def algorithms():
  """Every module of `tlt_jax.rl` whose `make` returns an Algorithm without being told how.

  A new algorithm is one new file, and this finds it.
  """
  found = []
  for info in pkgutil.iter_modules(rl.__path__):
    make = getattr(importlib.import_module(f"tlt_jax.rl.{info.name}"), "make", None)
    if make is not None:
      parameters = inspect.signature(make).parameters.values()
      returned = typing.get_type_hints(make).get("return")
      if returned is algorithm.Algorithm and all(p.default != p.empty for p in parameters):
        found.append(info.name)
  return found


def test_the_scan_finds_the_algorithms():
  own = {"grpo_gae", "supervised"}
  known = {"cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "rloo"}
  assert own | known == set(algorithms())


def whole(reward, length, seed=0):
  """Responses of which everything is known, with random log-probabilities and values."""
  rng = np.random.default_rng(seed)
  length = np.asarray(length, np.int32)
  T = int(length.max()) + 2
  within = np.arange(T) < length[..., None]
  random = lambda: np.where(within, rng.normal(size=within.shape), 0).astype(np.float32)
  logp = -np.abs(random())
  return responses(
    reward,
    length,
    max_tokens=np.full(length.shape, T, np.int32),
    truncated=length == T,
    solved=np.asarray(reward) == 1,
    logp=logp,
    reference_logp=logp + 0.3 * random(),
    value=random(),
  )


CONTRACT = [
  *((name, ()) for name in algorithms()),
  ("grpo", (("aggregation", "sequence"), ("kl_coef", 0.1))),
  ("grpo", (("kl_estimator", "k1"), ("kl_coef", 1.0), ("normalize_std", False))),
  ("grpo", (("kl_estimator", "k2"), ("kl_coef", 0.01))),
  ("grpo_gae", (("aggregation", "sequence"), ("kl_coef", 0.1), ("trace_decay", 0.5))),
  ("gspo", (("credit", "token"), ("entropy_coef", 0.1), ("importance_cap", 2.0))),
  ("reinforce_pp", (("baseline", "group"), ("kl_coef", 0.1), ("dual_clip", 3.0))),
  ("ppo", (("kl_coef", 0.1), ("normalize", False), ("aggregation", "constant"))),
]
contract = pytest.mark.parametrize(("name", "args"), CONTRACT)
LENGTHS = [1, 4, 3, 2, 5]


@functools.cache
def loss_and_gradient(name, args):
  """Tokens -> (share, metrics), gradient f32[rows T]; compiled, as a learner would."""
  loss = algorithm.make(name, **dict(args)).loss
  run = lambda logp, batch: loss(batch.replace(logp=logp))
  both = jax.jit(jax.value_and_grad(run, has_aux=True))
  return lambda batch: jax.device_get(both(batch.logp, batch))


@contract
def test_everything_is_finite_when_all_rewards_are_equal(name, args):
  """Nothing to prefer, so nothing divided by a deviation of zero."""
  made = algorithm.make(name, **dict(args))
  for rewards in (np.zeros((3, 4)), np.ones((2, 1)), np.full((2, 8), 0.1)):
    scored = whole(rewards, np.arange(rewards.size).reshape(rewards.shape) % 3)
    found = np.asarray(made.advantages(scored))
    assert found.shape[:2] == rewards.shape and np.isfinite(found).all()
    if made.keeps is not None:
      assert not made.keeps(scored).any()
    if made.critic is not None:
      assert np.isfinite(made.critic.returns(scored)).all()
  batch = tokens(LENGTHS)
  batch = batch.replace(advantage=np.full_like(batch.logp, np.ravel(found)[0]))
  (share, metrics), gradient = loss_and_gradient(name, args)(batch)
  assert all(np.isfinite(x).all() for x in (share, gradient, *metrics.values()))
  assert share.shape == () and all(x.shape == () for x in metrics.values())
  assert all(key.startswith("policy/") for key in metrics)


@contract
@pytest.mark.parametrize("huge", [1e30, -1e30, 88.0, -200.0])
def test_masked_tokens_neither_count_nor_get_a_gradient(name, args, huge):
  """Whatever stands in prompts and padding, also values that would overflow."""
  run, batch = loss_and_gradient(name, args), tokens(LENGTHS)
  (share, metrics), gradient = run(batch)
  assert (gradient[~batch.mask] == 0).all() and (gradient[batch.mask] != 0).any()
  logp = ("logp", "old_logp", "sampler_logp", "reference_logp")
  for field in (*logp, "entropy", "advantage"):
    spoilt = np.where(batch.mask, getattr(batch, field), np.float32(huge))
    (share_2, metrics_2), gradient_2 = run(batch.replace(**{field: spoilt}))
    np.testing.assert_array_equal(gradient_2, gradient)
    np.testing.assert_allclose(share_2, share, rtol=1e-6)
    for key in metrics:
      np.testing.assert_allclose(metrics_2[key], metrics[key], rtol=1e-6)


@contract
def test_padding_may_belong_to_a_response_without_tokens(name, args):
  """Padding counts as sequence 0, whose length may be 0."""
  batch = tokens([0, 4, 3, 2, 5])
  batch = batch.replace(length=np.where(batch.mask, batch.length, 0))
  (share, metrics), gradient = loss_and_gradient(name, args)(batch)
  assert all(np.isfinite(x).all() for x in (share, gradient, *metrics.values()))


@contract
def test_shares_of_micro_batches_add_up_to_the_whole(name, args):
  """Loss, metrics and gradient, a row at a time."""
  run, batch = loss_and_gradient(name, args), tokens(LENGTHS)
  shares, gradient = run(batch)
  row = lambda i: jax.tree.map(lambda x: x[i : i + 1] if x.ndim else x, batch)
  parts = [run(row(i)) for i in range(len(LENGTHS))]
  total = jax.tree.map(lambda *x: sum(x), *(part for part, _ in parts))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  jax.tree.map(close, total, shares)
  close(np.concatenate([g for _, g in parts]), gradient)


@contract
def test_what_is_skipped_has_no_part_in_the_loss(name, args):
  """If an algorithm says that a sequence of advantage 0 need not be computed."""
  batch = tokens(LENGTHS)
  none = (np.arange(len(LENGTHS)) % 2 == 0)[:, None]
  batch = batch.replace(advantage=np.where(none, np.float32(0), batch.advantage))
  (share, _), gradient = loss_and_gradient(name, args)(batch)
  skipped = batch.replace(mask=batch.mask & ~none)
  (share_2, _), gradient_2 = loss_and_gradient(name, args)(skipped)
  if algorithm.make(name, **dict(args)).skips_zero_advantage:
    np.testing.assert_allclose(share_2, share, rtol=1e-6)
    np.testing.assert_array_equal(gradient_2, gradient)
  else:
    assert share != share_2 or (gradient != gradient_2).any()


@contract
def test_a_loss_traces_once(name, args):
  """It reads arrays alone: other values need no other program."""
  made, traces = algorithm.make(name, **dict(args)), []

  @jax.jit
  def run(batch):
    traces.append(1)
    return made.loss(batch)[0]

  shares = [float(run(tokens(LENGTHS, seed=seed))) for seed in range(3)]
  assert len(traces) == 1 and len(set(shares)) == 3


def test_an_unknown_name_or_argument_is_an_error_that_says_so():
  with pytest.raises(ValueError, match="no RL algorithm 'grop'"):
    algorithm.make("grop")
  with pytest.raises(ValueError, match="no RL algorithm 'countdown'"):
    algorithm.make("countdown")  # a module, but no algorithm
  with pytest.raises(ValueError, match="no argument 'clip'; it takes clip_low, "):
    algorithm.make("grpo", clip=0.1)


FORK = """
from tlt_jax.rl import algorithm

def make(scale=1.0):
  return algorithm.Algorithm(lambda r: scale * r.reward, lambda tokens: (scale, {}))
"""


def test_a_dotted_name_reaches_another_package(tmp_path, monkeypatch):
  """So that a fork adds an algorithm without an edit here."""
  package = tmp_path / "someones_fork"
  package.mkdir()
  (package / "my_method.py").write_text(FORK)
  monkeypatch.syspath_prepend(tmp_path)
  made = algorithm.make("someones_fork.my_method", scale=3.0)
  found = made.advantages(responses([[2.0, 2.0]]))
  np.testing.assert_array_equal(found, [[6.0, 6.0]])
  with pytest.raises(ValueError, match="no RL algorithm 'someones_fork.missing'"):
    algorithm.make("someones_fork.missing")


@pytest.mark.parametrize(
  ("rewards", "lengths", "match"),
  [((2, 3), (3, 2), "equal_shape"), ((6,), (6,), "rank"), ((2, 3), (2, 3), "(3, 2)")],
)
def test_arrays_of_a_wrong_shape_are_named(rewards, lengths, match, monkeypatch):
  """What is given to an algorithm, and what a new one returns."""
  transposed = lambda responses: responses.reward.T
  broken = lambda: algorithm.Algorithm(transposed, lambda tokens: (tokens.logp, {}))
  monkeypatch.setattr(grpo, "make", broken)
  made = algorithm.make("grpo")
  with pytest.raises(AssertionError, match=re.escape(match)):
    made.advantages(responses(np.ones(rewards), np.ones(lengths)))
  with pytest.raises(AssertionError, match="shape"):
    made.loss(tokens([1, 2]))
