"""The chunks of a rollout, lowered for TPUs on a machine without one."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
import pytest

from tests import tiny
from tests import tpu_kernels
from tlt_jax import axes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=128, dtype="bfloat16")
DRAFTER = drafter_lib.of_target(CONFIG)
OPTIONS = rollout.Options(max_length=100, max_prompt=12, slots=4, chunk=8, kernels="pallas")
CHAIN, TREE = map(strategy_lib.parse, ("3_1_4", "3_2_6"))


def tpus(kind):
  """Two slices of two TPUs each."""
  return AbstractMesh(
    *((2, 2), (axes.DATA, axes.MODEL)),
    axis_types=(AxisType.Auto,) * 2,
    abstract_device=AbstractDevice(kind, 1, "tpu"),
  )


def drafting(strategy, shapes):
  """What decodes by a strategy, and its state."""
  source = source_lib.make(
    "model",
    source_lib.Setting(
      *(CONFIG, shapes.mesh, None, shapes.room, (strategy,)),
      drafter=DRAFTER,
      layout=shapes.layout,
      kernels=OPTIONS.kernels,
    ),
  )
  A, B = shapes.room.longest, OPTIONS.slots
  rows = functools.partial(slices.abstract, shapes.mesh, B)
  cache = slots_lib.abstract_cache(shapes.mesh, DRAFTER.layer, B, 160, OPTIONS.kernels)
  state = draft_lib.DraftState(
    cache=cache[0],
    features=rows(jnp.bfloat16, A, shapes.layout.size),
    tokens=rows(jnp.int32, A),
    count=rows(jnp.int32),
  )
  return speculate.decode(source, strategy, OPTIONS.chunk), state


def lowered(mesh, strategy, page=None):
  """The chunk of a strategy, as text; with KV in pages of so many tokens."""
  arms = () if strategy is None else (strategy,)
  options = dataclasses.replace(OPTIONS, kv_page_tokens=page)
  shapes = programs_lib.Shapes.of(CONFIG, mesh, options, DRAFTER, arms, train=False)
  run, state = decode.decode(CONFIG, OPTIONS.chunk, shapes.layout), None
  if strategy is not None:
    run, state = drafting(strategy, shapes)
  how = OPTIONS.kernels, page is not None
  slots = slots_lib.slots_shardings(mesh, CONFIG, shapes.layout, *how)
  chunk = chunk_lib.make(
    mesh,
    chunk_lib.without_training(run),
    chunk_lib.Done(slots, None, None),
    kernels=OPTIONS.kernels,
  )
  place = functools.partial(axes.with_shardings, mesh, axes.ROLLOUT)
  weights = chunk_lib.Weights(
    place(target.abstract_params(CONFIG)), place(drafter_lib.abstract_params(DRAFTER))
  )
  one = jax.ShapeDtypeStruct((), jnp.int32)
  slots = shapes.slots(OPTIONS.buckets[-1], stops=1)
  traced = chunk.trace(weights, slots, state, chunk_lib.Limits(one, one, one), None)
  return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("page", [None, tiny.slow(64)])
@pytest.mark.parametrize(
  ("strategy", "attentions", "writes"),
  # In each of the target's 2 layers; of the pairs that the drafter lacks, and of each of
  # its steps; of the accepted path.
  [(None, 2, 4), (CHAIN, 2 + 2, 4 + 4), (TREE, 2 + 2, 4 + 4 + 4)],
  ids=str,
)
def test_attention_and_writes_are_kernels(strategy, attentions, writes, page):
  """All of them, on slices of two devices, and one for sampling."""
  text = lowered(tpus(tpu_kernels.KINDS[1]), strategy, page)
  assert collections.Counter(re.findall(r'kernel_name = "(\w+)"', text)) == {
    "tree_attention": attentions,
    "cache_write": writes,
    "verify_sample": 1,
  }
