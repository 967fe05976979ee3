from typing import Literal

import jax
import optax

from tlt_jax import ranges


def _muon_axes(params):
  """Muon for the matrices inside the layers, Adam (None) for everything else."""

  def axes_of(path, x):
    if len(path) == 1 or x.ndim < 2:  # embedding, head, norms, biases
      return None
    # Each expert's, where a parameter holds those of all experts.
    return optax.contrib.MuonDimensionNumbers(
      reduction_axis=x.ndim - 1, output_axis=x.ndim - 2
    )

  return jax.tree_util.tree_map_with_path(axes_of, params)


def make(
  name: Literal["adamw", "muon"],
  learning_rate: ranges.NotNegative,
  *,
  warmup: ranges.StepsOrZero = 0,
  total: ranges.Steps | None = None,
  floor: ranges.Share = 0.0,
  weight_decay: ranges.NotNegative = 0.0,
  max_grad_norm: ranges.Positive = 1.0,
  b2: ranges.ShareBelowOne = 0.95,
) -> optax.GradientTransformation:
  """Makes AdamW or Muon, after global-norm clipping.

  Muon's updates are scaled to the size of Adam's (https://arxiv.org/abs/2502.16982), so
  that one learning rate serves both.

  Args:
    name: kind of optimizer
    learning_rate: peak of the learning rate
    warmup: updates over which the learning rate rises to its peak
    total: updates until a cosine has brought the learning rate down to `floor`; None: it
      stays at its peak
    floor: final learning rate as a share of the peak
    weight_decay: decoupled weight decay, to be multiplied by the learning rate
    max_grad_norm: largest global norm of a gradient; a longer one is scaled down to it
    b2: decay per update of Adam's second moment, and of Muon's momentum
  Raises:
    ValueError: an argument out of its range, or no update is left after the warm-up
  """
  ranges.check(make, locals())
  if total is not None and total <= warmup:
    raise ValueError(f"optimizer: total ({total}) must exceed warmup ({warmup})")
  first = learning_rate / (warmup + 1)  # the first update is not zero
  if total is None:
    schedule = optax.linear_schedule(first, learning_rate, warmup)
  else:
    last = floor * learning_rate
    schedule = optax.warmup_cosine_decay_schedule(first, learning_rate, warmup, total, last)
  if name == "adamw":
    rule = optax.adamw(schedule, b2=b2, weight_decay=weight_decay)
  else:
    rule = optax.contrib.muon(
      schedule,
      beta=b2,
      weight_decay=weight_decay,
      adam_b1=0.9,
      adam_b2=b2,
      consistent_rms=0.2,
      muon_weight_dimension_numbers=_muon_axes,
    )
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), rule)
