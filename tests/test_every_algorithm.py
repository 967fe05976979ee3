"""Speculation and the drafter's training change no run, whatever algorithm it trains by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import test_algorithm
from tests import test_spot
from tests import tiny
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import samples as samples_lib

STEPS = 3
two_micro_batches = test_spot.two_micro_batches


@functools.cache
def engines():
  """Without speculation, and with a drafter that trains; their programs serve all."""
  plain = rollout.make(tiny.CONFIG, tiny.mesh(2), test_spot.OPTIONS)
  return plain, test_spot.make_engine(test_spot.make_spot())


def batch(made, samples) -> batch_lib.Batch:
  """What a learner trains on: long responses are solved where few tokens are large."""
  responses = [samples.response(b) for b in range(len(made))]
  reward = np.array([np.mean(r < 20) for r in responses], np.float32)
  by_prompt = lambda x: np.reshape(x, (8, 3, *np.shape(x)[1:]))
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
  """The tokens of all rollouts, the policy and the critic they end in, and the updates."""
  copy = lambda: jax.tree.map(jnp.copy, tiny.params())  # a learner takes it over
  state, drawn = learner.init(copy()), []
  reference = learner.init(copy()).params if learner.algorithm.uses_reference else None
  critic = critic_lib.make(learner.algorithm.critic, learner, copy())
  for step in range(STEPS):
    made = test_spot.requests(first_request=24 * step)
    samples = engine(learner.to_rollout(state.params), made, **options)
    drawn.append([samples.response(b).tolist() for b in range(len(made))])
    state, metrics = learner.train(state, batch(made, samples), reference, critic)
    assert metrics["policy/grad_norm"] > 0
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
  assert names | {"supervised"} == set(test_algorithm.algorithms())


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
  before = test_spot.hash_of(drafting.spot.state.params)
  tokens, end = train(learner, plain)
  same_tokens, same_end = train(learner, drafting, train=True)
  assert tokens == same_tokens
  for x, y in zip(jax.tree.leaves(end), jax.tree.leaves(same_end), strict=True):
    np.testing.assert_array_equal(x, y)
  assert test_spot.hash_of(drafting.spot.state.params) != before  # it did train
