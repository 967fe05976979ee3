"""The learner's compiled update: what slices exchange, and what grows with what."""

import collections
import dataclasses
import functools
import math

import jax
import optax
import pytest

from benchmarks import shapes
from dev import hlo_counts
from tests import hlo
from tests import tiny
from tlt_jax import axes
from tlt_jax.models import target
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib

RESPONSES = 8
CONFIG = dataclasses.replace(tiny.CONFIG, num_kv_heads=4)
QWEN = dataclasses.replace(shapes.MODELS["qwen2.5-7b"], num_layers=2)


def lowered(mesh, config=CONFIG, length=1024, layers=2) -> jax.stages.Lowered:
  """An update on rows of 4, a row of which holds `length` tokens."""
  made = learner_lib.make(
    dataclasses.replace(config, num_layers=layers),
    algorithm.make("grpo", kl_coef=0.1),
    optax.adam(1e-6),
    mesh,
    buckets=((4, length),),
  )
  args = batch_lib.abstract(mesh, made.buckets, RESPONSES)
  return made.update.lower(made.abstract_state(), *args)


@functools.cache
def compiled(data: int, model: int, **shape) -> jax.stages.Compiled:
  return lowered(tiny.mesh(data, model), **shape).compile()


def scratch(data: int, model: int, **shape) -> int:
  return compiled(data, model, **shape).memory_analysis().temp_size_in_bytes


def exchanged(text: str, data: int, model: int) -> collections.Counter:
  """(opcode, elements) of what slices exchange, and how often it is written down."""
  found = collections.Counter()
  for body in hlo_counts.computations(text).values():
    for i in filter(hlo_counts.is_collective, body):
      slices = {tuple(n // model for n in group) for group in hlo.device_groups(i)}
      if any(len(set(group)) > 1 for group in slices):
        assert data > 1
        found[i.opcode.removesuffix("-start"), i.num_elements] += 1
  return found


def allowed(config, data: int, model: int) -> dict[str, set[int]]:
  """Elements of the weights, whole and as one slice has them; of vectors, up to all."""
  mesh = tiny.mesh(data, model)
  params = target.abstract_params(config)
  whole = axes.with_shardings(mesh, axes.ROLLOUT, params)
  split = axes.with_shardings(mesh, axes.TRAIN, params)

  def sizes(tree):
    return {math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)}

  return {"all-gather": sizes(whole), "reduce-scatter": sizes(split)}


def check_exchange(text: str, config, data: int, model: int) -> None:
  """Weights are gathered, gradients reduced and scattered; the rest is small."""
  sizes = allowed(config, data, model)
  seen = exchanged(text, data, model)
  small = 4 * config.num_heads * config.head_dim  # biases, norms, numbers
  for opcode, size in seen:
    known = opcode in sizes and size in sizes[opcode]
    assert known or size <= small, (opcode, size, seen)
  assert {opcode for opcode, _ in seen} >= set(sizes)


def test_slices_exchange_weights_and_gradients_only():
  """No activation: with rows of twice the tokens they exchange the very same."""
  short, long = compiled(2, 4), compiled(2, 4, length=2048)
  check_exchange(short.as_text(), CONFIG, 2, 4)
  assert exchanged(short.as_text(), 2, 4) == exchanged(long.as_text(), 2, 4)


def test_memory_grows_with_the_row_and_not_with_its_square():
  """Twice the length takes twice the memory, at most."""
  assert scratch(2, 4, length=4096) < 2.1 * scratch(2, 4, length=2048)


def test_memory_falls_with_the_number_of_slices():
  """The same rows on twice the slices take little more than half."""
  assert scratch(4, 2, length=4096) < 0.7 * scratch(2, 2, length=4096)


def test_products_do_not_grow_with_depth():
  """The program for eight layers, and longer rows, has as many as that for two."""

  def products(**shape):
    return lowered(tiny.mesh(2, 4), **shape).as_text().count("dot_general")

  assert products(layers=8, length=8192) == products()


@pytest.mark.slow
def test_slices_exchange_weights_and_gradients_only_at_7b_widths():
  """Of Qwen2.5-7B, cut to two layers."""
  text = compiled(4, 2, config=QWEN).as_text()
  check_exchange(text, QWEN, 4, 2)
