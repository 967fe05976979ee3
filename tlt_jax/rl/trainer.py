"""What training the policy and a critic have in common.

An update is one jitted program: for each bucket a loop over its micro-batches, whose number
is read at run time, then one optimizer step. Parameters are split by `axes.TRAIN` (FSDP
over `data`, see `fsdp`, and tensor parallel over `model`), rows over `data`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
from typing import ClassVar

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
from tlt_jax import processes
from tlt_jax import programs
from tlt_jax import progress
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import stacked
from tlt_jax.models import target
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.pallas_kernels import varying
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import fsdp

_HOST = "pinned_host"  # JAX's name of the host memory that devices copy from


@flax.struct.dataclass
class State:
  params: dict  # f32, laid out by axes.TRAIN
  opt_state: optax.OptState
  step: jax.Array  # i32[]  optimizer updates done


@flax.struct.dataclass
class Totals:
  tokens: jax.Array  # f32[]
  packed_tokens: jax.Array  # f32[]
  sequences: jax.Array  # f32[]
  max_tokens: jax.Array  # f32[]
  with_prompts: jax.Array | None  # f32[]  packed tokens, prompts' too; None: no experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
  """Trains a decoder on packed rows; subclasses define what it computes per token."""

  name: ClassVar[str]  # prefix of its metrics

  config: config_lib.ModelConfig
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  buckets: tuple[packing.Bucket, ...]
  updates: int
  remat: bool | None  # None in plans: not chosen yet
  only: str
  offloads: bool = False
  kernels: str | None = None  # of attention, see `implementations`
  pool: programs.Pool = dataclasses.field(default_factory=programs.Pool)

  def abstract_params(self) -> dict:
    return target.abstract_params(self.config)

  def per_token(self, params, packed: packing.Packed, temperature, rotations):
    """`score` of this slice's rows of a micro-batch: f32[rows T]; `params` of `stack`."""
    raise NotImplementedError

  def share(self, params, packed, sequences, totals: Totals, rotations):
    """This slice's share, of a micro-batch's rows, in the loss and the metrics."""
    raise NotImplementedError

  def abstract_state(self) -> State:
    params = axes.with_shardings(self.mesh, axes.TRAIN, self.abstract_params())
    opt_state = axes.abstract_opt_state(self.optimizer, self.mesh, self.trained(params))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=axes.sharding(self.mesh))
    return State(params, opt_state, step)

  def init(self, params: dict) -> State:
    """The state before the first update; takes over `params`, of any layout."""
    abstract = self.abstract_state()
    what = f"the {self.name}'s moments"
    memory.announce(what, abstract.opt_state, "learner.only, policy")
    params = jax.tree.map(
      lambda x, like: processes.place(jnp.asarray(x, like.dtype), like.sharding),
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

  def trains(self, path: str) -> bool:
    return re.search(self.only, path) is not None

  def trained(self, params: dict) -> dict:
    flat = traverse_util.flatten_dict(params, sep="/")
    chosen = {path: x for path, x in flat.items() if self.trains(path)}
    if not chosen:
      raise ValueError(f"only={self.only!r} matches no parameter; there is {min(flat)}")
    return traverse_util.unflatten_dict(chosen, sep="/")

  def offload(self, tree):
    """Moves arrays to the host's memory, if `offloads`."""
    if not self.offloads:
      return tree
    over = jax.tree.map(lambda x: x.sharding.with_memory_kind(_HOST), tree)
    return jax.block_until_ready(jax.device_put(tree, over))

  def _onload(self, tree):
    if not self.offloads:
      return tree
    return jax.device_put(tree, jax.tree.map(self._on_devices, tree))

  def _on_devices(self, x) -> jax.sharding.Sharding:
    own = self.mesh.devices.flat[0].default_memory().kind
    return x.sharding.with_memory_kind(own)

  def run(self, name: str, jitted: Callable, count: int, *args):
    """Runs a program on `count` sequences, compiled on the first call for each count."""
    return self._program(name, jitted, count, *args)(*args)

  def _program(self, name: str, jitted: Callable, count: int, *args) -> Callable:
    if (name, count) not in self.pool:
      memory.announce_programs(f"the {self.name}'s {name}", inputs=self.abstract_state())
    return self.pool.get(name, (count,), jitted, *args)

  def compile_score(self, count: int) -> None:
    """Compiles what `score_responses` runs on so many responses."""
    packed, known = batch_lib.abstract(self.mesh, self.buckets, count)
    params = self._shapes().params
    self._program("score", self.score, count, params, packed, known.temperature)

  def compile_update(self, sequences: batch_lib.Sequences) -> None:
    """Compiles what `train_on` runs on a batch of the shapes of these `sequences`."""
    count = len(sequences.length) // self.updates
    packed, known = batch_lib.abstract(self.mesh, self.buckets, count)
    whole = known.length.sharding
    known = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[:count], x), sequences)
    known = jax.tree.map(lambda x: x.update(sharding=whole), known)
    self._program("update", self.update, count, self._shapes(), packed, known)

  def _shapes(self) -> State:
    """The state's, on the devices, where it is trained."""
    state = self.abstract_state()
    if not self.offloads:
      return state
    return jax.tree.map(lambda x: x.update(sharding=self._on_devices(x)), state)

  def score_responses(
    self, params: dict, batch: batch_lib.Batch, chosen: np.ndarray | None = None
  ) -> np.ndarray:
    """`score` of each response token, f32[P R T]; zero if not `chosen` bool[B]."""
    params = self._onload(params)
    every = np.arange(len(batch.responses))
    packed = batch_lib.pack(batch, every, self.buckets, chosen)
    placed = packing.place(packed, self.mesh)
    temperature = processes.place(batch.temperature, axes.sharding(self.mesh))
    with progress.shown(f"log-probabilities of the {self.name}"):
      scores = self.run("score", self.score, len(every), params, placed, temperature)
      scores = processes.fetch(scores)
    return batch_lib.by_response(batch, packed, scores)

  def train_on(
    self,
    state: State,
    batch: batch_lib.Batch,
    sequences: batch_lib.Sequences,
    chosen: np.ndarray,
  ) -> tuple[State, dict[str, float]]:
    """Takes `updates` optimizer steps, each on its share of the responses.

    The state is donated; it may be offloaded. `chosen` bool[B] may have a gradient.
    Returns the new state, on the devices, and metrics as means over the updates.
    """
    state, every = self._onload(state), []
    with progress.shown(f"updating the {self.name}"):
      for share in np.split(np.arange(len(batch.responses)), self.updates):
        packed = batch_lib.pack(batch, share, self.buckets, chosen[share])
        known = jax.tree.map(lambda x, share=share: x[share], sequences)
        args = packing.place(packed, self.mesh), batch_lib.place(known, self.mesh)
        state, metrics = self.run("update", self.update, len(share), state, *args)
        every.append(metrics)
      every = jax.device_get(every)
    return state, {k: float(np.mean([m[k] for m in every])) for k in every[0]}

  @functools.cached_property
  def score(self) -> Callable[..., tuple[jax.Array, ...]]:
    """Jitted: params, a `Packed` per bucket, temperature f32[B] -> f32[M rows T] each."""

    def of_slice(params, packed, temperature):
      rotations = self._rotations()
      params = stacked.stack(params, self._runs)

      def score(bucket):
        def score_one(i, out):
          micro_batch = bucket.micro_batch(i)
          values = self.per_token(params, micro_batch, temperature, rotations)
          return out.at[i].set(values)

        zeros = jnp.zeros(bucket.tokens.shape, jnp.float32)
        zeros = varying.like(zeros, bucket.tokens)
        return jax.lax.fori_loop(0, bucket.count, score_one, zeros)

      return tuple(score(bucket) for bucket in packed)

    def run(params, packed, temperature):
      in_specs = self._specs, _specs_of(packed), fsdp.WHOLE
      mapped = fsdp.on_slices(self.mesh, of_slice, in_specs, fsdp.MICRO_BATCHES)
      return mapped(params, packed, temperature)

    return jax.jit(run)

  @functools.cached_property
  def update(self) -> Callable[..., tuple[State, dict]]:
    """Jitted: state (donated), a `Packed` per bucket, sequences -> state, metrics."""
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
    return jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))

  def _update(self, state, packed, sequences):
    trained = self.trained(state.params)
    in_specs = self._specs, _specs_of(packed), fsdp.WHOLE, fsdp.WHOLE
    out_specs = self.trained(self._specs), fsdp.WHOLE
    gradient = fsdp.on_slices(self.mesh, self._gradient, in_specs, out_specs)
    totals = _totals(packed, sequences, with_prompts=self.config.experts is not None)
    grads, metrics = gradient(state.params, packed, sequences, totals)
    updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
    metrics[f"{self.name}/grad_norm"] = optax.tree.norm(grads)
    params = _merge(state.params, optax.apply_updates(trained, updates))
    return State(params, opt_state, state.step + 1), metrics

  def _loss(self, params, sequences, totals: Totals) -> tuple[dict, dict, Callable]:
    """Stacked: the parameters that are trained and all; the loss by the former."""
    rotations = self._rotations()
    trained = stacked.stack(self.trained(params), self._runs)
    params = stacked.stack(params, self._runs)

    def loss(trained, micro_batch):
      of_all = _merge(params, trained)
      share, metrics = self.share(of_all, micro_batch, sequences, totals, rotations)
      metrics = {f"{self.name}/loss": share, **metrics}
      return share, jax.tree.map(lambda x: varying.like(x, micro_batch.tokens), metrics)

    return trained, params, loss

  def _gradient(self, params, packed, sequences, totals: Totals) -> tuple[dict, dict]:
    trained, _, loss = self._loss(params, sequences, totals)
    gradient_of = jax.grad(loss, has_aux=True)

    def gradient(bucket: packing.Packed, i: jax.Array):
      return gradient_of(trained, bucket.micro_batch(i))

    total = None
    for bucket in packed:
      of_bucket = functools.partial(gradient, bucket)
      total = accumulate.sum_over(bucket.count, of_bucket, total)
    grads, metrics = total
    return stacked.unstack(grads, self._runs), jax.lax.psum(metrics, axes.DATA)

  def update_bytes(self, remat: bool) -> int:
    """Memory of an update on each device, without its arguments: an estimate.

    For the largest bucket: what the forward pass keeps; one layer's of it once more, on
    which the backward pass works; the stacked layers; the gradients of a micro-batch, of
    gathered parameters outside of layers, and of those before. Compilers for an H200 need
    1% to 16% less for SmolLM2-135M and Qwen2.5-0.5B with 8K or 32K tokens.
    """
    params = self.abstract_state().params
    trained = self.trained(params)
    outside = stacked.outside(params)
    layers = [name for name in params if name not in outside]
    first = min((layers.index(name) for name in trained if name in layers), default=0)
    kept = self._kept_by_remat
    working = (kept[False] - kept[True]) // (len(layers) - first)
    # A device has its part of each array, if the rows are split over those of a slice.
    slices, devices = self.mesh.shape[axes.DATA], self.mesh.shape[axes.MODEL]
    longest = max(bucket.length for bucket in self.buckets)
    parts = devices if stacked.splits(longest, devices) else 1
    return (
      kept[remat] // parts
      + working
      + _most_bytes({name: params[name] for name in layers})
      + 2 * _most_bytes(trained)
      + (slices - 1) * _most_bytes(stacked.outside(trained))
    )

  @functools.cached_property
  def _kept_by_remat(self) -> dict[bool, int]:
    """`_kept_bytes` without and with recomputation."""
    return {x: dataclasses.replace(self, remat=x)._kept_bytes() for x in (False, True)}

  def _kept_bytes(self) -> int:
    """What a forward pass of the largest bucket keeps, of all devices of a slice."""
    bucket = max(self.buckets, key=lambda b: b.rows * b.length)
    packed, sequences = batch_lib.abstract(self.mesh, [bucket], bucket.rows)
    sizes = []

    def trace(params, packed, sequences):
      totals = Totals(*[jnp.float32(1)] * len(dataclasses.fields(Totals)))
      trained, params, loss = self._loss(params, sequences, totals)
      _, backward, _ = jax.vjp(loss, trained, packed[0].micro_batch(0), has_aux=True)
      given = set(map(id, jax.tree.leaves((trained, params))))
      made = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in given}
      sizes.append(sum(x.size * x.dtype.itemsize for x in made.values()))
      return ()

    in_specs = self._specs, _specs_of(packed), fsdp.WHOLE
    mapped = fsdp.on_slices(self.mesh, trace, in_specs, ())
    jax.eval_shape(mapped, self.abstract_state().params, packed, sequences)
    return sizes[0]

  @functools.cached_property
  def _specs(self) -> dict:
    return fsdp.specs(self._shardings)

  @functools.cached_property
  def _shardings(self) -> dict:
    return axes.shardings(self.mesh, axes.TRAIN, self.abstract_params())

  @functools.cached_property
  def _runs(self) -> list[stacked.Run]:
    return stacked.runs(self.trained(self._specs), self.config)

  def features(self, params, packed: packing.Packed, rotations, watch=None):
    """Parameters outside of layers; and of `stacked.features`."""
    dtype = self.config.dtype
    shardings = self._shardings
    outside = fsdp.gather(stacked.outside(params), shardings, dtype)

    def gather(params):
      return fsdp.gather(params, shardings["layer_0"], dtype)

    features, watched = stacked.features(
      self.config,
      params | outside,
      self._runs,
      packed.tokens,
      packed_attention.Segments(packed.segments, kernels=self.kernels),
      rotations.at(packed.positions),
      gather=gather,
      remat=self.remat,
      watch=watch,
    )
    return outside, features, watched

  def _rotations(self) -> layers.Rotation:
    return layers.rotation(self.config, jnp.arange(self.buckets[-1].length))


