"""The learner: log-probabilities of packed tokens, and the policy update.

An update is one jitted program: for each bucket a loop over its micro-batches
(as many as there are, read at run time) adds up gradients, then one optimizer
step follows. Parameters are split by `axes.TRAIN` (FSDP over `data`, tensor
parallel over `model`), rows of a micro-batch over `data`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re

import chex
from flax import traverse_util
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import accumulate
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib

LOGIT_CHUNK = 1024  # tokens of a row whose f32 logits exist at a time


@flax.struct.dataclass
class State:
  """A policy in training."""

  params: dict  # f32, laid out by axes.TRAIN
  opt_state: optax.OptState
  step: jax.Array  # i32[]  optimizer updates done


@flax.struct.dataclass
class Sequences:
  """The facts of each packed sequence that an update needs; B in packing order."""

  advantage: jax.Array  # f32[B 1], or f32[B T] for each response token
  length: jax.Array  # i32[B]  response tokens
  prompt_length: jax.Array  # i32[B]
  temperature: jax.Array  # f32[B]  at which it was sampled


@dataclasses.dataclass(frozen=True)
class Batch:
  """The responses of one RL step, on the host, in request order."""

  prompts: Sequence[np.ndarray]  # i32[...] per response
  responses: Sequence[np.ndarray]  # i32[...] per response
  advantage: np.ndarray  # f32[B], or f32[B T] for each response token
  temperature: np.ndarray  # f32[B]


@dataclasses.dataclass(frozen=True)
class Learner:
  """Updates a policy on batches of responses; its fields are explained in `make`."""

  config: config_lib.ModelConfig
  algorithm: algorithm_lib.Algorithm
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  buckets: tuple[packing.Bucket, ...]
  updates: int
  remat: bool
  only: str
  pool: programs.Pool = dataclasses.field(default_factory=programs.Pool)

  def abstract_state(self) -> State:
    """Shapes, dtypes and shardings of the state."""
    abstract = target.abstract_params(self.config)
    params = axes.with_shardings(self.mesh, axes.TRAIN, abstract)
    opt_state = axes.abstract_opt_state(self.optimizer, self.mesh, self.trained(params))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=axes.sharding(self.mesh))
    return State(params, opt_state, step)

  def init(self, params: dict) -> State:
    """The state before the first update; takes over `params`, of any layout."""
    abstract = self.abstract_state()
    memory.announce("the learner's moments", abstract.opt_state, "learner.only, policy")
    params = jax.tree.map(
      lambda x, like: jax.device_put(jnp.asarray(x, like.dtype), like.sharding),
      params,
      abstract.params,
    )
    rest = (abstract.opt_state, abstract.step)
    init_rest = jax.jit(
      lambda params: (self.optimizer.init(self.trained(params)), jnp.int32(0)),
      out_shardings=jax.tree.map(lambda x: x.sharding, rest),
    )
    opt_state, step = init_rest(params)
    return State(params, opt_state, step)

  def trained(self, params: dict) -> dict:
    """The part of a parameter tree whose paths `only` finds: what is trained."""
    flat = traverse_util.flatten_dict(params, sep="/")
    chosen = {path: x for path, x in flat.items() if re.search(self.only, path)}
    if not chosen:
      raise ValueError(f"only={self.only!r} matches no parameter; there is {min(flat)}")
    return traverse_util.unflatten_dict(chosen, sep="/")

  @functools.cached_property
  def to_rollout(self) -> Callable[[dict], dict]:
    """Copies parameters into the rollout's layout and dtype: the weight sync."""
    abstract = target.abstract_params(self.config)
    made = axes.with_shardings(self.mesh, axes.ROLLOUT, abstract)
    dtype, shardings = self.config.dtype, jax.tree.map(lambda x: x.sharding, made)
    made = jax.tree.map(lambda x: x.update(dtype=dtype), made)
    memory.announce(f"the policy of rollouts ({dtype})", made, "policy, tensor_parallel")
    cast = lambda params: jax.tree.map(lambda x: x.astype(dtype), params)
    return jax.jit(cast, out_shardings=shardings)

  def train(
    self, state: State, batch: Batch, reference: dict | None = None
  ) -> tuple[State, dict[str, float]]:
    """Takes `updates` optimizer steps, each on its share of the responses.

    Log-probabilities under the sampling policy are computed here, by the program
    that also computes the gradient's, before the first update.

    Args:
      state: the policy; donated
      batch: B responses, B a multiple of `updates`
      reference: parameters of the reference policy in `axes.TRAIN` layout, if the
        algorithm uses one
    Returns:
      the new state; `policy/*` as floats, averaged over the updates, and the phase's
      peak memory per device
    """
    self._check(batch)
    shares = np.split(np.arange(len(batch.responses)), self.updates)
    packed = [self._pack(batch, share) for share in shares]
    score_one = functools.partial(self._run, "logprobs", self.logprobs, len(shares[0]))
    update_one = functools.partial(self._run, "update", self.update, len(shares[0]))

    def score(params):
      return [score_one(params, buckets, known.temperature) for buckets, known in packed]

    # With one update the sampling policy is the one that is trained.
    old = score(state.params) if self.updates > 1 else [None] * len(shares)
    fixed = [None] * len(shares) if reference is None else score(reference)
    every = []
    for (buckets, sequences), logp, fixed_logp in zip(packed, old, fixed, strict=True):
      state, metrics = update_one(state, buckets, sequences, logp, fixed_logp)
      every.append(metrics)
    every = jax.device_get(every)
    metrics = {k: float(np.mean([m[k] for m in every])) for k in every[0]}
    metrics["memory/policy_bytes"] = programs.live_bytes() + self.pool.temp_bytes
    return state, metrics

  def _check(self, batch: Batch) -> None:
    """Raises unless the batch's arrays belong together and can be shared out."""
    B = len(batch.responses)
    if B % self.updates:
      raise ValueError(
        f"{B} responses cannot be shared out over {self.updates} updates per step"
      )
    chex.assert_equal(len(batch.prompts), B)
    chex.assert_rank(batch.advantage, {1, 2})
    chex.assert_axis_dimension(batch.advantage, 0, B)
    chex.assert_shape(batch.temperature, (B,))

  def _run(self, name: str, jitted, count: int, *args):
    """Runs a program on `count` sequences, compiled if it is the first for so many."""
    if (name, count) not in self.pool:
      memory.announce_programs(f"the learner's {name}", beside=self.abstract_state())
    return self.pool.get(name, (count,), jitted, *args)(*args)

  def _pack(self, batch: Batch, share: np.ndarray):
    """Packs the responses of one update: `Packed` per bucket, and their `Sequences`."""
    prompts = [batch.prompts[i] for i in share]
    responses = [batch.responses[i] for i in share]
    advantage = batch.advantage[share].reshape(len(share), -1)
    if batch.advantage.ndim > 1:  # of one size, whatever the longest response
      size = self.buckets[-1].length
      advantage = np.pad(advantage, ((0, 0), (0, size)))[:, :size]
    skips = self.algorithm.skips_zero_advantage
    chosen = np.any(advantage != 0, 1) if skips else None
    packed = packing.pack(prompts, responses, self.buckets, chosen)
    sequences = Sequences(
      advantage=advantage,
      length=np.array([len(r) for r in responses], np.int32),
      prompt_length=np.array([len(p) for p in prompts], np.int32),
      temperature=batch.temperature[share],
    )
    whole = axes.sharding(self.mesh)
    return packing.place(packed, self.mesh), jax.device_put(sequences, whole)

  @functools.cached_property
  def logprobs(self) -> Callable[..., tuple[jax.Array, ...]]:
    """Scores packed responses, as a jitted function.

    Args:
      params: of the policy
      packed: `Packed` per bucket
      temperature: f32[B]
    Returns:
      f32[M rows T] per bucket, the log-probabilities of the targets
    """

    def run(params, packed, temperature):
      rotations = self._rotations()

      def score(bucket):
        def score_one(i, out):
          batch = bucket.micro_batch(i)
          return out.at[i].set(self._score(params, batch, temperature, rotations)[0])

        zeros = jnp.zeros(bucket.tokens.shape, jnp.float32)
        return jax.lax.fori_loop(0, bucket.count, score_one, zeros)

      return tuple(score(bucket) for bucket in packed)

    return jax.jit(run)

  @functools.cached_property
  def update(self) -> Callable[..., tuple[State, dict]]:
    """Takes one optimizer step on a whole batch, as a jitted function.

    Args:
      state: donated
      packed: `Packed` per bucket
      sequences: what is known of them
      old_logp, reference_logp: what `logprobs` returned for the policy that sampled and
        for the reference; None: as sampled by this very policy
    Returns:
      the new state and metrics
    """
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
    return jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))

  def _update(self, state, packed, sequences, old_logp=None, reference_logp=None):
    """See `update`."""
    total_tokens, packed_tokens = _count_tokens(packed, sequences)
    rotations = self._rotations()
    trained = self.trained(state.params)

    def loss(trained, batch, old, reference):
      params = _merge(state.params, trained)
      logp, entropy = self._score(params, batch, sequences.temperature, rotations)
      on_policy = jax.lax.stop_gradient(logp)
      tokens = algorithm_lib.Tokens(
        logp=logp,
        entropy=entropy,
        old_logp=on_policy if old is None else old,
        reference_logp=on_policy if reference is None else reference,
        mask=batch.mask,
        advantage=_advantage(batch, sequences),
        length=sequences.length[batch.sequence_idx].astype(jnp.float32),
        sequence_idx=batch.sequence_idx,
        total_tokens=total_tokens,
        packed_tokens=packed_tokens,
        total_sequences=jnp.float32(sequences.length.shape[0]),
      )
      share, metrics = self.algorithm.loss(tokens)
      metrics = {
        "policy/loss": share,
        "policy/entropy": jnp.sum(entropy * batch.mask) / packed_tokens,
        **metrics,
      }
      return share, metrics

    gradient_of = jax.grad(loss, has_aux=True)

    def gradient(b: int, i: jax.Array):
      """The gradient of micro-batch i of bucket b, and its metrics."""
      batch = packed[b].micro_batch(i)
      old = None if old_logp is None else old_logp[b][i]
      reference = None if reference_logp is None else reference_logp[b][i]
      return gradient_of(trained, batch, old, reference)

    total = None
    for b, bucket in enumerate(packed):
      total = accumulate.sum_over(bucket.count, functools.partial(gradient, b), total)
    grads, metrics = total
    updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
    metrics["policy/grad_norm"] = optax.tree.norm(grads)
    params = _merge(state.params, optax.apply_updates(trained, updates))
    return State(params, opt_state, state.step + 1), metrics

  def _score(self, params, batch: packing.Packed, temperature, rotations):
    """Scores a micro-batch, a part of its rows at a time.

    Args:
      params: of the policy
      batch: arrays [rows T]
      temperature: f32[B]  of each sequence
      rotations: of all positions
    Returns:
      log-probability of the targets and entropy of their distribution, f32[rows T] each
    """
    model = target.Target(self.config, remat=self.remat)
    by_rows = axes.sharding(self.mesh, axes.DATA)
    # Gathered from the slices: left to itself XLA gathers the activations of all rows
    # instead, and has the logits of all of them on every slice.
    whole = axes.shardings(self.mesh, axes.ROLLOUT, target.abstract_params(self.config))
    params = jax.lax.with_sharding_constraint(params, whole)
    features, _, _ = model.apply(
      {"params": params},
      jax.lax.with_sharding_constraint(batch.tokens, by_rows),
      batch.positions,
      taps=(),
      seen=packing.segment_mask(batch.segments, batch.positions),
      rotations=rotations,
      method=target.Target.with_taps,
    )
    temperature = jnp.where(temperature > 0, temperature, 1.0)[batch.sequence_idx]

    @jax.checkpoint
    def head(features, targets, temperature):
      logits = model.apply({"params": params}, features, method=target.Target.logits)
      logp = jax.nn.log_softmax(logits / temperature[..., None], -1)
      entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
      return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy

    starts = range(0, features.shape[1], LOGIT_CHUNK)
    parts = [slice(start, start + LOGIT_CHUNK) for start in starts]
    scored = [head(features[:, p], batch.targets[:, p], temperature[:, p]) for p in parts]
    return tuple(jnp.concatenate(x, 1) for x in zip(*scored, strict=True))

  def _rotations(self) -> layers.Rotation:
    """RoPE's tables of all positions, made outside the loops over micro-batches."""
    return layers.rotation(self.config, jnp.arange(self.buckets[-1].length))


