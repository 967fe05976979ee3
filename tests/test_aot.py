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


def test_a_step_in_too_many_launches_is_named():
  """On one GPU."""
  lines = ["000: kCommandBuffer [source]", "002: kWhile [sink]", "condition:"]
  lines += ["    003: kCustomKernel x", "  body:"]
  for kind in ("kCommandBuffer", "kCustomCall") * 57:
    lines += [f"    004: {kind} [a]", "        005: kCustomKernel y"]
  launches = aot_report.launches("\n".join(lines))
  assert launches == {"CommandBuffer": 57, "CustomCall": 57}
  case = "h200", "plain", "triton"
  assert aot_report.broken(case, {"launches": {"CommandBuffer": 2, "Conditional": 1}}) == []
  assert len(aot_report.broken(case, {"launches": launches})) == 1


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
