"""The learner: advantages of the responses of a step, and the policy updates."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import moe
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import log_probability
from tlt_jax.rl import losses
from tlt_jax.rl import trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner(trainer.Trainer):
  name = "policy"

  algorithm: algorithm_lib.Algorithm
  balance_coef: float = 0.0

  @functools.cached_property
  def to_rollout(self) -> Callable[[dict], dict]:
    """Copies parameters into the rollout's layout and dtype: the weight sync."""
    made = axes.with_shardings(self.mesh, axes.ROLLOUT, self.abstract_params())
    dtype, shardings = self.config.dtype, jax.tree.map(lambda x: x.sharding, made)
    made = jax.tree.map(lambda x: x.update(dtype=dtype), made)
    memory.announce(f"the policy of rollouts ({dtype})", made, "policy, tensor_parallel")

    def cast(params):
      return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.jit(cast, out_shardings=shardings)

  def train(
    self,
    state: trainer.State,
    batch: batch_lib.Batch,
    reference: dict | None = None,
    critic: critic_lib.Critic | None = None,
  ) -> tuple[trainer.State, dict[str, float]]:
    """Takes `updates` optimizer steps, each on its share of the responses.

    With several updates, log-probabilities under the sampling policy are computed here,
    before the first one.
    `state` is donated, and may be offloaded like the reference's parameters. `critic` is
    trained on the same shares. Returns the new state, on devices; metrics `policy/*` and
    `critic/*`, averaged over the updates; and the peak memory per device.
      ValueError: B is not a multiple of `updates`
    """
    self._check(batch)
    scored = batch.scored
    if reference is not None:
      scored = scored.replace(reference_logp=self.score_responses(reference, batch))
    if critic is not None:
      scored = scored.replace(value=critic.values(batch))
    tables, metrics = self._tables(scored)
    tables["fresh"] = batch.fresh
    kept = tables["counts"]
    chosen = np.ones(len(batch.responses), bool) if kept is None else kept
    moving = chosen
    if self.algorithm.skips_zero_advantage:
      moving = chosen & np.any(tables["advantage"].reshape(len(chosen), -1) != 0, 1)
    if self.updates > 1:  # with one, the sampling policy is the one that is trained
      tables["old_logp"] = self.score_responses(state.params, batch, moving)
    sequences = batch_lib.sequences(batch, tables, self.buckets[-1].length)
    if critic is not None:
      metrics |= critic.train(batch, sequences, chosen)
    state, update_metrics = self.train_on(state, batch, sequences, moving)
    metrics |= update_metrics
    metrics["memory/policy_bytes"] = programs.live_bytes() + self.pool.temp_bytes
    return state, metrics

  def to_compile(
    self,
    prompts: int,
    responses: int,
    critic: trainer.Trainer | None,
    carried: int = 0,
  ) -> dict[str, Callable[[], None]]:
    """What compiles the programs of `train`, by name, before there is a batch.

    Of so many prompts with so many responses each, scored as rollouts are. Holds no
    weights. The algorithm sees a batch without rewards.

    Args:
      critic: its trainer, if `train` is called with a critic
      carried: further responses that `score_responses` is called with; 0: none
    """
    B = prompts * responses

    def sequences() -> batch_lib.Sequences:
      batch = batch_lib.blank(prompts, responses)
      blank, known = batch.scored.logp, {}
      if self.algorithm.uses_reference:
        known["reference_logp"] = blank
      if critic is not None:
        known["value"] = blank
      tables, _ = self._tables(batch.scored.replace(**known))
      if self.updates > 1:
        tables["old_logp"] = blank
      if carried:
        tables["fresh"] = np.zeros(blank.shape, bool)
      return batch_lib.sequences(batch, tables, self.buckets[-1].length)

    made = {}
    if self.algorithm.uses_reference or self.updates > 1:
      made["the policy's score"] = lambda: self.compile_score(B)
    if carried:
      made["the policy's score of what goes on"] = lambda: self.compile_score(carried)
    if critic is not None:
      made["the critic's score"] = lambda: critic.compile_score(B)
      made["the critic's update"] = lambda: critic.compile_update(sequences())
    made["the policy's update"] = lambda: self.compile_update(sequences())
    return made

  def _tables(self, scored: algorithm_lib.Responses) -> tuple[dict, dict[str, float]]:
    """The fields of `batch.Sequences` that follow from the responses; and metrics."""
    kept, metrics = self._kept(scored)
    advantage = np.asarray(self.algorithm.advantages(scored))
    rounded = metrics["policy/equal_groups"] == 1 and np.max(np.abs(advantage)) < 0.05
    metrics["policy/no_signal"] = float(rounded)  # rewards teach nothing in this step
    tables = {
      "advantage": advantage,
      "counts": kept,
      "max_tokens": scored.max_tokens,
      "sampler_logp": scored.logp,
      "reference_logp": scored.reference_logp,
      "value": scored.value,
    }
    if scored.value is not None:
      tables["return_"] = self.algorithm.critic.returns(scored)
    return tables, metrics

  def _kept(
    self, scored: algorithm_lib.Responses
  ) -> tuple[np.ndarray | None, dict[str, float]]:
    """The responses that count, bool[B], None if all do; and metrics of the prompts."""
    reward = scored.reward
    equal = np.max(reward, 1) == np.min(reward, 1)
    metrics = {"policy/equal_groups": float(np.mean(equal))}
    if self.algorithm.keeps is None:
      return None, metrics
    kept = np.asarray(self.algorithm.keeps(scored))
    metrics["policy/kept_groups"] = float(np.mean(kept))
    return np.repeat(kept, reward.shape[1]), metrics

  def _check(self, batch: batch_lib.Batch) -> None:
    B = len(batch.responses)
    if B % self.updates:
      raise ValueError(
        f"{B} responses cannot be shared out over {self.updates} updates per step"
      )
    chex.assert_equal(len(batch.prompts), B)
    chex.assert_equal(batch.scored.reward.size, B)
    chex.assert_shape(batch.temperature, (B,))

  def per_token(self, params, packed, temperature, rotations):
    outside, features, _ = self.features(params, packed, rotations)
    return self._score(outside, features, packed, temperature)[0]

  def share(self, params, packed, sequences, totals, rotations):
    experts, watch = self.config.experts, None
    if experts is not None:
      watch = functools.partial(moe.load, experts, is_token=packed.segments > 0)
    outside, features, load = self.features(params, packed, rotations, watch)
    logp, entropy = self._score(outside, features, packed, sequences.temperature)
    on_policy = jax.lax.stop_gradient(logp)
    known = {
      name: sequences.at_targets(name, packed)
      for name in ("advantage", "old_logp", "sampler_logp", "reference_logp")
    }
    known = {name: on_policy if x is None else x for name, x in known.items()}
    fresh = sequences.at_targets("fresh", packed)
    if fresh is not None:
      drawn = known["sampler_logp"]
      known["sampler_logp"] = jnp.where(fresh, known["old_logp"], drawn)
    tokens = algorithm_lib.Tokens(
      logp=logp,
      entropy=entropy,
      **known,
      mask=packed.mask,
      length=sequences.length[packed.sequence_idx].astype(jnp.float32),
      sequence_idx=packed.sequence_idx,
      total_tokens=totals.tokens,
      packed_tokens=totals.packed_tokens,
      total_sequences=totals.sequences,
      total_max_tokens=totals.max_tokens,
    )
    share, metrics = self.algorithm.loss(tokens)
    entropy = jnp.sum(entropy * packed.mask) / totals.packed_tokens
    metrics = {"policy/entropy": entropy, **metrics}
    if load is not None:
      balance = losses.balance(load, totals.with_prompts)
      share += self.balance_coef * experts.per_token * balance
      metrics["policy/experts_balance"] = balance
    return share, metrics

  def _score(self, outside, features, packed: packing.Packed, temperature):
    """Log-probabilities and entropies of the targets, f32[rows T] each."""
    temperature = jnp.where(temperature > 0, temperature, 1.0)[packed.sequence_idx]
    found = log_probability.scores(
      self.config,
      features.reshape(-1, features.shape[-1]),
      target.output_head(self.config, outside),
      packed.targets.reshape(-1),
      temperature.reshape(-1),
    )
    return tuple(x.reshape(packed.targets.shape) for x in found)