def _most_bytes(arrays) -> int:
  return max(memory.bytes_by_device(arrays).values(), default=0)


def _totals(
  packed: Sequence[packing.Packed], sequences: batch_lib.Sequences, with_prompts: bool
) -> Totals:
  """Totals of a whole batch, and how many of its response tokens are packed."""
  length, limit = sequences.length, sequences.max_tokens
  counts = jnp.ones(length.shape, bool) if sequences.counts is None else sequences.counts

  def total(x):
    return jnp.sum(x * counts).astype(jnp.float32)

  least = 0.0 if sequences.counts is None else 1.0  # a filter may leave none
  seen = sum(jnp.sum(bucket.mask) for bucket in packed).astype(jnp.float32)
  every = with_prompts and sum(jnp.sum(bucket.segments > 0) for bucket in packed)
  return Totals(
    tokens=jnp.maximum(total(length), least),
    packed_tokens=jnp.maximum(seen, 1.0),
    sequences=jnp.maximum(total(jnp.ones_like(length)), least),
    max_tokens=jnp.maximum(total(length if limit is None else limit), least),
    with_prompts=jnp.maximum(every, 1).astype(jnp.float32) if with_prompts else None,
  )


def _merge(params: dict, part: dict) -> dict:
  flat = traverse_util.flatten_dict(params) | traverse_util.flatten_dict(part)
  return traverse_util.unflatten_dict(flat)


def _specs_of(packed: Sequence[packing.Packed]):
  return jax.tree.map(lambda x: fsdp.MICRO_BATCHES if x.ndim else fsdp.WHOLE, tuple(packed))
