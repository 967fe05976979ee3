"""Optimizers for the policy, by name, around optax."""

import jax
import optax

_MUON_AXES = {  # (reduced, output) axes of the kernels that are not matrices
  "q_proj": (0, (1, 2)),
  "k_proj": (0, (1, 2)),
  "v_proj": (0, (1, 2)),
  "o_proj": ((0, 1), 2),
}


def _muon_axes(params):
  """Muon for the kernels inside the layers, Adam for everything else."""

  def one(path, x):
    name = path[-1].key
    if len(path) == 1 or x.ndim < 2:  # embedding, head, norms, biases
      return None
    return optax.contrib.MuonDimensionNumbers(*_MUON_AXES.get(name, (0, 1)))

  return jax.tree_util.tree_map_with_path(one, params)


def make(
  name: str,
  learning_rate: float,
  *,
  warmup: int = 0,
  total: int | None = None,
  floor: float = 0.0,
  weight_decay: float = 0.0,
  max_grad_norm: float = 1.0,
  b1: float = 0.9,
  b2: float = 0.95,
) -> optax.GradientTransformation:
  """AdamW or Muon behind global-norm clipping.

  Args:
    name: "adamw" or "muon" (https://arxiv.org/abs/2502.16982: updates scaled to
      the size of Adam's, so that one learning rate serves both)
    learning_rate: peak, reached after `warmup` updates
    total: updates after which a cosine has brought it to `floor` of it, where it stays;
      None keeps it
  """
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
