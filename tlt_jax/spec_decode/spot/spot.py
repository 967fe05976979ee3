"""Spot training: a slice that has nothing left to decode trains the drafter.

A fused chunk is one program: each slice decodes; one that runs dry goes on with
micro-batches of its own finished sequences, from that moment to the chunk's expected
end. Once there are enough of them (`Options.per_update`) gradients are summed over the
slices, and one guarded update follows, the same everywhere. The new drafter drafts from
the next chunk on, or, where it must pass on held-out data (`Options.shadow`), from the
next rollout on. It cannot change a token: what is drawn does not depend on the drafter
(TLT, https://arxiv.org/abs/2511.16665, trains in a process group of its own, on weights
that are copied back and forth).

The parts, in order: the drafter's training state and its update; the rows of training
data on the devices; the programs; and `Spot`, which is all of it for one run.
"""

from collections.abc import Callable
import dataclasses
import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import axes
from tlt_jax import packing
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import pages as features_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.spot import buffer as buffer_lib
from tlt_jax.spec_decode.spot import loss as draft_loss


@flax.struct.dataclass
class State:
  """A drafter in training, the same on every slice."""

  params: dict  # f32, laid out by axes.ROLLOUT
  opt_state: optax.OptState
  step: jax.Array  # i32[]  updates done
  skipped: jax.Array  # i32[]  updates left out: their gradient was not finite


def abstract_state(
  drafter: drafter_lib.DrafterConfig, optimizer: optax.GradientTransformation, mesh
) -> State:
  """Shapes, dtypes and shardings of the state."""
  abstract = drafter_lib.abstract_params(drafter)
  shardings = axes.shardings(mesh, axes.ROLLOUT, abstract)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  params = jax.tree.map(place, nn.meta.unbox(abstract), shardings)
  replicated = axes.sharding(mesh)
  opt_state = axes.like_params(
    jax.eval_shape(optimizer.init, params), shardings, replicated
  )
  count = place(jnp.zeros((), jnp.int32), replicated)
  return State(params, opt_state, count, count)


def init_state(
  drafter: drafter_lib.DrafterConfig,
  optimizer: optax.GradientTransformation,
  mesh,
  params,
) -> State:
  """The state before the first update, from parameters of any layout."""
  abstract = abstract_state(drafter, optimizer, mesh)
  # A copy: the state is donated, the drafter at hand may still be drafting.
  put = lambda x, like: jax.device_put(jnp.array(x, like.dtype), like.sharding)
  params = jax.tree.map(put, params, abstract.params)
  shardings = jax.tree.map(lambda x: x.sharding, abstract.opt_state)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  zero = functools.partial(put, jnp.int32(0), abstract.step)
  return State(params, opt_state, zero(), zero())


def update(optimizer: optax.GradientTransformation, state: State, value, metrics, grads):
  """One optimizer step by sums over tokens, as `draft_loss.loss` gives them.

  Without a token nothing happens, nor where a sum is not finite (counted): a gradient
  of zeros would move the parameters by their moments.

  Returns:
    the new state; loss, grad_norm and what else is in `metrics`, means over tokens; and
    `updated`, 1.0 or 0.0
  """
  count = jnp.maximum(metrics["tokens"], 1.0)
  mean = lambda tree: jax.tree.map(lambda x: x / count, tree)
  grads, means = mean(grads), mean({k: v for k, v in metrics.items() if k != "tokens"})
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(value) & jnp.isfinite(norm)
  useful = finite & (metrics["tokens"] > 0)

  def step(state):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

  def skip(state):
    return state.replace(skipped=state.skipped + (~finite).astype(jnp.int32))

  state = jax.lax.cond(useful, step, skip, state)
  told = {"loss": value / count, "grad_norm": norm, "updated": useful.astype(jnp.float32)}
  return state, {**means, **told}


