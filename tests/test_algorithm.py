"""What every RL algorithm must keep to."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny
from tlt_jax.rl import algorithm
from tlt_jax.rl import grpo_gae


def tokens(lengths, seed=0):
  """One sequence per row with a prompt token before and padding behind; random values."""
  rng = np.random.default_rng(seed)
  rows, T = len(lengths), 7
  column = np.arange(T)
  lengths = np.asarray(lengths)

  def normal(*size):
    return rng.normal(size=size or (rows, T)).astype(np.float32)

  logp = -np.abs(normal())
  return algorithm.Tokens(
    logp=logp,
    entropy=np.abs(normal()),
    old_logp=logp + 0.3 * normal(),
    sampler_logp=logp + 0.3 * normal(),
    reference_logp=logp + 0.3 * normal(),
    mask=(column >= 1) & (column <= lengths[:, None]),
    advantage=np.broadcast_to(normal(rows, 1), (rows, T)),
    length=np.broadcast_to(lengths[:, None], (rows, T)).astype(np.float32),
    sequence_idx=np.broadcast_to(np.arange(rows)[:, None], (rows, T)).astype(np.int32),
    total_tokens=np.float32(lengths.sum()),
    packed_tokens=np.float32(lengths.sum()),
    total_sequences=np.float32(rows),
    total_max_tokens=np.float32(rows * (T - 1)),
  )


def responses(reward, length=None, **fields):
  """Scored responses f32[P R]; of one token each by default."""
  reward = np.asarray(reward, np.float32)
  length = np.ones_like(reward) if length is None else np.asarray(length)
  return algorithm.Responses(reward, length.astype(np.int32), **fields)


def test_gae_blames_what_is_worse_than_to_go_on():
  """Of two, one ends well after a token; the other fails by not ending there as well."""
  made = grpo_gae.make(trace_decay=0.5, prior=1.0)
  found = made.advantages(responses([[1.0, 0.0]], [[1, 2]]))
  np.testing.assert_allclose(found, [[[1.0, 0.0], [-1.0, 0.0]]])


def whole(reward, length, seed=0):
  """Responses of which everything is known, with random log-probabilities and values."""
  rng = np.random.default_rng(seed)
  length = np.asarray(length, np.int32)
  T = int(length.max()) + 2
  within = np.arange(T) < length[..., None]

  def random():
    return np.where(within, rng.normal(size=within.shape), 0).astype(np.float32)

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
  *((name, ()) for name in tiny.algorithms()),
  ("grpo", (("aggregation", "sequence"), ("kl_coef", 0.1))),
  ("grpo", (("kl_estimator", "k1"), ("kl_coef", 1.0), ("normalize_std", False))),
  ("grpo", (("kl_estimator", "k2"), ("kl_coef", 0.01))),
  ("grpo_gae", (("aggregation", "sequence"), ("kl_coef", 0.1), ("trace_decay", 0.5))),
  ("grpo_gae", (("importance_cap", 2.0), ("importance_mask", 1.2))),
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

  def run(logp, batch):
    return loss(batch.replace(logp=logp))

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
@pytest.mark.parametrize("huge", [1e30, -1e30])
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


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_tokens_far_from_what_drew_them_have_no_gradient(cap):
  """They count in the totals: the gradients of the others are as without the mask."""
  by_rollout = np.float32([0.4, 0.6, 1.0, 1.9, 2.1])
  batch = tokens([5])
  sampler_logp = batch.logp.copy()
  sampler_logp[0, 1:6] -= np.log(by_rollout)
  batch = batch.replace(old_logp=batch.logp, sampler_logp=sampler_logp)
  mask = ("importance_mask", 2.0)
  (_, before), gradient = loss_and_gradient("grpo", ())(batch)
  (_, metrics), masked = loss_and_gradient("grpo", (("importance_cap", cap), mask))(batch)
  trust = np.minimum(by_rollout, cap) if cap else np.ones(5)
  expected = gradient[0, 1:6] * trust * [0, 1, 1, 1, 0]
  np.testing.assert_allclose(masked[0, 1:6], expected, rtol=1e-5)
  assert (gradient[0, 1:6] != 0).all()
  np.testing.assert_allclose(metrics["policy/masked_share"], 2 / 5, rtol=1e-6)
  assert "policy/masked_share" not in before


@pytest.mark.parametrize("name", sorted(set(tiny.algorithms()) - {"supervised"}))
def test_a_mask_that_no_ratio_would_pass_is_refused(name):
  with pytest.raises(ValueError, match="importance_mask must be 0, .* at least 1, got 0.5"):
    algorithm.make(name, importance_mask=0.5)
  algorithm.make(name, importance_mask=1.0)


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
  parts = [
    run(jax.tree.map(lambda x, i=i: x[i : i + 1] if x.ndim else x, batch))
    for i in range(len(LENGTHS))
  ]
  total = jax.tree.map(lambda *x: sum(x), *(part for part, _ in parts))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
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
