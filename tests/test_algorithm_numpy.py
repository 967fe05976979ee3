"""Each algorithm equals its paper's formulas, written down once more in float64 NumPy.

Nothing is shared with the library: a response is a list of tokens here, and a gradient is a
central difference of the objective. What a formula holds fixed (stop-gradient) is taken
from the point where the difference is taken.
"""

import jax
import numpy as np
import pytest

from tlt_jax.rl import algorithm

P, R, T, LIMIT = 3, 4, 7, 8
MEMBERS = [(p, r) for p in range(P) for r in range(R)]
AVERAGES = ("token", "sequence", "constant")


def f32(x):
  return np.asarray(x, np.float32)


def rounded(x):
  """To what f32 can hold."""
  return np.float64(np.float32(x))


class Case:
  """Random responses, and policies near the one that sampled them; float64."""

  def __init__(self, seed: int):
    rng = np.random.default_rng(seed)
    self.length = rng.integers(1, T + 1, (P, R))
    self.length[0, 0] = T
    self.within = np.arange(T) < self.length[..., None]
    self.reward = rounded(rng.choice([0.0, 0.25, 1.0], (P, R)))
    self.reward[2] = 1.0  # nothing to prefer
    self.solved = self.reward == 1

    def random(scale):
      return rounded(np.where(self.within, rng.normal(0, scale, (P, R, T)), 0))

    self.old = -np.abs(random(1.0))
    self.logp, self.sampler, self.reference = (
      rounded(self.old + random(0.3)) for _ in range(3)
    )
    self.entropy = np.abs(random(1.0))
    self.value, self.new_value = random(0.5), random(0.5)

  def responses(self) -> algorithm.Responses:
    return algorithm.Responses(
      reward=f32(self.reward),
      length=self.length.astype(np.int32),
      max_tokens=np.full((P, R), LIMIT, np.int32),
      truncated=self.length == LIMIT,
      solved=self.solved,
      logp=f32(self.sampler),
      reference_logp=f32(self.reference),
      value=f32(self.value),
    )

  def tokens(self, advantage: np.ndarray) -> algorithm.Tokens:
    """All responses of a prompt packed in one row, a prompt token before each of them."""

    def row(x):
      return np.pad(x, ((0, 0), (0, 0), (1, 0))).reshape(P, -1)

    advantage = np.broadcast_to(np.reshape(advantage, (P, R, -1)), (P, R, T))
    length = np.broadcast_to(self.length[..., None], (P, R, T))
    index = np.broadcast_to(np.arange(P * R).reshape(P, R, 1), (P, R, T + 1))
    total = np.float32(self.length.sum())
    return algorithm.Tokens(
      **{
        name: f32(row(x))
        for name, x in dict(
          logp=self.logp,
          entropy=self.entropy,
          old_logp=self.old,
          sampler_logp=self.sampler,
          reference_logp=self.reference,
          advantage=advantage,
          length=length,
        ).items()
      },
      mask=row(self.within).astype(bool),
      sequence_idx=index.reshape(P, -1).astype(np.int32),
      total_tokens=total,
      packed_tokens=total,
      total_sequences=np.float32(P * R),
      total_max_tokens=np.float32(P * R * LIMIT),
    )


def mean_over(case, average, per_token):
  """A number per (p, r, t) -> their weighted sum."""
  total = 0.0
  for p, r in MEMBERS:
    n = case.length[p, r]
    weight = {
      "token": 1 / case.length.sum(),
      "sequence": 1 / (n * P * R),
      "constant": 1 / (LIMIT * P * R),
    }[average]
    total += weight * sum(per_token(p, r, t) for t in range(n))
  return total


def kl_of(estimator, policy, other):
  ratio = np.exp(other - policy)
  log = np.log(ratio)
  return {"k1": -log, "k2": log**2 / 2, "k3": ratio - 1 - log}[estimator]


def ppo_term(ratio, a, low=0.2, high=0.2, dual=0.0):
  """Equation 7 of PPO, and equation 5 of dual-clip PPO."""
  term = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
  return max(term, dual * a) if dual and a < 0 else term


def objective(case, average, term, args):
  """-mean(term) with what may stand beside it; a function of the policy's logp."""
  kl_coef, estimator = args.get("kl_coef", 0.0), args.get("kl_estimator", "k3")
  cap, bonus = args.get("importance_cap", 0.0), args.get("entropy_coef", 0.0)
  bound = args.get("importance_mask", 0.0)

  def of(logp):
    def per_token(p, r, t):
      i = p, r, t
      of_rollout = np.exp(case.old[i] - case.sampler[i])
      trust = min(of_rollout, cap) if cap else 1.0
      if bound and not 1 / bound <= of_rollout <= bound:
        trust = 0.0
      cost = kl_coef * kl_of(estimator, logp[i], case.reference[i]) if kl_coef else 0.0
      return -trust * term(logp, i) + cost - bonus * case.entropy[i]

    return mean_over(case, average, per_token)

  return of


