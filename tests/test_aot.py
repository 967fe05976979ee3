"""What `make aot` compiles, as far as no other package is needed."""

import collections
import dataclasses
import functools
import re

from jax.sharding import AbstractDevice, AbstractMesh, AxisType
import pytest

from dev import aot_programs
from dev import aot_report
from dev import hlo_counts
from tests import tiny
from tests import tpu_kernels
from tests import triton_kernels
from tlt_jax import axes

# A loop over a donated cache of 4,096 numbers, which a kernel writes in place after all of
# it was brought to a nearer memory, and back.
LOOP = """\
HloModule jit_chunk, input_output_alias={ {0}: (0, {}, may-alias) }

%body (carry: (f32[64,64])) -> (f32[64,64]) {
  %carry = (f32[64,64]{1,0}) parameter(0)
  %cache = f32[64,64]{1,0} get-tuple-element(%carry), index=0
  %start = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]) copy-start(%cache)
  %near = f32[64,64]{1,0:S(1)} copy-done(%start)
  %written = f32[64,64]{1,0:S(1)} custom-call(%near), custom_call_target="write", \
output_to_operand_aliasing={{}: (0, {})}, metadata={op_name="while/body/layer_0/write"}
  %back = (f32[64,64]{1,0}, f32[64,64]{1,0:S(1)}, u32[]) copy-start(%written)
  %far = f32[64,64]{1,0} copy-done(%back)
  ROOT %next = (f32[64,64]{1,0}) tuple(%far)
}

ENTRY %main (p0: f32[64,64]) -> f32[64,64] {
  %p0 = f32[64,64]{1,0} parameter(0)
  %init = (f32[64,64]{1,0}) tuple(%p0)
  %loop = (f32[64,64]{1,0}) while(%init), body=%body
  ROOT %out = f32[64,64]{1,0} get-tuple-element(%loop), index=0
}
"""


def test_a_cache_that_moves_to_another_memory_and_back_is_copied_twice():
  """A kernel that is given it to write into does not copy it."""
  sizes = hlo_counts.donated(LOOP, least=1000)
  assert sizes == {("f32", 64 * 64)}
  copies = hlo_counts.copies_of(LOOP, sizes)
  assert [line.split()[0] for line in copies] == ["copy-start"] * 2


# A step of a layer, and what all layers share: `zeros` and `keys`.
STEP = """\
HloModule jit_chunk, input_output_alias={ {0}: (0, {}, may-alias) }

%fused () -> s32[8] {
  ROOT %zero = s32[8]{0} constant({0, 0, 0, 0, 0, 0, 0, 0})
}

%cond (carry: (bf16[64,64], bf16[9,16])) -> pred[] {
  %carry.1 = (bf16[64,64]{1,0}, bf16[9,16]{1,0}) parameter(0)
  ROOT %go = pred[] fusion(), kind=kLoop, calls=%fused
}

%body (carry: (bf16[64,64], bf16[9,16])) -> (bf16[64,64], bf16[9,16]) {
  %carry.2 = (bf16[64,64]{1,0}, bf16[9,16]{1,0}) parameter(0)
  %cache = bf16[64,64]{1,0} get-tuple-element(%carry.2), index=0
  %w = bf16[9,16]{1,0} get-tuple-element(%carry.2), index=1
  %zeros = s32[8]{0} fusion(), kind=kLoop, calls=%fused
  %one = s32[1]{0} fusion(), kind=kLoop, calls=%fused, metadata={op_name="a/add"}
  %enter = bf16[2,16]{1,0} custom-call(%one, %w), custom_call_target="call", \
metadata={op_name="a/enter/ffi_call"}
  %qkv = (f32[4,8]{1,0}, bf16[2,16]{1,0}, bf16[64,64]{1,0}) custom-call(\
%enter, %w, %w, %zeros, %cache), custom_call_target="call", \
output_to_operand_aliasing={{2}: (4, {})}, metadata={op_name="a/layer_0/qkv/ffi_call"}
  %q = bf16[2,16]{1,0} get-tuple-element(%qkv), index=1
  %new = bf16[64,64]{1,0} get-tuple-element(%qkv), index=2
  %attend = (f32[8,8]{1,0}, bf16[2,16]{1,0}) custom-call(%q, %new, %zeros), \
custom_call_target="call", metadata={op_name="a/layer_1/attend/ffi_call"}
  %out = bf16[2,16]{1,0} get-tuple-element(%attend), index=1
  ROOT %next = (bf16[64,64]{1,0}, bf16[9,16]{1,0}) tuple(%new, %w)
}

ENTRY %main (p0: bf16[64,64], p1: bf16[9,16]) -> bf16[64,64] {
  %p0 = bf16[64,64]{1,0} parameter(0)
  %p1 = bf16[9,16]{1,0} parameter(1)
  %init = (bf16[64,64]{1,0}, bf16[9,16]{1,0}) tuple(%p0, %p1)
  %loop = (bf16[64,64]{1,0}, bf16[9,16]{1,0}) while(%init), condition=%cond, body=%body
  ROOT %out.1 = bf16[64,64]{1,0} get-tuple-element(%loop), index=0
}
"""


