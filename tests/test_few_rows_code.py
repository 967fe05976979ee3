"""Machine code of the kernels for few rows, for an H200 that need not be there.

What the bits of a row depend on: the instructions, their order, and how what is summed is
spread over a program's threads. None of it may depend on the number of rows.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from dev import machine_code
from tests import tiny
from tests import triton_kernels
from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import few_rows_drafter
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels import triton_call

pytestmark = triton_kernels.requires_triton

TYPES = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}
SHARED = 227 * 1024  # bytes of an SM
NAMES = ("enter", "qkv", "attend", "project", "gate_up", "head", "product", "join")
OF_SEVERAL = ("product", "join", "head")  # as a slice of several devices runs them
MODELS = {"smollm2": dataclasses.replace(tiny.SMOLLM2, dtype="bfloat16"), **shapes.DENSE}


def recorded(f, *args) -> dict[str, list[dict]]:
  """The calls of kernels in a function of shapes, by name."""
  found: dict[str, list[dict]] = {}

  def record(*args, kernel, out_type, name, **options):
    args = [*args, *jax.tree.leaves(out_type)]
    found.setdefault(name, []).append(dict(kernel=kernel, args=args) | options)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(triton_call, "triton_call", record)
    jax.eval_shape(f, *args)
  return found


@functools.cache
def calls(model: str, rows: int, count: int, devices: int) -> dict[str, list[dict]]:
  """The calls of kernels in a pass over chains of `count` nodes, by name.

  On a slice of so many devices.
  """
  config = dataclasses.replace(MODELS[model], num_layers=1)
  kv = jax.eval_shape(lambda: cache_lib.init(config, rows, 4096, kernels="triton"))
  params = jax.eval_shape(lambda: bench.weights(config))
  tree = bench.chains(jnp.zeros((rows, count), jnp.int32))
  start = jnp.zeros(rows, jnp.int32)
  step = functools.partial(bench.step, config, "triton")
  with jax.sharding.use_abstract_mesh(axes.make_mesh(devices, devices)):
    return recorded(step, params, kv, tree, start)


def of_drafter(kind: str, rows: int) -> dict[str, list[dict]]:
  """The calls in a step of a drafter of the 7B model, and in its head."""
  config = drafter_lib.of_target(MODELS["qwen2.5-7b"], kind)

  def step(target_params, params, pages, tokens):
    c, rotations = config.layer, layers.rotation(config.layer, jnp.arange(4096))
    args = params, target_params, target_params["head"], rotations
    weights = few_rows_drafter.make_weights(config, *args)
    cache = cache_lib.LayerCache(cache_lib.init_pool(c, 4, cache_lib.PAGE), pages)
    h, start = jnp.zeros((*tokens.shape, c.width), c.dtype), jnp.zeros(rows, jnp.int32)
    nodes, at = few_rows.chain(start, 1), tokens
    h, _ = few_rows_drafter.step(config, weights, h, tokens, at, nodes, cache, start)
    return few_rows_drafter.logits(config, weights, h)

  pages = jax.ShapeDtypeStruct((rows, 4096 // cache_lib.PAGE), jnp.int32)
  tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
  params = jax.eval_shape(
    lambda: jax.tree.map(
      lambda x: x.astype(config.layer.dtype),
      drafter_lib.init_params(config, jax.random.key(0)),
    )
  )
  target_params = jax.eval_shape(lambda: bench.weights(config.layer))
  return recorded(step, target_params, params, pages, tokens)


@functools.cache
def compiled(
  model: str, name: str, R: int, capability: int = 90
) -> list[machine_code.Machine]:
  """Every call of a kernel in a pass of R rows, in chains of four but for R = 16."""
  one = R == 16
  devices = MODELS[model].num_kv_heads if name in OF_SEVERAL else 1
  made = calls(model, R if one else R // 4, 1 if one else 4, devices)[name]
  return [built(call, capability) for call in made]


def built(call: dict, capability: int = 90) -> machine_code.Machine:
  known = {"kernel", "args", "grid", "num_warps", "num_stages", "aliases", "fused"}
  constants = {k: x for k, x in call.items() if k not in known}
  names = [n for n in call["kernel"].arg_names if n not in constants]
  types = {
    n: "i32" if isinstance(x, int) else TYPES[x.dtype.name]
    for n, x in zip(names, call["args"], strict=True)
  }
  return machine_code.compiled(
    call["kernel"],
    capability,
    types,
    constants,
    call["num_warps"],
    call["num_stages"],
    call.get("fused", True),
  )


def sums(machine: machine_code.Machine, name: str) -> list[tuple[str, str]]:
  """Sizes, but for the rows, and layouts of what is summed or compared over an axis."""
  text = re.sub(r"(instrShape = \[16), \d+, ", r"\1, R, ", machine.layouts)
  names = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
  pattern = r'"tt\.reduce"\(.*?\}\) : \(tensor<(\d+)x(\d+)xf32, (#\w+)>'
  found = re.findall(pattern, text, re.DOTALL)
  over_keys = name == "attend"  # f32[slots rows]; elsewhere f32[rows columns]
  return [(sizes[1 - over_keys], names[layout]) for *sizes, layout in found]


def tensor_core(machine: machine_code.Machine) -> set[str]:
  """Its instructions, without the number of rows."""
  found = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", machine.ptx)
  return {re.sub(r"(m64)n\d+(k16)", r"\1nR\2", text) for text in found}


@pytest.mark.parametrize(
  "model", ["qwen3-0.6b", tiny.slow("smollm2"), tiny.slow("qwen2.5-7b")]
)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_spill_nothing_and_fit_an_sm(name, model):
  for R in (16, 64):
    for machine in compiled(model, name, R):
      assert_fits(machine)


def assert_fits(machine: machine_code.Machine) -> None:
  assert machine.stack == 0 and machine.shared <= SHARED
  assert not re.search(r"\b(LDL|STL)\b", machine.machine_code)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_drafters_kernels_spill_nothing_and_fit_an_sm(kind):
  """Those that differ from the target's: of other widths, or without a norm."""
  for rows in (16, 64):
    found = of_drafter(kind, rows)
    for call in [*found["qkv"], found["project"][0], *found["head"]]:
      assert_fits(built(call))


@pytest.mark.parametrize(
  "model", ["qwen3-0.6b", tiny.slow("smollm2"), tiny.slow("qwen2.5-7b")]
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_change_no_order_of_sums(name, model):
  """The same tensor core instruction but for its N; sums over the same threads."""
  alone = compiled(model, name, 16)
  for R in (32, 64, 128):
    for one, several in zip(alone, compiled(model, name, R), strict=True):
      assert tensor_core(one) == tensor_core(several)
      assert len(tensor_core(one)) == (name not in ("enter", "join"))
      assert sums(one, name) == sums(several, name)
      for machine in (one, several):
        # No sum or product that a later compiler could fuse by shape; none by arrival.
        assert not re.search(r"\b(add|mul|sub)\.f32\b", machine.ptx)
        assert not re.search(r"\b(atom|red)\S*\.b?f(16|32)", machine.ptx)


def test_programs_are_enough_and_not_many():
  """Splits of O and down of Qwen2.5-7B, on one device and on four."""
  products = pytest.importorskip("tlt_jax.pallas_kernels.few_rows.products")
  tiles = 3584 // 64
  found = [products.splits(k, tiles) for k in (3584, 18_944, 3584 // 4, 18_944 // 4)]
  assert found == [4, 8, 7, 2]  # 74 steps of the last have divisors 1, 2, 37
