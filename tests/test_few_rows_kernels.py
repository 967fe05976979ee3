"""A decoder by the kernels for few rows, interpreted: exact, and bit for bit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from tests import mutants
from tests import tiny
from tests import triton_kernels
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import few_rows as kernels
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.speculation import tree as tree_lib

pytestmark = triton_kernels.requires_triton

LENGTH = 192
TREE = (0, 0, 0, 1, 1, 3, 2)
STEP = bench.step
CONFIGS = {n: bench.tiny(shapes.MODELS[n]) for n in ("qwen2.5-7b", "qwen3-0.6b")}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """In steps of 32, and short splits, so that each sum is cut into parts."""
  triton = kernels.of("triton")
  monkeypatch.setattr(triton, "_STEP", 32)
  monkeypatch.setattr(triton, "_SPLIT", 64)
  with triton_kernels.interpreted():
    yield


def made(config, tree):
  """The arguments of a pass: weights, a cache with NaN behind its tokens, starts."""
  B, J = tree.tokens.shape
  start = np.array([61, 0, LENGTH - J, 133][:B], np.int32)
  return bench.weights(config), bench.cache(config, B, LENGTH, start), tree, start


def by_target(config, params, kv, tree, start):
  """The same pass by XLA."""
  ancestors = tree_lib.ancestors(tree.parent)
  rotations = layers.rotation(config, jnp.arange(kv.length))
  args = tree.tokens, start[:, None] + tree.depth, (0,)
  seen = seen_lib.of_mask(jnp.asarray(start), ancestors)
  kv = kv.replace(pools=jax.tree.map(jnp.nan_to_num, kv.pools))  # it reads all slots
  apply = functools.partial(target.Target(config).apply, {"params": params})
  final, tapped, kv = apply(
    *args, seen, kv, jnp.asarray(start), rotations, method=target.Target.with_taps
  )
  return apply(final, method=target.Target.logits), final, tapped, kv


def on(devices, config, impl, *args, deepest=None):
  """`bench.step` on a slice of several devices."""
  step = functools.partial(STEP, config, impl, deepest=deepest)
  return slices.per_slice(tiny.mesh(1, devices), step, slices.WHOLE, slices.WHOLE)(*args)


def assert_as_target(config, tree, impl="triton", step=STEP):
  """To 5% of the largest number: what bfloat16's roundings make of two orders of sums.

  Triton's interpreter cuts numbers off where a GPU rounds them to bfloat16.
  """
  args = made(config, tree)
  found = jax.jit(functools.partial(step, config, impl))(*args)
  wanted = by_target(config, *args)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    written = np.isfinite(a)
    assert np.abs(a - b)[written].max() < 0.05 * np.abs(b).max()
  assert all(np.isfinite(x.astype(jnp.float32)).all() for x in found[:3])
  kept, before = (
    np.isfinite(x.pools[0].k.astype(jnp.float32)) for x in (found.kv, args[1])
  )
  heads = config.num_kv_heads * config.head_dim
  assert (kept & ~before).sum() == tree.tokens.size * heads


def passes(config, kind, rows):
  count = len(TREE) if kind == "tree" else kind
  tokens = bench.tokens_of(config, rows, count)
  return bench.trees(tokens, TREE) if kind == "tree" else bench.chains(tokens)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
  "kind, rows", [tiny.slow(1, 1), tiny.slow(4, 3), ("tree", 3), tiny.slow(16, 2)]
)
@pytest.mark.parametrize("impl", ["triton", "ref"])
def test_a_pass_is_that_of_the_target(name, kind, rows, impl):
  """With biases, and with norms of queries and keys."""
  assert_as_target(CONFIGS[name], passes(CONFIGS[name], kind, rows), impl)


# A vocabulary of whole tiles per device, with a part of one, not split.
@pytest.mark.parametrize("vocabulary", [tiny.slow(256), 260, tiny.slow(257)])
@pytest.mark.parametrize(
  "impl, devices", [("triton", 2), tiny.slow("triton", 4), tiny.slow("ref", 2), ("ref", 4)]
)
def test_the_devices_of_a_slice_make_a_pass_of_the_target(impl, devices, vocabulary):
  config = dataclasses.replace(
    CONFIGS["qwen2.5-7b"],
    vocab_size=vocabulary,
    num_kv_heads=4,
    mlp_width=256,
    unused_rows=((100, 200),),
  )
  step = functools.partial(on, devices)
  assert_as_target(config, passes(config, "tree", 3), impl, step)


@pytest.mark.slow
@pytest.mark.parametrize(
  "fault",
  [
    ("for part in range(1, PARTS)", "for part in range(2, PARTS)"),
    ("own = tl.minimum(first, V - BN)", "own = first - first"),
    ("valid &= (own + n >= first)[:, None]", "valid &= (own + n > first)[:, None]"),
  ],
)
def test_faults_of_several_devices_are_found(fault, monkeypatch, tmp_path):
  """Also in the last tile of logits, where it is a part of one."""
  triton = kernels.of("triton")
  mutant = mutants.load(triton.products.__file__, fault, tmp_path)
  monkeypatch.setattr(triton, "products", mutant)
  config = dataclasses.replace(CONFIGS["qwen3-0.6b"], vocab_size=192)
  with pytest.raises(AssertionError):
    assert_as_target(config, passes(config, 1, 2), step=functools.partial(on, 2))


@pytest.mark.parametrize("rows, count", [(2, 1), (2, 4)])
def test_devices_gather_what_they_add(rows, count):
  """An all-reduce would add it in an order of its own."""
  config = CONFIGS["qwen3-0.6b"]
  args = made(config, passes(config, count, rows))
  run = jax.jit(functools.partial(on, 2, config, "ref"))
  text = run.lower(*args).compile().as_text()
  moved = re.findall(r" = (\S+?)(?:\{\S*)? (all-\w+|reduce-scatter|collective-\w+)\(", text)
  M, D = rows * count, config.width
  times = 1 + 2 * config.num_layers  # embedding, O and down
  assert moved == times * [(f"f32[2,{M},{D}]", "all-gather")]


PRODUCTS = {
  "a tile's squares": ("for tile in range(TILES)", "for tile in range(1)"),
  "a part is left out": ("for split in range(1, SPLITS)", "for split in range(2, SPLITS)"),
  "rotated backwards": ("b * cos + a * sin", "b * cos - a * sin"),
  "the head is not normed": ("acc * by", "acc"),
  "a tile's count stays": ("    tl.store(count_ptr + tile, 0)", "    pass"),
}
ATTENTION = {
  "the tail is not masked": ("slot[:, None] <= last[None, :]", "slot[:, None] >= 0"),
  "splits are not rescaled": ("sums = sums * mine[:, None] +", "sums = sums +"),
  "a node sees other paths": ("own = tl.where(depth < 0, slot, own)", "own = slot"),
  "a row's count stays": ("  tl.store(count_ptr + row, 0)", ""),
  "programs are miscounted": ("(splits - whole) * paths", "(splits - whole)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PRODUCTS, *ATTENTION])
def test_faults_are_found(fault, monkeypatch, tmp_path):
  """In the kernels themselves."""
  triton = kernels.of("triton")
  name = "products" if fault in PRODUCTS else "attention"
  file = getattr(triton, name).__file__
  mutant = mutants.load(file, (PRODUCTS | ATTENTION)[fault], tmp_path)
  monkeypatch.setattr(triton, name, mutant)
  config = CONFIGS["qwen3-0.6b"]
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    assert_as_target(config, passes(config, "tree", 3))


@pytest.mark.parametrize(
  "fault", [None, ("kept = (page != SINK)[:, None]", "kept = valid")]
)
def test_a_row_without_pages_writes_nothing(fault, monkeypatch, tmp_path):
  """A free slot, whose table points at the sink page."""
  triton = kernels.of("triton")
  mutant = mutants.load(triton.products.__file__, fault, tmp_path)
  monkeypatch.setattr(triton, "products", mutant)
  config = CONFIGS["qwen3-0.6b"]
  params, kv, tree, start = made(config, passes(config, 1, 2))
  kv = kv.of_live(jnp.array([True, False]))
  found = jax.jit(functools.partial(bench.step, config, "triton"))(params, kv, tree, start)
  changed = 0
  for a, b in zip(jax.tree.leaves(found.kv.pools), jax.tree.leaves(kv.pools), strict=True):
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    changed += int(np.sum((a != b) & ~(np.isnan(a) & np.isnan(b))))
  of_one = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  assert (changed == of_one) == (fault is None)


@pytest.mark.slow  # whole rollouts, which are not, show the same: `test_few_rows_rollout`
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-0.6b"])
@pytest.mark.parametrize("kind, rows", [("tree", 2), (4, 3), (16, 2)])
def test_a_row_has_its_bits_whatever_is_computed_with_it(name, kind, rows):
  """Nodes of chains and trees among others, and plain steps of one request alone."""
  config = CONFIGS[name]
  found = bench.differing_bits(config, "triton", passes(config, kind, rows), LENGTH)
  assert found["differing"] == 0 and found["numbers"] > 5_000


@pytest.mark.parametrize("kind, rows", [tiny.slow(4, 2), tiny.slow("tree", 2)])
def test_a_row_has_its_bits_on_the_devices_of_a_slice(kind, rows, monkeypatch):
  config = dataclasses.replace(CONFIGS["qwen2.5-7b"], vocab_size=192)
  monkeypatch.setattr(bench, "step", functools.partial(on, 2))
  found = bench.differing_bits(config, "triton", passes(config, kind, rows), LENGTH)
  assert found["differing"] == 0 and found["numbers"] > 5_000


def products(impl, x, w, residual, scale, head):
  """Of two devices that have a half of the columns each; and their logits."""
  impl, count = kernels.of(impl), jnp.zeros(8, jnp.int32)
  halves = (impl.product(*(y[:, i::2] for y in (x, w)), count) for i in range(2))
  found = impl.join(jnp.stack([*halves]), residual, scale)
  return *found._replace(squares=found.squares.T), impl.head(found, head, 1e-6)


def test_parts_of_a_product_have_the_bits_of_a_row_alone():
  keys = iter(jax.random.split(jax.random.key(0), 5))

  def random(*shape):
    return jax.random.normal(next(keys), shape, jnp.bfloat16)

  x, residual = random(64, 256), random(64, 128)
  weights = random(128, 256), random(128), random(96, 128)

  def of(impl, rows):
    w, *others = weights
    return [np.asarray(y) for y in products(impl, x[rows], w, residual[rows], *others)]

  whole = of("triton", slice(64))
  for one, other in zip(whole, of("ref", slice(64)), strict=True):
    one, other = one.astype(np.float32), other.astype(np.float32)
    np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())
  for rows in (slice(5, 6), slice(40, 44)):
    for one, other in zip(whole, of("triton", rows), strict=True):
      np.testing.assert_array_equal(one[rows].view(np.uint16), other.view(np.uint16))


@pytest.mark.parametrize("fault", [None, tiny.slow(("acc * by", "acc * by * M"))])
def test_the_kernel_is_named_whose_rows_depend_on_others(fault, monkeypatch, tmp_path):
  triton = kernels.of("triton")
  mutant = mutants.load(triton.products.__file__, fault, tmp_path)
  monkeypatch.setattr(triton, "products", mutant)
  config = CONFIGS["qwen3-0.6b"]
  found = bench.differing_by_kernel(config, "triton", 3, LENGTH)
  assert [n for n, count in found.items() if count] == (["11 head"] if fault else [])


@pytest.mark.gpu
@pytest.mark.parametrize("kind, rows", [(4, 4), (4, 16), (16, 4), (1, 64), ("tree", 4)])
@pytest.mark.parametrize("name", shapes.DENSE)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bits_on_gpus(devices, name, kind, rows, monkeypatch):
  if devices > jax.device_count():
    pytest.skip(f"needs {devices} GPUs")
  monkeypatch.setattr(bench, "step", functools.partial(on, devices))
  config = dataclasses.replace(shapes.MODELS[name], vocab_size=4096)
  found = bench.differing_bits(config, "triton", passes(config, kind, rows), 512)
  assert found["differing"] == 0