@flax.struct.dataclass
class Rows:
  """The training data of all slices, M rows each: what never leaves the devices."""

  features: jax.Array  # f[M L E]  what the rollout kept of the target
  table: jax.Array  # i32[M 4 L]  `buffer.FIELDS`
  order: jax.Array  # i32[slices (1+M)]  how many are trained on, and these in order

  @property
  def filled(self) -> jax.Array:
    """i32[]  rows of this slice that are trained on."""
    return self.order[0]

  def micro_batch(self, i) -> tuple[packing.Packed, jax.Array]:
    """A slice's i-th row in their order, as `row` gives it."""
    return self.row(self.order[1 + i % jnp.maximum(self.filled, 1)])

  def row(self, row) -> tuple[packing.Packed, jax.Array]:
    """A row of the slice, [1 L], and its features."""
    targets, positions, segments, mask = self.table[row][:, None]
    packed = packing.Packed(
      tokens=targets,  # nobody reads it: the features stand for it
      targets=targets,
      positions=positions,
      segments=segments,
      sequence_idx=segments,
      mask=mask > 0,
      count=jnp.int32(1),
    )
    return packed, self.features[row][None]


@flax.struct.dataclass
class Pending:
  """What slices have trained on since the last update, and not exchanged yet."""

  micro_batches: jax.Array  # i32[slices]
  total: tuple  # sums of value, metrics and gradients, f32[slices ...] each


@flax.struct.dataclass
class Trained:
  """What a fused chunk trained."""

  micro_batches: jax.Array  # i32[slices]
  exchanged: jax.Array  # bool[]  whether gradients were summed over the slices
  metrics: dict  # of the update, f32[] each; zeros if there was none