def of_group(reward, divided):
  """Rewards less their group's mean, perhaps over its deviation."""
  advantage = np.zeros((P, R))
  for p in range(P):
    advantage[p] = reward[p] - reward[p].mean()
    if divided:
      advantage[p] /= np.sqrt(((reward[p] - reward[p].mean()) ** 2).mean()) + 1e-6
  return advantage


def token_ratio(case, logp, i):
  return np.exp(logp[i] - case.old[i])


def clipped(case, a, low, high, dual=0.0):
  def term(logp, i):
    return ppo_term(token_ratio(case, logp, i), a[i[: a.ndim]], low, high, dual)

  return term


def grpo(case, args):
  a = of_group(case.reward, args.get("normalize_std", True))
  term = clipped(case, a, 0.2, 0.28, args.get("dual_clip", 0.0))
  return a, objective(case, args.get("aggregation", "token"), term, args)


def of_those_still_running(rewards, lengths, trace_decay, prior):
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


def grpo_gae(case, args):
  a = of_those_still_running(case.reward, case.length, 0.97, 4.0)[..., :T]
  return a, objective(case, "token", clipped(case, a, 0.2, 0.28), args)


def dr_grpo(case, args):
  a = of_group(case.reward, False)
  return a, objective(case, "constant", clipped(case, a, 0.2, 0.2), args)


def dapo(case, args):
  reward, cache = case.reward.copy(), args.get("overlong_share", 0.2) * LIMIT
  for m in MEMBERS:
    if case.length[m] > LIMIT - cache:
      reward[m] += (LIMIT - cache - case.length[m]) / cache
  a = of_group(reward, True)
  return a, objective(case, "token", clipped(case, a, 0.2, 0.28), args)


def rloo(case, args):
  reward = case.reward.copy()
  for m in MEMBERS:
    n = case.length[m]
    kl = (case.sampler[m][:n] - case.reference[m][:n]).sum()
    reward[m] -= args.get("kl_coef", 0.0) * kl
  a = np.zeros((P, R))
  for p, r in MEMBERS:
    a[p, r] = reward[p, r] - np.mean([reward[p, j] for j in range(R) if j != r])
  args = {k: x for k, x in args.items() if k != "kl_coef"}
  return a, objective(case, "constant", lambda logp, i: a[i[:2]] * logp[i], args)


def reinforce_pp(case, args):
  in_group, beta = args.get("baseline") == "group", args.get("kl_coef", 0.0)
  reward = of_group(case.reward, False) if in_group else case.reward
  raw = np.zeros((P, R, T))
  for p, r in MEMBERS:
    for t in range(case.length[p, r]):
      rest = slice(t, case.length[p, r])
      kl = (case.sampler[p, r, rest] - case.reference[p, r, rest]).sum()
      raw[p, r, t] = reward[p, r] - (0.0 if in_group else beta * kl)
  known = raw[case.within]
  a = np.where(case.within, (raw - known.mean()) / (known.std() + 1e-6), 0)
  args = args | ({"kl_estimator": "k2"} if in_group else {"kl_coef": 0.0})
  return a, objective(case, "token", clipped(case, a, 0.2, 0.2), args)


def gspo(case, args):
  a, low, high = of_group(case.reward, True), args["clip_low"], args["clip_high"]

  def ratio(logp, m):
    n = case.length[m]
    return np.prod(np.exp(logp[m][:n] - case.old[m][:n])) ** (1 / n)

  def term(logp, i):
    s = ratio(logp, i[:2])
    if args.get("credit") == "token":  # GSPO-token: the value is held fixed
      s = ratio(case.logp, i[:2]) * np.exp(logp[i] - case.logp[i])
    return ppo_term(s, a[i[:2]], low, high)

  return a, objective(case, "sequence", term, args)


def cispo(case, args):
  a = of_group(case.reward, True)

  def term(logp, i):
    weight = min(token_ratio(case, case.logp, i), 1 + args["clip_high"])
    return max(weight, 1 - args["clip_low"]) * a[i[:2]] * logp[i]

  return a, objective(case, "token", term, args)


def gae_by_sum(case, args):
  """Equation 11 of PPO: a sum over what follows of (gamma lambda)^l delta."""
  gamma, decay = args.get("discount", 1.0), args.get("trace_decay", 1.0)
  beta = args.get("kl_coef", 0.0) if args.get("kl_in", "reward") == "reward" else 0.0
  a = np.zeros((P, R, T))
  for m in MEMBERS:
    n = case.length[m]
    value = [*case.value[m][:n], 0.0]
    delta = [gamma * value[t + 1] - value[t] for t in range(n)]
    delta[-1] += case.reward[m]
    for t in range(n):
      delta[t] -= beta * (case.sampler[m][t] - case.reference[m][t])
    for t in range(n):
      a[m][t] = sum((gamma * decay) ** (k - t) * delta[k] for k in range(t, n))
  return a


def ppo(case, args):
  a, known = gae_by_sum(case, args), case.within
  a = np.where(known, (a - a[known].mean()) / (a[known].std() + 1e-6), 0)
  if args.get("kl_in") != "loss":
    args = args | {"kl_coef": 0.0}
  return a, objective(case, "token", clipped(case, a, 0.2, 0.2), args)


