"""What `make aot` counts, and what it compiles, as far as no other package is needed."""

import collections
import dataclasses
import functools
import importlib.metadata
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
import pytest

from dev import aot_machines
from dev import aot_programs
from dev import aot_report
from dev import hlo_counts
from tests import tiny
from tests import tpu_kernels
from tlt_jax import axes
from tlt_jax.pallas_kernels import cache_write

# A loop over a donated cache of 4,096 numbers, which a kernel writes in place after another
# has brought all of it to a nearer memory, and back; a matrix product in a layer; and a
# row of a table.
LOOP = """\
HloModule jit_chunk, input_output_alias={ {0}: (0, {}, may-alias) }

%gathered (table.1: f32[100,8], row.1: s32[1]) -> f32[1,8] {
  %table.1 = f32[100,8]{1,0} parameter(0)
  %row.1 = s32[1]{0} parameter(1)
  ROOT %rows = f32[1,8]{1,0} gather(%table.1, %row.1), offset_dims={1}
}

%body (carry: (f32[64,64], f32[100,8], s32[1])) -> (f32[64,64], f32[100,8], s32[1]) {
  %carry = (f32[64,64]{1,0}, f32[100,8]{1,0}, s32[1]{0}) parameter(0)
  %cache = f32[64,64]{1,0} get-tuple-element(%carry), index=0
  %table = f32[100,8]{1,0} get-tuple-element(%carry), index=1
  %row = s32[1]{0} get-tuple-element(%carry), index=2
  %embedded = f32[1,8]{1,0} fusion(%table, %row), kind=kLoop, calls=%gathered, \
metadata={op_name="while/body/gather"}
  %start = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]) copy-start(%cache)
  %near = f32[64,64]{1,0:S(1)} copy-done(%start)
  %new = f32[1,8]{1,0} custom-call(%embedded, %near), custom_call_target="attend", \
metadata={op_name="while/body/layer_0/attend"}
  %written = f32[64,64]{1,0:S(1)} custom-call(%new, %near), custom_call_target="write", \
output_to_operand_aliasing={{}: (1, {})}, metadata={op_name="while/body/layer_0/write"}
  %back = (f32[64,64]{1,0}, f32[64,64]{1,0:S(1)}, u32[]) copy-start(%written)
  %far = f32[64,64]{1,0} copy-done(%back)
  ROOT %next = (f32[64,64]{1,0}, f32[100,8]{1,0}, s32[1]{0}) tuple(%far, %table, %row)
}

ENTRY %main (p0: f32[64,64], p1: f32[100,8], p2: s32[1]) -> f32[64,64] {
  %p0 = f32[64,64]{1,0} parameter(0)
  %p1 = f32[100,8]{1,0} parameter(1)
  %p2 = s32[1]{0} parameter(2)
  %init = (f32[64,64]{1,0}, f32[100,8]{1,0}, s32[1]{0}) tuple(%p0, %p1, %p2)
  %loop = (f32[64,64]{1,0}, f32[100,8]{1,0}, s32[1]{0}) while(%init), body=%body
  ROOT %out = f32[64,64]{1,0} get-tuple-element(%loop), index=0
}
"""
CACHE, ROW = 64 * 64 * 4, 8 * 4  # bytes


def test_a_cache_that_moves_to_another_memory_and_back_is_copied_twice():
  """A kernel that is given it to write into does not copy it."""
  sizes = hlo_counts.donated(LOOP, least=1000)
  assert sizes == {("f32", 64 * 64)}
  copies = hlo_counts.copies_of(LOOP, sizes)
  assert [line.split()[0] for line in copies] == ["copy-start"] * 2


def test_bytes_and_kernels_of_a_step():
  """A row of the table, not all of it; what lies in the nearer memory costs nothing."""
  step = hlo_counts.Counter(LOOP, {("f32", 64 * 64)}, fill=0.5).step()
  gather = ROW + 4 + ROW  # a row, its number, the result
  attend, write = ROW + ROW, 2 * ROW
  assert step.num_bytes == gather + attend + write + 2 * CACHE
  assert (step.kernels, step.layer_kernels) == (3, 2)
  assert step.inner == ()


def test_kernels_read_the_part_of_a_cache_that_is_filled():
  """Where it is in the main memory; a fusion reads all of it."""
  text = LOOP.replace(":S(1)", "")
  far = lambda fill: hlo_counts.Counter(text, {("f32", 64 * 64)}, fill).step().num_bytes
  assert far(1.0) - far(0.5) == CACHE / 2  # by `attend`; `write` touches what it writes


