"""Speculation and the drafter's training change no run, whatever algorithm it trains by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import investment
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib

STEPS = 3
OPTIONS = rollout.Options(**tiny.SIZES, slots=16, chunk=8, buckets=(4,))


@pytest.fixture(autouse=True)
def two_micro_batches(monkeypatch):
  """Training is worth it, and a chunk has time for so much, whatever the clock says."""
  monkeypatch.setattr(clock_lib.Clock, "micro_batches_within", lambda *_: 2)
  monkeypatch.setattr(investment.Investment, "_pays", lambda *_: True)


@functools.cache
def engines():
  """Without speculation, and with a drafter that trains; their programs serve all."""
  options = spot_lib.Options(
    row_tokens=32,
    context_tokens=4,
    rows=12,
    carried_rows=6,
    chunk_tokens=16,
    max_batch=4,
    average=0.0,
    after_rollout_share=0.0,
  )
  trainer = spot_lib.make_trainer(
    tiny.CONFIG,
    tiny.DRAFTERS["eagle2"],
    tiny.mesh(2),
    optimizer=optax.adam(1e-2),
    longest=tiny.SIZES["max_length"],
    loss=draft_loss.Loss(steps=2, distance="cross_entropy"),
    options=options,
  )
  spot = spot_lib.Spot(trainer, options, tiny.draft_params("eagle2", seed=5))
  chain = strategy_lib.Strategy(depth=3, width=1, verify=4)
  last_ones = selector_lib.ByLiveBatch(((2, chain),))
  return (
    rollout.make(tiny.CONFIG, tiny.mesh(2), OPTIONS),
    rollout.make(tiny.CONFIG, tiny.mesh(2), OPTIONS, spot, last_ones),
  )


def requests(first_request):
  """Every other prompt has short responses: the slices that get these run dry early."""
  limits = np.where(np.arange(24) // 3 % 2, np.linspace(5, 80, 24).astype(int), 6)
  return tiny.requests(8, 3, max_tokens=limits, stop_tokens=[], first_request=first_request)


def copy(tree):
  """A learner takes over what it is given."""
  return jax.tree.map(jnp.copy, tree)


def batch(made, samples) -> batch_lib.Batch:
  """What a learner trains on: long responses are solved where few tokens are large."""
  responses = [samples.response(b) for b in range(len(made))]
  reward = np.array([np.mean(r < 20) for r in responses], np.float32)

  def by_prompt(x):
    return np.reshape(x, (8, 3, *np.shape(x)[1:]))

  return batch_lib.Batch(
    prompts=[made.prompt(b) for b in range(len(made))],
    responses=responses,
    temperature=made.temperature,
    scored=algorithm_lib.Responses(
      reward=by_prompt(reward),
      length=by_prompt(samples.length),
      max_tokens=by_prompt(made.max_tokens),
      truncated=by_prompt(samples.finish_reason == samples_lib.LENGTH),
      solved=by_prompt(reward > 0.3),
      logp=by_prompt(samples.logp),
    ),
  )


def train(learner, engine, **options):
  """The tokens of all rollouts, and the policy and the critic they end in.

  Compiles the learner's programs first; nothing else is compiled later.
  """
  state, drawn = learner.init(copy(tiny.params())), []
  reference = copy(state.params) if learner.algorithm.uses_reference else None
  critic = critic_lib.make(learner.algorithm.critic, learner, copy(tiny.params()))
  to_compile = learner.to_compile(8, 3, critic and critic.trainer)
  for compile_one in to_compile.values():
    compile_one()
  for step in range(STEPS):
    made = requests(first_request=24 * step)
    samples = engine(learner.to_rollout(state.params), made, **options)
    drawn.append([samples.response(b).tolist() for b in range(len(made))])
    state, metrics = learner.train(state, batch(made, samples), reference, critic)
    assert metrics["policy/grad_norm"] > 0
  pools = [learner.pool, *([critic.trainer.pool] if critic else [])]
  assert sum(map(len, pools)) == len(to_compile)
  return drawn, jax.device_get((state, critic and critic.state))


ORDINARY = [("ppo", {})]  # with a critic
SLOW = [
  ("dapo", {}),  # a filter of prompts
  ("grpo", {"kl_coef": 0.1}),
  ("grpo_gae", {}),
  ("dr_grpo", {}),
  ("rloo", {}),
  ("reinforce_pp", {}),
  ("reinforce_pp", {"baseline": "group"}),
  ("gspo", {}),
  ("gspo", {"credit": "token"}),
  ("cispo", {}),
]


def test_every_algorithm_is_tried():
  names = {name for name, _ in ORDINARY + SLOW}
  assert names | {"supervised"} == set(tiny.algorithms())


@pytest.mark.parametrize(
  ("name", "options"), [*ORDINARY, *(tiny.slow(*case) for case in SLOW)]
)
def test_a_run_is_the_same_with_speculation_and_without(name, options):
  """Every token of three steps and, bit for bit, the policy, its moments and the critic."""
  learner = learner_lib.make(
    tiny.CONFIG,
    algorithm_lib.make(name, **options),
    optax.adam(1e-2),
    tiny.mesh(2),
    buckets=((8, 128),),
    updates=2,
    remat=False,
  )
  plain, drafting = engines()
  before = copy(drafting.spot.state.params)
  tokens, end = train(learner, plain)
  same_tokens, same_end = train(learner, drafting, train=True)
  assert tokens == same_tokens
  jax.tree.map(np.testing.assert_array_equal, end, same_end)
  after = drafting.spot.state.params
  assert any(jax.tree.leaves(jax.tree.map(lambda x, y: np.any(x != y), before, after)))
