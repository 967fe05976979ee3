"""A drafter in training: its state, and one guarded update."""

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
class State:
  """A drafter in training."""

  params: dict  # f32, laid out by axes.ROLLOUT
  opt_state: optax.OptState
  average: dict | None  # of `params` over updates; None: none is kept
  step: jax.Array  # i32[]  updates done
  skipped: jax.Array  # i32[]  updates left out: their gradient was not finite

  @property
  def drafting(self) -> dict:
    """The parameters to draft with: the average, where one is kept."""
    return self.params if self.average is None else self.average


def abstract_state(
  drafter: drafter_lib.DrafterConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  averages: bool = False,
) -> State:
  """Shapes, dtypes and shardings of the state; `averages`: whether it keeps an average."""
  abstract = drafter_lib.abstract_params(drafter)
  params = axes.with_shardings(mesh, axes.ROLLOUT, abstract)
  opt_state = axes.abstract_opt_state(optimizer, mesh, params)
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=axes.sharding(mesh))
  return State(params, opt_state, params if averages else None, count, count)


def init_state(
  drafter: drafter_lib.DrafterConfig,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  params,
  averages: bool = False,
) -> State:
  """The state before the first update.

  Args:
    drafter, optimizer, mesh: what is trained, how, and where
    params: of the drafter, of any layout; they are copied
    averages: whether an average is kept
  """
  abstract = abstract_state(drafter, optimizer, mesh, averages)
  # A copy: the state is donated, the drafter at hand may still be drafting.
  put = lambda x, like: processes.place(jnp.array(x, like.dtype), like.sharding)
  average = jax.tree.map(put, params, abstract.params) if averages else None
  params = jax.tree.map(put, params, abstract.params)
  shardings = slices.shardings(abstract.opt_state)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  zero = lambda: put(jnp.int32(0), abstract.step)
  return State(params, opt_state, average, zero(), zero())


def update(
  optimizer: optax.GradientTransformation,
  state: State,
  loss: jax.Array,
  metrics: dict[str, jax.Array],
  grads: dict,
  decay: float = 0.0,
) -> tuple[State, dict[str, jax.Array]]:
  """Makes one optimizer step from sums over tokens, as `loss.loss` gives them.

  Without a token nothing happens, nor where a sum is not finite (counted): a gradient
  of zeros would move the parameters by their moments.

  Args:
    loss: f32[]  its sum
    metrics: f32[] each, sums; "tokens" is what they are divided by
    grads: of the sum of the loss
    decay: of the average per update, where the state keeps one
  Returns:
    the new state; loss, grad_norm and what else is in `metrics`, means over tokens; and
    `updated`, 1.0 or 0.0
  """
  chex.assert_trees_all_equal_shapes(grads, state.params)
  count = jnp.maximum(metrics["tokens"], 1.0)
  mean = lambda tree: jax.tree.map(lambda x: x / count, tree)
  grads, means = mean(grads), mean({k: v for k, v in metrics.items() if k != "tokens"})
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  useful = finite & (metrics["tokens"] > 0)

  def step(state):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
      average = optax.incremental_update(params, average, 1 - decay)
    return State(params, opt_state, average, state.step + 1, state.skipped)

  def skip(state):
    return state.replace(skipped=state.skipped + (~finite).astype(jnp.int32))

  state = jax.lax.cond(useful, step, skip, state)
  told = {"loss": loss / count, "grad_norm": norm, "updated": useful.astype(jnp.float32)}
  return state, {**means, **told}
