"""A drafter in training: its state, and one guarded update."""

from collections.abc import Collection

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from tlt_jax import axes
from tlt_jax import processes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import slices


@flax.struct.dataclass
class Sums:
  loss: jax.Array  # f32[]
  metrics: dict  # f32[] each, see `loss.Loss.metrics`
  grads: dict  # f32, of the drafter's parameters
  micro_batches: jax.Array  # f32[]


@flax.struct.dataclass
class State:
  params: dict  # f32, laid out by axes.ROLLOUT
  opt_state: optax.OptState
  average: dict | None  # of `params` over updates; None: none is kept
  step: jax.Array  # i32[]  updates done
  # i32[]  updates, or micro-batches before they wait, dropped as not finite
  skipped: jax.Array
  # Of micro-batches that wait for an update; None: each makes one.
  waiting: Sums | None = None

  @property
  def drafting(self) -> dict:
    return self.params if self.average is None else self.average


def abstract_state(
  drafter: drafter_lib.DrafterConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  averages: bool = False,
  waiting: Collection[str] = (),
) -> State:
  """Shapes and shardings of the state; `waiting`: metrics that wait for an update."""
  abstract = drafter_lib.abstract_params(drafter)
  params = axes.with_shardings(mesh, axes.ROLLOUT, abstract)
  opt_state = axes.abstract_opt_state(optimizer, mesh, params)
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=axes.sharding(mesh))
  state = State(params, opt_state, params if averages else None, count, count)
  if not waiting:
    return state
  total = jax.ShapeDtypeStruct((), jnp.float32, sharding=count.sharding)
  metrics = dict.fromkeys(waiting, total)
  return state.replace(waiting=Sums(total, metrics, params, total))


def init_state(
  drafter: drafter_lib.DrafterConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  params,
  averages: bool = False,
  waiting: Collection[str] = (),
) -> State:
  abstract = abstract_state(drafter, optimizer, mesh, averages, waiting)

  def put(x, like):  # a copy: the state is donated, the given drafter may still draft
    return processes.place(jnp.array(x, like.dtype), like.sharding)

  def zeros(like):
    return put(jnp.zeros(like.shape), like)

  average = jax.tree.map(put, params, abstract.params) if averages else None
  params = jax.tree.map(put, params, abstract.params)
  shardings = slices.shardings(abstract.opt_state)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  return State(
    params=params,
    opt_state=opt_state,
    average=average,
    step=zeros(abstract.step),
    skipped=zeros(abstract.skipped),
    waiting=jax.tree.map(zeros, abstract.waiting),
  )


def update(
  optimizer: optax.GradientTransformation,
  state: State,
  loss: jax.Array,
  metrics: dict[str, jax.Array],
  grads: dict,
  decay: float = 0.0,
  enough: jax.Array | bool = True,
) -> tuple[State, dict[str, jax.Array]]:
  """Makes one optimizer step from sums over tokens, see `loss.loss`.

  Without tokens, not `enough` of them, or where a sum is not finite (counted), nothing
  happens: even zero gradients would move the parameters by their moments.

  Returns the new state; loss, grad_norm and the other `metrics`, means over tokens; and
  `updated`, 1.0 or 0.0.
  """
  chex.assert_trees_all_equal_shapes(grads, state.params)
  count = jnp.maximum(metrics["tokens"], 1.0)
  grads = jax.tree.map(lambda x: x / count, grads)
  means = {k: x / count for k, x in metrics.items() if k != "tokens"}
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  useful = enough & finite & (metrics["tokens"] > 0)

  def step(state):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
      average = optax.incremental_update(params, average, 1 - decay)
    return state.replace(
      params=params, opt_state=opt_state, average=average, step=state.step + 1
    )

  def skip(state):
    return state.replace(skipped=state.skipped + (enough & ~finite).astype(jnp.int32))

  state = jax.lax.cond(useful, step, skip, state)
  summary = {"loss": loss / count, "grad_norm": norm, "updated": useful.astype(jnp.float32)}
  return state, {**means, **summary}


def learn(
  optimizer: optax.GradientTransformation,
  state: State,
  sums: Sums,
  per_update: int,
  decay: float = 0.0,
) -> tuple[State, dict[str, jax.Array]]:
  """Adds a micro-batch, and makes an update once there are `per_update`.

  A micro-batch that is not finite is dropped: it would spoil those that wait. Returns the
  metrics of `update`, all 0.0 where there was none, with `skipped`, 1.0 for a micro-batch
  or an update that was not finite.
  """
  before = state.skipped
  if state.waiting is not None:
    finite = jnp.isfinite(sums.loss) & jnp.isfinite(optax.tree.norm(sums.grads))
    sums = jax.tree.map(lambda x, y: x + jnp.where(finite, y, 0.0), state.waiting, sums)
    state = state.replace(skipped=before + (~finite).astype(jnp.int32))
  enough = sums.micro_batches >= per_update
  updated, summary = update(
    optimizer, state, sums.loss, sums.metrics, sums.grads, decay, enough
  )
  if state.waiting is not None:
    waiting = jax.tree.map(lambda x: jnp.where(enough, 0.0, x), sums)
    updated = updated.replace(waiting=waiting)
  made = summary["updated"] > 0
  summary = {name: jnp.where(made, x, 0.0) for name, x in summary.items()}
  return updated, summary | {"skipped": (updated.skipped - before).astype(jnp.float32)}
