"""Estimates of the memory that programs take beside the arrays they are given.

From shapes, in bytes on one device. Factors are fitted to what XLA says of compiled
programs (`memory_analysis`, on CPUs); `tests/test_memory_plan.py` compares that of an
update of a small model.
"""

import numpy as np

from tlt_jax import axes
from tlt_jax import memory
from tlt_jax.models import config as config_lib
from tlt_jax.models import stacked
from tlt_jax.models import target
from tlt_jax.pallas_kernels import implementations
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_F32 = 4
_PROCESS = 400 * 2**20  # Python, JAX and the tokenizer
# A process that verifiers run in, without what it shares with others: 160 MiB were measured
# for reasoning.score (298 with that), 93 for countdown, 75 for math, 21 for gsm8k.
VERIFIER = 160 * 2**20
_LAYER = 7 * 2**20  # a layer of a compiled pass of the policy
_UPDATE_LOOP = 50 * 2**20  # a loop over layers in the update, while it is compiled
_SCORES = 512  # keys, about, of which scores exist at a time


def process(model: config_lib.ModelConfig, passes: int) -> int:
  """Bytes of the process itself, its compiled programs included, on the host.

  Args:
    model: the policy's
    passes: programs that run the policy: prefill, and a chunk by bucket and strategy
  """
  return _PROCESS + _LAYER * model.num_layers * passes


def compiling_update(learner: learner_lib.Learner) -> int:
  """Bytes that compiling the learner's update takes, on the host."""
  trained = learner.trained(learner.abstract_state().params)
  return _UPDATE_LOOP * len(stacked.runs(trained, learner.config.num_layers))


def update(learner: learner_lib.Learner) -> float:
  """Bytes of the learner's update.

  A copy of the layers' parameters, stacked; the gradients that are added up, and those of
  a micro-batch; the parameters that are gathered from all slices. Beside them either what
  the layers keep for the backward pass and the logits of a part of the tokens, or these
  logits and what follows from them, with the embedding's gradient.
  """
  model, mesh, params = learner.config, learner.mesh, learner.abstract_state().params
  tensor, slices = mesh.shape[axes.MODEL], mesh.shape[axes.DATA]
  gradients = 2 * _bytes(learner.trained(params))
  outside = stacked.outside(params)
  layers = _bytes({name: x for name, x in params.items() if name not in outside})
  whole = axes.with_shardings(mesh, axes.ROLLOUT, target.abstract_params(model))
  of_layer = _bytes(whole["layer_0"]) * (1 if learner.remat else model.num_layers)
  gathered = _bytes(stacked.outside(whole)) + of_layer if slices > 1 else 0
  embedding = _bytes(whole["embedding"])

  def micro_batch(rows: int, length: int) -> float:
    tokens = rows * length / slices
    kept = tokens * _kept(model, length, learner.remat, tensor)
    logits = min(tokens, learner_lib.LOGIT_CHUNK) * model.vocab_size * _F32 / tensor
    return max(kept + 3.5 * logits, 4 * (logits + embedding))

  largest = max(micro_batch(b.rows, b.length) for b in learner.buckets)
  return gradients + layers + gathered + largest


def _kept(model: config_lib.ModelConfig, length: int, remat: bool, tensor: int) -> float:
  """Bytes that the layers keep of a token for the backward pass, and attention's scores.

  Of `tensor` devices of a slice each has a part of the heads, of the MLP and of what goes
  from layer to layer (`stacked.splits`), but all of what a layer reads.
  """
  size = np.dtype(model.dtype).itemsize
  heads = model.num_heads + 2 * model.num_kv_heads + model.num_heads
  split = (heads * model.head_dim + 3 * model.mlp_width) * size / tensor
  layer = split + 2 * model.width * size
  scores = 3 * model.num_heads * min(length, _SCORES) * _F32 / tensor
  if remat:
    parts = tensor if stacked.splits(length, tensor) else 1
    return layer + scores + model.num_layers * model.width * size / parts
  return model.num_layers * layer + scores


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
  layer = max(_layer(shapes, bucket) for bucket in options.buckets)
  return max(logits, store, layer)


def _layer(shapes: programs_lib.Shapes, bucket: options_lib.Bucket) -> float:
  """Bytes of one layer's KV of all slots, which a resize has twice.

  From pages "ref" puts it together to attend to it; kernels read pages where they are.
  """
  layer = shapes.slots(bucket, 1).kv[0]
  if shapes.kv_pages is None:
    return _bytes(layer)
  if implementations.choose(shapes.options.kernels) != "ref":
    return 0
  pages = shapes.kv_pages.pages + 1
  return _bytes(layer.pool) * bucket.batch * layer.pages.shape[1] / pages


def draft_micro_batch(trainer: trainer_lib.Trainer, row_tokens: int) -> float:
  """Bytes of a micro-batch of the drafter's training: distributions over tokens."""
  drafted = len(trainer.drafter.vocab) or trainer.config.vocab_size
  numbers = (3 + trainer.loss.steps) * drafted
  return row_tokens * numbers * _F32 / trainer.mesh.shape[axes.MODEL]


def _bytes(arrays) -> int:
  """Bytes of shapes with shardings on the fullest device."""
  return max(memory.bytes_by_device(arrays).values(), default=0)