def _count_tokens(
  packed: Sequence[packing.Packed], sequences: Sequences
) -> tuple[jax.Array, jax.Array]:
  """Response tokens of the whole batch, and those of them that are packed: f32[] each."""
  total = jnp.sum(sequences.length).astype(jnp.float32)
  seen = sum(jnp.sum(bucket.mask) for bucket in packed).astype(jnp.float32)
  return total, jnp.maximum(seen, 1.0)


def _advantage(batch: packing.Packed, sequences: Sequences) -> jax.Array:
  """The advantage of each target, or of its sequence: f32[rows T].

  Worked row, prompt a b and response x y z: the target of position 1 is x, the first
  response token; positions 1 2 3 have its advantages 0 1 2.
  """
  index = batch.positions + 1 - sequences.prompt_length[batch.sequence_idx]
  last = sequences.advantage.shape[1] - 1
  return sequences.advantage[batch.sequence_idx, jnp.clip(index, 0, last)]


def _merge(params: dict, part: dict) -> dict:
  """Puts a part of a parameter tree in its place: `params`, and `part` where it is."""
  flat = lambda tree: traverse_util.flatten_dict(tree, sep="/")
  return traverse_util.unflatten_dict(flat(params) | flat(part), sep="/")


def make(
  config: config_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[ranges.Count, ranges.Tokens]],
  updates: ranges.Count = 1,
  remat: bool = True,
  only: str = "",
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
    remat: whether layers are computed again in the backward pass, to save memory
    only: regular expression of the paths ("layer_0/mlp/up_proj") of the parameters that
      are trained; '': all
  Raises:
    ValueError: `buckets` are none or out of order, `only` is no regular expression
  """
  try:
    re.compile(only)
  except re.error as e:
    raise ValueError(f"only={only!r} is no regular expression ({e})") from e
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
  )