def test_only_transfers_that_layers_use_are_theirs():
  """The copy ahead of the kernels is; the one behind them is used by the loop."""
  step = hlo_counts.Counter(LOOP, {("f32", 64 * 64)}, fill=0.5).step()
  assert step.layer_bytes == ROW + ROW + 2 * ROW + CACHE


def test_launches_are_those_of_the_longest_loop():
  """Of its body; a branch and all in it is one."""
  inside = ["kCommandBuffer", "kCustomCall", "kConditional", "kCommandBuffer"]
  lines = ["000: kCommandBuffer [source]", "    001: kCopy [source]", "002: kWhile [sink]"]
  lines += ["condition:", "    003: kCustomKernel x", "  body:"]
  for kind in inside:
    lines += [f"    004: {kind} [a]", "        005: kCustomKernel y"]
  lines += ["006: kWhile [short]", "  body:", "    007: kCustomCall z"]
  assert aot_report.launches("\n".join(lines)) == {
    "CommandBuffer": 2,
    "CustomCall": 1,
    "Conditional": 1,
  }
  assert aot_report.launches("000: kCopy x") == {}


def test_a_step_in_too_many_launches_or_with_too_large_arrays_is_named():
  """On one GPU; of TPUs launches are not known."""
  case = "h200", "plain", "triton"
  well = {"launches": {"CommandBuffer": 2, "Conditional": 1}}
  assert aot_report.broken(case, well) == []
  (line,) = aot_report.broken(case, {"launches": {"CommandBuffer": 57, "CustomCall": 57}})
  assert line.startswith("h200 plain triton: launches {'CommandBuffer': 57")
  assert aot_report.broken(("v6e", "plain", "pallas"), {}) == []
  assert aot_report.broken(case, {"error": "no"}) == ["h200 plain triton: no"]
  large = well | {"as_large_as_weights": ["body: x"]}
  assert "as large as weights: body: x" in aot_report.broken(case, large)[0]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_is_missing_is_said_in_one_line(platform, monkeypatch):
  def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "distribution", absent)
  line = aot_machines.missing(platform)
  assert "make aot" in line and "requirements-aot.txt" in line
  assert "\n" not in line


def test_a_target_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="'v7' is none of v5e_2x2"):
    aot_report.cases(["v7"], ["plain"])
  cases = aot_report.cases(["h200"], ["fused", "fill"])
  assert cases and not [case for case in cases if "fused" in case]


CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=128, dtype="bfloat16")


@functools.cache
def lowered(program: str) -> str:
  """A program of a small model for two slices of two v6e, as text."""
  mesh = AbstractMesh(
    *((2, 2), (axes.DATA, axes.MODEL)),
    axis_types=(AxisType.Auto,) * 2,
    abstract_device=AbstractDevice(tpu_kernels.KINDS[1], 1, "tpu"),
  )
  return aot_programs.lower(
    program, mesh, "pallas", CONFIG, slots=256, rows=2, platform="tpu"
  ).as_text()


@pytest.mark.parametrize(
  ("program", "attentions", "writes"),
  # In each of the target's 2 layers; of the pairs that the drafter lacks, and of each of
  # its steps; of the accepted path.
  [
    ("plain", 2, 4),
    ("chain", 2 + 2, 4 + 4),
    ("tree", 2 + 2, 4 + 4 + 4),
    ("fused", 2 + 2, 4 + 4),
  ],
)
def test_attention_and_writes_are_kernels_on_tpus(program, attentions, writes):
  """All of them, on slices of two devices, and one for sampling."""
  found = collections.Counter(re.findall(r'kernel_name = "(\w+)"', lowered(program)))
  assert found == {
    "tree_attention": attentions,
    "cache_write": writes,
    "verify_sample": 1,
  }


def test_a_drafter_is_cast_once_per_chunk():
  """Not in each step of its loops, where XLA leaves it."""
  shape = f"{CONFIG.mlp_width}x{CONFIG.width}"
  cast = rf"convert .*tensor<{shape}xf32>\) -> tensor<{shape}xbf16>"
  assert len(re.findall(cast, lowered("chain"))) == 2  # gate and up


def test_caches_stay_in_hbm_for_kernels_on_tpus():
  """XLA is told so for the cache: the last operand, after scalars and new values."""
  cache, new = (jax.ShapeDtypeStruct((2, 2, n, 128), jnp.bfloat16) for n in (64, 1))
  pages = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  write = functools.partial(cache_write.cache_write, impl="pallas")
  start = jax.ShapeDtypeStruct((2,), jnp.int32)
  text = tpu_kernels.lowered(write, tpu_kernels.KINDS[1], cache, new, start, pages)
  told = re.search(r"input_memory_space_colors.*?\[(.*?)\]", text)[1]
  assert re.sub(r"\\22", "", told) == "{operand_index:4,color:0}"