EXTRAS = dict(entropy_coef=0.05, importance_cap=1.1)
MASK = dict(importance_mask=1.3)
CASES = [
  ("grpo", grpo, {}),
  *(("grpo", grpo, dict(aggregation=x, kl_coef=0.3)) for x in AVERAGES),
  *(("grpo", grpo, dict(kl_estimator=x, kl_coef=0.3) | EXTRAS) for x in ("k1", "k2")),
  ("grpo", grpo, dict(normalize_std=False, dual_clip=1.05) | MASK),
  ("grpo_gae", grpo_gae, dict(kl_coef=0.3)),
  ("grpo_gae", grpo_gae, dict(importance_cap=1.1) | MASK),
  ("dr_grpo", dr_grpo, EXTRAS | MASK),
  ("dapo", dapo, EXTRAS | MASK | {"overlong_share": 0.5}),
  ("rloo", rloo, EXTRAS | MASK | {"kl_coef": 0.2}),
  ("reinforce_pp", reinforce_pp, EXTRAS | MASK | {"kl_coef": 0.2}),
  ("reinforce_pp", reinforce_pp, {"kl_coef": 0.2, "baseline": "group"}),
  ("gspo", gspo, dict(clip_low=0.03, clip_high=0.04, kl_coef=0.1) | MASK),
  ("gspo", gspo, dict(clip_low=0.03, clip_high=0.04, credit="token") | EXTRAS),
  ("cispo", cispo, dict(clip_low=0.3, clip_high=0.2) | EXTRAS | MASK),
  ("ppo", ppo, dict(discount=0.9, trace_decay=0.8, kl_coef=0.2)),
  ("ppo", ppo, dict(kl_in="loss", kl_estimator="k3", kl_coef=0.2) | EXTRAS | MASK),
]


def difference_quotient(of, at, where, step=1e-5):
  """The gradient of a function at a point, along the axes that count."""
  gradient = np.zeros_like(at)
  for i in zip(*np.nonzero(where), strict=True):
    up, down = at.copy(), at.copy()
    up[i] += step
    down[i] -= step
    gradient[i] = (of(up) - of(down)) / (2 * step)
  return gradient


@pytest.mark.parametrize(("name", "formula", "args"), CASES)
def test_advantages_loss_and_gradient_are_those_of_the_paper(name, formula, args):
  case, made = Case(len(name)), algorithm.make(name, **args)
  expected, of = formula(case, args)
  found = np.asarray(made.advantages(case.responses()))
  np.testing.assert_allclose(found[..., :T], expected, atol=1e-6, rtol=1e-6)
  batch = case.tokens(expected)

  def loss(logp):
    return made.loss(batch.replace(logp=logp))

  (share, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(batch.logp)
  np.testing.assert_allclose(share, of(case.logp), atol=1e-6)
  if "importance_mask" in args:
    assert 0.2 < metrics["policy/masked_share"] < 0.6
  by_response = np.asarray(gradient).reshape(P, R, T + 1)
  assert not by_response[..., 0].any()
  numeric = difference_quotient(of, case.logp, case.within)
  np.testing.assert_allclose(by_response[..., 1:], numeric, atol=1e-6)
  assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_the_loss_of_a_critic_is_half_the_larger_squared_error(value_clip):
  """And what it is to predict is the estimate of the advantage plus the old value."""
  case, args = Case(1), dict(discount=0.9, trace_decay=0.8)
  made = algorithm.make("ppo", value_clip=value_clip, **args).critic
  returns = gae_by_sum(case, args) + case.value
  found = made.returns(case.responses())
  np.testing.assert_allclose(found, returns, atol=1e-6)

  def of(value):
    total = 0.0
    for i in zip(*np.nonzero(case.within), strict=True):
      moved = value[i] - case.value[i]
      near = case.value[i] + (np.clip(moved, -0.2, 0.2) if value_clip else moved)
      total += max((value[i] - returns[i]) ** 2, (near - returns[i]) ** 2) / 2
    return total / case.length.sum()

  def flat(x):
    return f32(x.reshape(P, -1))

  values = algorithm.Values(
    value=flat(case.new_value),
    old_value=flat(case.value),
    return_=flat(returns),
    mask=case.within.reshape(P, -1),
    total_tokens=np.float32(case.length.sum()),
  )

  def loss(value):
    return made.loss(values.replace(value=value))[0]

  share, gradient = jax.value_and_grad(loss)(values.value)
  np.testing.assert_allclose(share, of(case.new_value), atol=1e-6)
  numeric = difference_quotient(of, case.new_value, case.within)
  np.testing.assert_allclose(np.reshape(gradient, (P, R, T)), numeric, atol=1e-6)


def test_dapo_keeps_prompts_that_are_solved_sometimes():
  """Equation 11; of a reward that says more than whether a response solves."""
  solved = np.array([[True, False], [True, True], [False, False]])
  scored = algorithm.Responses(np.ones((3, 2), np.float32), np.ones((3, 2), np.int32))
  keeps = algorithm.make("dapo").keeps
  np.testing.assert_array_equal(keeps(scored.replace(solved=solved)), [True, False, False])