def test_a_step_moves_weights_and_what_is_filled_of_the_cache():
  """And scratch twice; an operand given twice counts once, and a pool not where it is
  written in place; of a table that is read by rows, the rows.
  """
  step = hlo_counts.Counter(STEP, {("bf16", 64 * 64): 0.25}, fill=0.5).step()
  row, w, cache, zeros = (2 * n for n in (2 * 16, 9 * 16, 64 * 64, 2 * 8))
  enter = 4 + row + row
  qkv = row + w + zeros + row + row + 2 * 4 * 32
  attend = row + cache / 4 + zeros + row + 0.5 * 2 * 4 * 64
  assert step.layer_bytes == qkv + attend
  assert step.num_bytes == qkv + attend + enter + zeros + 4 + 1
  assert (step.kernels, step.layer_kernels) == (6, 2)
  drafts = STEP.replace("a/enter/ffi_call", "a/draft/enter/ffi_call")
  step = hlo_counts.Counter(drafts, {("bf16", 64 * 64): 0.25}, fill=0.5).step()
  assert (step.draft_kernels, step.draft_bytes) == (1, enter)


@triton_kernels.requires_triton
def test_operands_that_are_read_by_rows_are_where_kernels_have_them():
  from tlt_jax.pallas_kernels.few_rows import products

  for kernel, operands in hlo_counts.BY_ROWS.items():
    names = getattr(products, kernel).arg_names
    assert operands == {name: names.index(name) for name in operands}


def step_of(**changes) -> dict:
  """Statistics of a plain step that is within all limits."""
  step = dict(kernels=150, kernels_per_layer=5.0, other_kernels=10)
  step |= dict(bytes_all_layers=110, least_bytes=100)
  return {"launches": {"CommandBuffer": 1}, "nodes": 150, "step": step | changes}


@pytest.mark.parametrize(
  "changes",
  [
    dict(kernels_per_layer=6.5),
    dict(other_kernels=11),
    dict(bytes_all_layers=111),
    dict(kernels=149),
  ],
)
def test_a_step_beyond_a_limit_is_named(changes):
  """Of kernels for few rows, on one GPU; what XLA makes of a step has no limits."""
  case = "h200", "plain", "triton"
  assert aot_report.broken(case, step_of()) == []
  assert len(aot_report.broken(case, step_of(**changes))) == 1
  assert aot_report.broken(("h200", "plain", "ref"), step_of(**changes)) == []
  assert aot_report.broken(("h200_2x2", "plain", "triton"), step_of(**changes)) == []


def test_a_step_in_too_many_launches_is_named():
  """On one GPU."""
  lines = ["000: kCommandBuffer [source]", "002: kWhile [sink]", "condition:"]
  lines += ["    003: kCustomKernel x", "  body:"]
  for kind in ("kCommandBuffer", "kCustomCall") * 57:
    lines += [f"    004: {kind} [a]", "        005: kCustomKernel y"]
  launches = aot_report.launches("\n".join(lines))
  assert launches == {"CommandBuffer": 57, "CustomCall": 57}
  assert aot_report.nodes("\n".join(lines)) == 1 + 3 * 57
  case = "h200", "plain", "triton"
  assert len(aot_report.broken(case, step_of() | {"launches": launches})) == 1


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
    tiny.slow("plain", 2, 4),
    ("chain", 2 + 2, 4 + 4),
    ("tree", 2 + 2, 4 + 4 + 4),
    tiny.slow("fused", 2 + 2, 4 + 4),
    # Of a block's two layers: of the context that the drafter lacks, and of the block.
    ("block_chain", 2 + 2, 4 + 8),
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