@dataclasses.dataclass(frozen=True)
class Options:
  """How much is trained on, and when."""

  length: int = 128  # tokens of a row of training data, which is a micro-batch
  context: int = 32  # of them that a piece of a longer sequence repeats, untrained
  rows: int = 128  # per slice
  carried: int = 64  # of them that stay for the next rollout
  shadow: int = 0  # of them that are never trained on. If there are any, what was
  # trained in a rollout drafts from then on if it is no worse on them than what drafts.
  slots: int = 0  # of the widest bucket in which slices train; 0: in every one
  chunk: int = 128  # tokens per slot of the chunks that train, at most
  least: int = 6  # micro-batches that such a chunk should have time for
  per_update: int = 1  # micro-batches of all slices, at least, that make an update
  share: float = 0.05  # of a rollout's time that follows, with one slice only: it is
  # never idle. With more they train when they are.
  cold_s: float = 0.0  # seconds that all slices train after the first rollouts, for a
  cold_rollouts: int = 1  # new drafter, and after how many of them

  def __post_init__(self):
    if self.rows < 1 or not 0 <= self.carried <= self.rows:
      raise ValueError(
        f"a buffer has at least 1 row and carries 0 to all of them, not {self.rows} "
        f"and {self.carried}"
      )
    if not 0 <= self.shadow < self.rows:
      raise ValueError(f"not all of {self.rows} rows can be held out ({self.shadow})")
    if not 1 <= self.context <= self.length // 2:
      raise ValueError(
        f"context is at least 1 and at most half of length, not {self.context} of "
        f"{self.length}"
      )
    if self.per_update < 1:
      raise ValueError(f"an update takes at least 1 micro-batch, not {self.per_update}")
    if min(self.share, self.cold_s, self.cold_rollouts) < 0:
      raise ValueError(f"share, cold_s and cold_rollouts are not negative, got {self}")


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The device side: what a micro-batch and an update are."""

  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  mesh: jax.sharding.Mesh
  loss: draft_loss.Loss
  optimizer: optax.GradientTransformation
  length: int  # L of the rows
  longest: int  # tokens of the longest sequence
  shadow: int = 0  # rows that are not trained on, but judged by
  per_update: int = 1  # micro-batches of all slices, at least, that make an update

  @property
  def keep(self) -> decode.Keep:
    return speculate.keep(self.drafter, train=True)

  def _rotations(self) -> layers.Rotation:
    """Of all positions, for the loops over micro-batches."""
    return layers.rotation(self.drafter.layer, jnp.arange(self.longest))

  def _loss(self, params, target_params, rotations, packed, kept):
    """Its sum over a micro-batch, and sums of metrics."""
    E = self.drafter.feature_width
    states = kept[..., :E]
    features = kept[..., E:] if self.drafter.taps else states
    args = (params, target_params, packed, features, states, rotations)
    return draft_loss.loss(self.loss, self.drafter, self.config, *args)

  @functools.cached_property
  def _value_and_grad(self) -> Callable:
    """Of `_loss`. Jitted, so that it is traced once for all the programs that train."""
    return jax.jit(jax.value_and_grad(self._loss, has_aux=True))

  def accumulate(self, target_params, params, rows: Rows, most, total):
    """Adds `most` micro-batches of this slice to sums of value, metrics and gradients."""
    args = (_apart(params), target_params, self._rotations())
    one = lambda i: self._value_and_grad(*args, *rows.micro_batch(i))
    return _sum(one, most, total)

  def train(self, target_params, state, pending, rows: Rows, most, mine, per_update):
    """Trains on `mine` micro-batches of this slice, sums, and updates.

    Args:
      most: i32[], the same on every slice; 0 leaves out the counting as well
      mine: i32[], this slice's, at most `most`
      per_update: see `Options`
    Returns:
      State, Pending, Trained
    """
    slices = self.mesh.shape[axes.DATA]
    here = jnp.arange(slices) == jax.lax.axis_index(axes.DATA)

    def exchange(state, total):
      (value, metrics), grads = jax.lax.psum(total, axes.DATA)
      state, metrics = update(self.optimizer, state, value, metrics, grads)
      return state, jax.tree.map(decode.varying, _zeros(total)), metrics

    def run(state, pending):
      total = jax.tree.map(lambda x: x[0], pending.total)
      total = self.accumulate(target_params, state.params, rows, mine, total)
      # The counts are exchanged after the training, never before: a slice that waited
      # for them would not train until all others have decoded.
      counts = jnp.stack([mine, pending.micro_batches[0] + mine])
      counts = _after(jnp.where(here, counts[:, None], 0), total[0][1]["tokens"])
      now, since = jax.lax.psum(counts, axes.DATA)
      enough = jnp.sum(since) >= per_update
      args = (enough, exchange, _skip(exchange), state, total)
      state, total, metrics = jax.lax.cond(*args)
      left = jnp.where(enough, 0, jnp.sum(jnp.where(here, since, 0)))
      pending = Pending(left[None], jax.tree.map(lambda x: x[None], total))
      return state, pending, Trained(now, enough, metrics)

    return jax.lax.cond(most > 0, run, _skip(run), state, pending)

  def fuse(self, chunk: Callable, num_args: int, replicated, carried: tuple):
    """A chunk's program in which slices that run dry train.

    (target params, draft params, State, Pending, Rows, most i32[], expected i32[], ...)
    -> (State, Pending, Trained, ...); what follows are the chunk's own arguments and
    results.

    The state is not donated, so that it survives a program that runs out of memory.

    Args:
      chunk: (target params, draft params, ...) -> ..., Emitted, run on each slice
      num_args: of it, without the parameters
      replicated: which of these are whole
      carried: shardings of its results but the last; the arguments that become them,
        the first ones, are donated
    """

    def local(target_params, draft_params, state, pending, rows, most, expected, *args):
      *rest, emitted = chunk(target_params, draft_params, *args)
      idle = ~jnp.any(emitted.remaining > 0) & (rows.filled > 0)
      left = jnp.maximum(expected - emitted.steps[0], 0)
      share = (2 * most * left + expected) // jnp.maximum(2 * expected, 1)  # rounded
      mine = jnp.where(idle, jnp.minimum(share, most), 0)
      args = (state, pending, rows, most, mine, self.per_update)
      state, pending, trained = self.train(target_params, *args)
      # What was emitted is gathered after the gradients are summed, on every slice: two
      # exchanges without an order can wait for each other, where threads are few (XLA's
      # CPU devices).
      emitted = jax.tree.map(lambda x: _after(x, state.step), emitted)
      return state, pending, trained, *rest, emitted

    whole = (0, 1, 2, 5, 6, *(i + 7 for i in replicated))
    out = (True, False, True, *(False for _ in carried), False)
    return jax.jit(
      decode.per_slice(self.mesh, local, 7 + num_args, whole, out),
      donate_argnums=tuple(range(7, 7 + len(carried))),
      out_shardings=(
        self.state_shardings,
        self.pending_shardings,
        axes.sharding(self.mesh),
        *carried,
        axes.sharding(self.mesh),
      ),
    )

  def make_train(self):
    """(target params, State, Pending, Rows, most i32[]) -> (State, Pending, Trained).

    All slices train, and an update follows.
    """

    def local(target_params, state, pending, rows, most):
      mine = jnp.where(rows.filled > 0, most, 0)
      return self.train(target_params, state, pending, rows, most, mine, per_update=1)

    mapped = decode.per_slice(self.mesh, local, 5, (0, 1, 4), (True, False, True))
    shardings = (self.state_shardings, self.pending_shardings, axes.sharding(self.mesh))
    return jax.jit(mapped, out_shardings=shardings)

  def init_pending(self) -> Pending:
    """Nothing, on every slice."""
    slices = self.mesh.shape[axes.DATA]
    grads = abstract_state(self.drafter, self.optimizer, self.mesh).params
    metrics = dict.fromkeys(self.loss.metrics, scalar := jnp.zeros((), jnp.float32))
    zeros = lambda x, s: jnp.zeros((slices, *x.shape), x.dtype, device=s)
    shapes = Pending(jnp.zeros((), jnp.int32), ((scalar, metrics), grads))
    return jax.tree.map(zeros, shapes, self.pending_shardings)

  def make_judge(self):
    """(target params, draft params, others, Rows) -> (the better ones, bool[]).

    By the loss on the rows that are not trained on; the others must be no worse.
    """

    def local(target_params, params, others, rows):
      args = (target_params, self._rotations())
      value = lambda params, i: self._loss(params, *args, *rows.row(i))[0]
      both = lambda i: jnp.stack([value(params, i), value(others, i)])
      zeros = decode.varying(jnp.zeros(2, jnp.float32))
      old, new = jax.lax.psum(_sum(both, self.shadow, zeros), axes.DATA)
      better = jnp.isfinite(new) & ~(new > old)
      return jax.tree.map(lambda a, b: jnp.where(better, b, a), params, others), better

    shardings = (self.state_shardings.params, axes.sharding(self.mesh))
    mapped = decode.per_slice(self.mesh, local, 4, (0, 1, 2), (True, True))
    return jax.jit(mapped, out_shardings=shardings)

  def make_store(self):
    """(buffer f[M L E], features f[N E], i32[p 4+P], count i32[slices]) -> buffer.

    Copies pieces of sequences into the buffer (donated): where as in `buffer.Piece`, and
    the pages of the sequence's features (`features.Pages`); the first `count` of p.
    """

    def local(kept, data, pieces, count):
      at = jnp.arange(kept.shape[1])

      def put(i, kept):
        row, offset, start, size = pieces[i, :4]
        of = features_lib.Features(data, pieces[i, None, 4:])
        new = of.read((at - offset + start)[None])[0]
        inside = (at >= offset) & (at < offset + size)
        return kept.at[row].set(jnp.where(inside[:, None], new, kept[row]))

      return jax.lax.fori_loop(0, count[0], put, kept)

    over = axes.sharding(self.mesh, axes.DATA)
    mapped = decode.per_slice(self.mesh, local, 4)
    return jax.jit(mapped, donate_argnums=0, out_shardings=over)

  @property
  def state_shardings(self) -> State:
    abstract = abstract_state(self.drafter, self.optimizer, self.mesh)
    return jax.tree.map(lambda x: x.sharding, abstract)

  @property
  def pending_shardings(self) -> Pending:
    over = axes.sharding(self.mesh, axes.DATA)
    grads = jax.tree.map(
      lambda s: axes.sharding(self.mesh, axes.DATA, *s.spec), self.state_shardings.params
    )
    return Pending(over, ((over, dict.fromkeys(self.loss.metrics, over)), grads))


def _apart(params):
  """Parameters as values that may differ between slices.

  A gradient with respect to replicated ones is summed over the slices where it is made,
  inside the loop; slices with other trip counts would never arrive there.
  """
  return jax.tree.map(decode.varying, params)


def _skip(step: Callable) -> Callable:
  """(a, b) -> these, and zeros for the third that `step` gives."""
  return lambda a, b: (a, b, _zeros(jax.eval_shape(step, a, b)[2]))


def _after(x: jax.Array, count: jax.Array) -> jax.Array:
  """x, once a count, which is never negative, is known."""
  return x + jnp.minimum(count, 0).astype(x.dtype)


def _sum(one: Callable, count, start):
  """`start`, a tree that varies between slices, plus `one(i)` for all i < count."""
  add = lambda i, total: jax.tree.map(jnp.add, total, one(i))
  return jax.lax.fori_loop(0, count, add, start)


def _zeros(shapes):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make_programs(trainer: Trainer, width: int, strategies, room, verification) -> dict:
  """Every jitted function of spot training, by name.

  "train_X" is the chunk "X" of `decode` or `speculate`, fused; for the arguments see
  `speculate.make_programs`.
  """
  t, kept = trainer, trainer.keep
  slots = decode.slots_shardings(t.mesh, t.config, kept)
  plain = decode.chunk(t.config, width, kept)
  without = lambda params, draft_params, *args: plain(params, *args)
  programs = {
    "train": t.make_train(),
    "judge": t.make_judge(),
    "store": t.make_store(),
    "train_chunk": t.fuse(without, 3, replicated=(1,), carried=(slots,)),
  }
  for s in strategies:
    args = (t.config, t.drafter, width, s, room, kept, verification)
    state = speculate.chunk_state_shardings(t.mesh, t.drafter, s)
    programs["train_" + speculate.name(s, verification)] = t.fuse(
      speculate.chunk(*args), 6, replicated=(2, 3, 4), carried=(slots, state)
    )
  return programs


class Spot:
  """The drafter's training through a run: its state, its data, what it took."""

  def __init__(self, trainer: Trainer, options: Options, params):
    """Starts from the drafter's `params`."""
    self.trainer, self.options = trainer, options
    t, slices = trainer, trainer.mesh.shape[axes.DATA]
    self.state = init_state(t.drafter, t.optimizer, t.mesh, params)
    self.published = self.state.params if t.shadow else None
    args = (options.rows, t.length, options.carried, options.context, t.shadow)
    self.buffer = buffer_lib.Buffer(slices, *args)
    shape = (slices * options.rows, t.length, t.keep.width)
    over = axes.sharding(t.mesh, axes.DATA)
    self.pending = t.init_pending()
    self.features = jnp.zeros(shape, t.config.dtype, device=over)
    self.micro_batch_s = 0.0  # seconds of a micro-batch, measured alone; 0: not yet
    self._slower = 1.0  # what chunks say of that, see `adapt`
    self.rollouts = 0  # that it was trained in
    self._table = self._order = None  # of the buffer, on the devices

  @property
  def params(self):
    """What drafts."""
    return self.published if self.trainer.shadow else self.state.params

  def arrays(self) -> dict:
    """What a run goes on from: the drafter's own state, and the training data at hand.

    Neither the target's embedding nor its head, which the drafter uses.
    """
    published = {"published": self.published} if self.trainer.shadow else {}
    rows = {"features": self.features, "table": self.rows().table}
    return {"state": self.state, **published, **rows}

  def data(self) -> dict:
    """The rest of it, which JSON can hold."""
    known = {"micro_batch_s": self.micro_batch_s, "rollouts": self.rollouts}
    return {"buffer": self.buffer.state(), **known}

  def restore(self, arrays: dict, data: dict) -> None:
    """Goes on from what `arrays` and `data` gave."""
    table = np.asarray(arrays["table"]).reshape(self.buffer.table.shape)
    self.buffer.set_state(data["buffer"], table)
    self.state, self.features = arrays["state"], arrays["features"]
    self.published = arrays.get("published")
    self.micro_batch_s, self.rollouts = data["micro_batch_s"], data["rollouts"]
    self._table = self._order = None

  def _place(self, x: np.ndarray) -> jax.Array:
    # A copy: on a CPU an array may share its memory with numpy's, which goes on changing.
    return decode.place(self.trainer.mesh, x.copy())

  def rows(self) -> Rows:
    """The training data as the programs take them."""
    if self._table is None:
      self._table = self._place(self.buffer.table)
    if self._order is None:
      self._order = self._place(self.buffer.order())
    return Rows(self.features, self._table, self._order)

  def one_row(self) -> Rows:
    """The same in shape; every slice has one row, which holds nothing."""
    order = np.zeros_like(self.buffer.order())
    order[:, 0] = 1
    table = self._place(np.zeros_like(self.buffer.table))
    return Rows(self.features, table, self._place(order))

  def begin_rollout(self) -> None:
    self.buffer.begin_rollout()
    self._table = self._order = None

  def add(self, s: int, prompt, response) -> list[buffer_lib.Piece]:
    """Finds room for a sequence of slice `s`; see `Buffer.add`."""
    self._table = self._order = None
    return self.buffer.add(s, prompt, response)

  def most_pieces(self, slots: int, length: int) -> int:
    """What so many slots can hold, if all are full."""
    return slots * self.buffer.most_pieces(length)

  def count(self, micro_batches) -> None:
    """Counts what each slice has trained on; other rows are next."""
    if np.any(micro_batches):
      self.buffer.trained(micro_batches)
      self._order = None

  def micro_batches_within(self, seconds: float) -> int:
    """How many micro-batches take about that long."""
    one = self.micro_batch_s * self._slower
    return round(seconds / one) if one else 0

  def adapt(self, too_long: bool) -> None:
    """Learns from a chunk whether it had too much to train: it took longer for it.

    Settles where a third of the chunks does, as many as do for other reasons.
    """
    factor = 1.04 if too_long else 0.98
    self._slower = float(np.clip(self._slower * factor, 0.8, 2.0))


def make(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  mesh,
  params,
  *,
  optimizer: optax.GradientTransformation,
  longest: int,
  loss: draft_loss.Loss,
  options: Options,
) -> Spot:
  """Spot training of a drafter, for `rollout.make`.

  Args:
    params: the drafter's, to start from
    longest: tokens of the longest sequence
  Raises:
    ValueError: pieces repeat less than the loss unrolls
  """
  length = min(options.length, longest)
  if length < longest and options.context < loss.steps:
    raise ValueError(
      f"context ({options.context}) must be at least the drafting steps of the loss "
      f"({loss.steps}): the first tokens of a piece have no earlier steps"
    )
  args = (loss, optimizer, length, longest, options.shadow, options.per_update)
  return Spot(Trainer(config, drafter, mesh, *args), options, params)
