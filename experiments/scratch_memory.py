"""Estimates of the memory that programs take beside the arrays they are given.

From shapes, in bytes on one device. Factors are fitted to what XLA says of compiled
programs (`memory_analysis`, on CPUs): that of an update was between 11% above and 10%
below the estimate for 11 shapes, with 6 to 30 layers of width 576, all or half of them
trained, vocabularies of 1,000 and 49,152, 2 to 8 rows of 512 or 1,024 tokens, on one slice
and on two.
"""

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax import memory
from tlt_jax.models import config as config_lib
from tlt_jax.models import target
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_F32 = 4
_PROCESS = 400 * 2**20  # Python, JAX and the tokenizer
_LAYER = 7 * 2**20  # a layer of a compiled pass of the policy
_UPDATE_LAYER = 25 * 2**20  # a layer of the update, while it is compiled


def process(model: config_lib.ModelConfig, passes: int) -> int:
  """Bytes of the process itself, its compiled programs included, on the host.

  Args:
    model: the policy's
    passes: programs that run the policy: prefill, and a chunk by bucket and strategy
  """
  return _PROCESS + _LAYER * model.num_layers * passes


def compiling_update(model: config_lib.ModelConfig) -> int:
  """Bytes that compiling the learner's update takes, on the host."""
  return _UPDATE_LAYER * model.num_layers


def update(learner: learner_lib.Learner) -> float:
  """Bytes of the learner's update.

  The gradients that are added up, and the parameters where they are gathered from all
  slices; beside them either what the layers keep for the backward pass and the logits of
  the head, or the logits and what follows from them, with the embedding's gradient.
  """
  model, mesh = learner.config, learner.mesh
  tensor, slices = mesh.shape[axes.MODEL], mesh.shape[axes.DATA]
  gradients = _bytes(learner.trained(learner.abstract_state().params))
  whole = axes.with_shardings(mesh, axes.ROLLOUT, target.abstract_params(model))
  gathered = _bytes(whole) if slices > 1 else 0
  embedding = _bytes(whole["embedding"])

  def micro_batch(rows: int, length: int) -> float:
    kept = rows * _kept(model, length, learner.remat, mesh) / (slices * tensor)
    chunk = min(length, learner_lib.LOGIT_CHUNK)
    logits = rows * chunk * model.vocab_size * _F32 / (slices * tensor)
    return max(kept + 3.5 * logits, 4 * (logits + embedding))

  largest = max(micro_batch(b.rows, b.length) for b in learner.buckets)
  return gradients + gathered + largest


def _kept(
  model: config_lib.ModelConfig, length: int, remat: bool, mesh: jax.sharding.Mesh
) -> float:
  """Bytes that the layers keep of a row for the backward pass.

  XLA's CPU backend does not honour that layers are to be computed again: there, `remat`
  saves a fifth.
  """
  size = np.dtype(model.dtype).itemsize
  heads = model.num_heads + 2 * model.num_kv_heads + model.num_heads
  numbers = heads * model.head_dim + 2 * model.width + 3 * model.mlp_width
  scores = 2 * model.num_heads * _keys(length) * _F32
  layer = length * (numbers * size + scores)
  if remat and next(mesh.devices.flat).platform != "cpu":
    return layer + model.num_layers * length * model.width * size
  return model.num_layers * layer * (1.0 if remat else 1.25)


def _keys(length: int) -> float:
  """How many keys a query of a row is shown, on average: blocks see up to their end."""
  blocks = max(round(length / 512), 1)
  return length * (blocks + 1) / (2 * blocks)


def decoding(
  shapes: programs_lib.Shapes,
  slots: int,
  strategies: tuple[strategy_lib.Strategy, ...],
) -> float:
  """Bytes of a chunk or of a prefill, the larger of them.

  Args:
    shapes: of the rollout
    slots: of its largest bucket, per slice
    strategies: that it may run
  """
  model, options = shapes.config, shapes.options
  nodes = max((s.verify for s in strategies), default=1)
  logits = 6 * slots * nodes * model.vocab_size * _F32 / shapes.mesh.shape[axes.MODEL]
  rows = min(options.prefill_rows, options.prompt_rows) / options.prompt_rows
  store = rows * _bytes(shapes.store())
  layer = max(_bytes(shapes.slots(b, 1).kv[0]) for b in options.buckets)
  return max(logits, store, layer)


def draft_micro_batch(trainer: trainer_lib.Trainer, row_tokens: int) -> float:
  """Bytes of a micro-batch of the drafter's training: distributions over tokens."""
  drafted = len(trainer.drafter.vocab) or trainer.config.vocab_size
  numbers = 3 * trainer.config.vocab_size + trainer.loss.steps * drafted
  return row_tokens * numbers * _F32 / trainer.mesh.shape[axes.MODEL]


def _bytes(arrays) -> int:
  """Bytes of shapes with shardings on the fullest device."""
  return max(memory.bytes_by_device(arrays).values(), default=0)