def make(
  config: config_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[ranges.Count, ranges.Tokens]],
  updates: ranges.Count = 1,
  remat: bool | None = True,
  only: str = "",
  offload: bool = False,
  kernels: str | None = None,
  balance_coef: ranges.NotNegative = 0.0,
) -> Learner:
  """A learner for one model, algorithm, optimizer and mesh.

  Parameters that are not trained have no gradient and no moments.

  Args:
    config: of the policy
    algorithm: advantages and loss
    optimizer: of what is trained
    mesh: (data, model)
    buckets: (rows, tokens per row) of micro-batches, by increasing tokens; rows are
      rounded up to a multiple of the slices
    updates: optimizer updates per batch
    remat: whether layers are computed again in the backward pass, to save memory; None,
      of a learner that is only described: not chosen yet
    only: regular expression of the paths ("layer_0/mlp/up_proj") of the parameters that
      are trained; '': all
    offload: whether float32 weights, moments, critic and reference wait in the host's
      memory while they are not used, as in rollouts
    kernels: of attention, a name of `implementations.NAMES`; None: the default
    balance_coef: weight of the loss that balances the load of experts, see
      `losses.balance`; as `router_aux_loss_coef` of config.json
  Raises:
    ValueError: `buckets` are none or out of order, `only` is no regular expression, there
      are no experts to balance
  """
  try:
    re.compile(only)
  except re.error as e:
    raise ValueError(f"only={only!r} is no regular expression ({e})") from e
  if balance_coef and config.experts is None:
    raise ValueError(
      f"learner.balance_coef={balance_coef} balances experts, which the policy "
      f"({config.architecture}) does not have; leave it 0"
    )
  buckets = packing.over_slices(buckets, mesh.shape[axes.DATA])
  return Learner(
    config=config,
    algorithm=algorithm,
    optimizer=optimizer,
    mesh=mesh,
    buckets=buckets,
    updates=updates,
    remat=remat,
    only=only,
    offloads=offload,
    kernels=kernels,
    balance_coef=balance_coef,
  )
