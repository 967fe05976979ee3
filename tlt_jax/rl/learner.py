"""The learner: log-probabilities of packed tokens, and the policy update.

An update is one jitted program: for each bucket a loop over its micro-batches
(as many as there are, read at run time) adds up gradients, then one optimizer
step follows. Parameters are split by `axes.TRAIN` (FSDP over `data`, tensor
parallel over `model`), rows of a micro-batch over `data`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import re

from flax import traverse_util
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import accumulate
from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib

_LOGIT_CHUNK = 1024  # tokens of a row whose f32 logits exist at a time


@flax.struct.dataclass
class State:
  params: dict  # f32, laid out by axes.TRAIN
  opt_state: optax.OptState
  step: jax.Array  # i32[]  optimizer updates done


@flax.struct.dataclass
class Sequences:
  """What an update knows of each packed sequence; [B] in packing order."""

  advantage: jax.Array  # f32[B 1], or f32[B N] for each response token
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
  """See `make`."""

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

  def init(self, params) -> State:
    """The state before the first update; takes over `params`, of any layout."""
    abstract = self.abstract_state()
    params = jax.tree.map(
      lambda x, like: jax.device_put(jnp.asarray(x, like.dtype), like.sharding),
      params,
      abstract.params,
    )
    make = jax.jit(
      lambda p: (self.optimizer.init(self.trained(p)), jnp.int32(0)),
      out_shardings=jax.tree.map(
        lambda x: x.sharding, (abstract.opt_state, abstract.step)
      ),
    )
    return State(params, *make(params))

  def trained(self, params) -> dict:
    """The part of a parameter tree that is trained."""
    flat = traverse_util.flatten_dict(params, sep="/")
    chosen = {path: x for path, x in flat.items() if re.search(self.only, path)}
    if not chosen:
      raise ValueError(f"only={self.only!r} matches no parameter; there is {min(flat)}")
    return traverse_util.unflatten_dict(chosen, sep="/")

  @functools.cached_property
  def to_rollout(self):
    """params -> a copy in the rollout's layout and dtype: the weight sync."""
    abstract = target.abstract_params(self.config)
    cast = lambda params: jax.tree.map(lambda x: x.astype(self.config.dtype), params)
    return jax.jit(
      cast, out_shardings=axes.shardings(self.mesh, axes.ROLLOUT, abstract)
    )

  def train(self, state: State, batch: Batch, reference=None) -> tuple[State, dict]:
    """`updates` optimizer steps, each on its share of the responses.

    Log-probabilities under the sampling policy are computed here, by the program
    that also computes the gradient's, before the first update.

    Args:
      reference: parameters of the reference policy in `axes.TRAIN` layout, if the
        algorithm uses one
    Returns:
      the new state (the old one is donated); `policy/*` as floats, averaged over
      the updates, and the phase's peak memory per device
    """
    if len(batch.responses) % self.updates:
      raise ValueError(
        f"{len(batch.responses)} responses cannot be shared out over {self.updates} "
        "updates per step"
      )
    shares = np.split(np.arange(len(batch.responses)), self.updates)
    packed = [self._pack(batch, share) for share in shares]
    key = (len(shares[0]),)

    def score(params):
      args = [(params, buckets, seqs.temperature) for buckets, seqs in packed]
      run = self.pool.get("logprobs", key, self.logprobs, *args[0])
      return [run(*a) for a in args]

    # With one update the sampling policy is the one that is trained.
    old = score(state.params) if self.updates > 1 else [None] * len(shares)
    fixed = [None] * len(shares) if reference is None else score(reference)
    every = []
    for (buckets, sequences), *logp in zip(packed, old, fixed, strict=True):
      args = (state, buckets, sequences, *logp)
      run = self.pool.get("update", key, self.update, *args)
      state, metrics = run(*args)
      every.append(metrics)
    every = jax.device_get(every)
    metrics = {k: float(np.mean([m[k] for m in every])) for k in every[0]}
    metrics["memory/policy_bytes"] = programs.live_bytes() + self.pool.temp_bytes
    return state, metrics

  def _pack(self, batch: Batch, share: np.ndarray):
    responses = [batch.responses[i] for i in share]
    skips = self.algorithm.skips_zero_advantage
    advantage = batch.advantage[share].reshape(len(share), -1)
    if batch.advantage.ndim > 1:  # of one size, whatever the longest response
      size = self.buckets[-1].length
      advantage = np.pad(advantage, ((0, 0), (0, size)))[:, :size]
    packed = packing.pack(
      [batch.prompts[i] for i in share],
      responses,
      self.buckets,
      chosen=np.any(advantage != 0, 1) if skips else None,
    )
    sequences = Sequences(
      advantage=advantage,
      length=np.array([len(r) for r in responses], np.int32),
      prompt_length=np.array([len(batch.prompts[i]) for i in share], np.int32),
      temperature=batch.temperature[share],
    )
    return self.place(packed), jax.device_put(sequences, axes.sharding(self.mesh))

  def place(self, packed: Sequence[packing.Packed]) -> tuple[packing.Packed, ...]:
    """Moves packed micro-batches to the devices, rows over `data`."""
    return packing.place(packed, self.mesh)

  @functools.cached_property
  def logprobs(self):
    """(params, packed buckets, temperature f32[B]) -> f32[M R L] per bucket."""

    def run(params, packed, temperature):
      rotations = self._rotations()

      def one(bucket):
        def body(i, out):
          batch = bucket.micro_batch(i)
          return out.at[i].set(self._score(params, batch, temperature, rotations)[0])

        return jax.lax.fori_loop(
          0, bucket.count, body, jnp.zeros(bucket.tokens.shape, jnp.float32)
        )

      return tuple(one(bucket) for bucket in packed)

    return jax.jit(run)

  @functools.cached_property
  def update(self):
    """One optimizer step on a whole batch.

    (state, packed buckets, sequences, old_logp, reference_logp) -> (state,
    metrics); the log-probabilities are what `logprobs` returned, or None for
    "as sampled by this very policy". The state is donated.
    """
    return jax.jit(
      self._update,
      donate_argnums=0,
      out_shardings=(
        jax.tree.map(lambda x: x.sharding, self.abstract_state()),
        None,
      ),
    )

  def _rotations(self) -> layers.Rotation:
    """Of all positions, for the loops over micro-batches."""
    return layers.rotation(self.config, jnp.arange(self.buckets[-1].length))

  def _score(self, params, batch: packing.Packed, temperature, rotations):
    """Log-probability of the targets and entropy, f32[R L] each."""
    model = target.Target(self.config, remat=self.remat)
    rows = functools.partial(
      jax.lax.with_sharding_constraint, shardings=axes.sharding(self.mesh, axes.DATA)
    )
    features, _, _ = model.apply(
      {"params": params},
      rows(batch.tokens),
      batch.positions,
      taps=(),
      mask=packing.segment_mask(batch.segments, batch.positions),
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

    chunks = [
      head(*(x[:, i : i + _LOGIT_CHUNK] for x in (features, batch.targets, temperature)))
      for i in range(0, features.shape[1], _LOGIT_CHUNK)
    ]
    return tuple(jnp.concatenate(x, 1) for x in zip(*chunks, strict=True))

  def _update(self, state, packed, sequences, old_logp=None, reference_logp=None):
    total_tokens = jnp.sum(sequences.length).astype(jnp.float32)
    packed_tokens = sum(jnp.sum(bucket.mask) for bucket in packed).astype(jnp.float32)
    packed_tokens = jnp.maximum(packed_tokens, 1.0)
    rotations = self._rotations()

    def advantage(batch):
      b, index = batch.sequence_idx, batch.positions
      index = index + 1 - sequences.prompt_length[b]  # of the target in its response
      return sequences.advantage[b, jnp.clip(index, 0, sequences.advantage.shape[1] - 1)]

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
        advantage=advantage(batch),
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

    trained = self.trained(state.params)
    grad = jax.grad(loss, has_aux=True)
    pick = lambda x, b, i: None if x is None else x[b][i]
    total = None
    for b, bucket in enumerate(packed):
      share = lambda i, b=b, bucket=bucket: grad(
        trained,
        bucket.micro_batch(i),
        pick(old_logp, b, i),
        pick(reference_logp, b, i),
      )
      total = accumulate.sum_over(bucket.count, share, total)
    grads, metrics = total
    updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
    metrics["policy/grad_norm"] = optax.tree.norm(grads)
    params = _merge(state.params, optax.apply_updates(trained, updates))
    return State(params, opt_state, state.step + 1), metrics


def _merge(params, part):
  """`params` with what is in `part` in its place."""
  flat = lambda tree: traverse_util.flatten_dict(tree, sep="/")
  return traverse_util.unflatten_dict(flat(params) | flat(part), sep="/")


def make(
  config: config_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[int, int]],
  updates: int = 1,
  remat: bool = True,
  only: str = "",
) -> Learner:
  """A learner for one model, algorithm, optimizer and mesh.

  Args:
    buckets: (rows, length) of micro-batches, by increasing length; rows are split
      over the slices, and rounded up so that they can be
    updates: optimizer updates per batch
    remat: recompute layers in the backward pass
    only: regular expression; parameters whose path ("layer_0/mlp/up_proj") has no
      match stay as they are, and have no gradient and no moments
  """
  buckets = packing.over_slices(buckets, mesh.shape[axes.DATA])
  return Learner(config, algorithm, optimizer, mesh, buckets, updates, remat, only)

