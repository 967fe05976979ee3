"""Optimizers for the policy, by name, around optax."""

import jax
import optax

from tlt_jax import ranges

_MUON_AXES = {  # (reduced, output) axes of the kernels that are not matrices
  "q_proj": (0, (1, 2)),
  "k_proj": (0, (1, 2)),
  "v_proj": (0, (1, 2)),
  "o_proj": ((0, 1), 2),
}


def _muon_axes(params):
  """Picks Muon for the kernels inside the layers, Adam (None) for everything else."""

  def axes_of(path, x):
    name = path[-1].key
    if len(path) == 1 or x.ndim < 2:  # embedding, head, norms, biases
      return None
    reduced, output = _MUON_AXES.get(name, (0, 1))
    return optax.contrib.MuonDimensionNumbers(reduced, output)

  return jax.tree_util.tree_map_with_path(axes_of, params)


def make(
  name: str,
  learning_rate: ranges.NotNegative,
  *,
  warmup: ranges.StepsOrZero = 0,
  total: ranges.Steps | None = None,
  floor: ranges.Share = 0.0,
  weight_decay: ranges.NotNegative = 0.0,
  max_grad_norm: ranges.Positive = 1.0,
  b1: ranges.ShareBelowOne = 0.9,
  b2: ranges.ShareBelowOne = 0.95,
) -> optax.GradientTransformation:
  """Makes AdamW or Muon, behind global-norm clipping.

  Args:
    name: "adamw" or "muon" (https://arxiv.org/abs/2502.16982: updates scaled to
      the size of Adam's, so that one learning rate serves both)
    learning_rate: peak, reached after `warmup` updates
    warmup: updates in which it rises, the first of them not from zero
    total: updates after which a cosine has brought it to `floor` of it, where it stays;
      None keeps it
    floor: share of the peak that is left at the end
    weight_decay: decoupled, times the learning rate
    max_grad_norm: a gradient of a larger global norm is scaled down to it
    b1, b2: decay of Adam's moments; b2 also of Muon's momentum
  Raises:
    ValueError: another name, or no update is left after the warm-up
  """
  if total is not None and total <= warmup:
    raise ValueError(f"optimizer: total ({total}) must exceed warmup ({warmup})")
  first = learning_rate / (warmup + 1)  # from the first update on, not zero
  if total is None:
    schedule = optax.linear_schedule(first, learning_rate, warmup)
  else:
    last = floor * learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
      first, learning_rate, warmup, total, last
    )
  if name == "adamw":
    rule = optax.adamw(schedule, b1, b2, weight_decay=weight_decay)
  elif name == "muon":
    rule = optax.contrib.muon(
      schedule,
      beta=b2,
      weight_decay=weight_decay,
      adam_b1=b1,
      adam_b2=b2,
      consistent_rms=0.2,
      muon_weight_dimension_numbers=_muon_axes,
    )
  else:
    raise ValueError(f"optimizer must be 'adamw' or 'muon', got {name!r}")
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), rule)
