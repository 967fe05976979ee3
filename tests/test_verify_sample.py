"""Every way to draw draws the same token, equally likely, from any part of a vocabulary.

Kernels are interpreted here, and compiled for TPUs and GPUs that are not there.
"""

import functools
import inspect

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dev import hlo_counts
from dev import machine_code
from tests import mutants
from tests import tiny
from tests import tpu_kernels
from tests import triton_kernels
from tlt_jax import axes
from tlt_jax import noise
from tlt_jax.pallas_kernels import find_cut
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.pallas_kernels import verify_sample
from tlt_jax.pallas_kernels.verify_sample import pallas
from tlt_jax.pallas_kernels.verify_sample import parts
from tlt_jax.pallas_kernels.verify_sample import ref
from tlt_jax.spec_decode.decoding import sampling
from tlt_jax.spec_decode.decoding import slices

TRITON = pytest.param("triton", marks=triton_kernels.requires_triton)
KERNELS = ("interpret", TRITON)
# Greedy, filtered, cold, hot, plain.
TEMPERATURE = np.array([0.0, 1.0, 0.6, 1.7, 1.0], np.float32)
TOP_P = np.array([1.0, 0.8, 0.9, 1.0, 1.0], np.float32)


def some_rows(V, rows=5, seed=0):
  """Logits, keys, temperatures and cuts; the first rows are those of all kinds."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(0, 3, (rows, V)).astype(np.float32)
  key = np.asarray(noise.row_key(7, np.arange(rows, dtype=np.uint32), 11))
  kind = np.arange(rows) % 5
  cut = np.full(rows, -np.inf, np.float32)
  for i in np.flatnonzero(TOP_P[kind] < 1):
    falling = np.sort(logits[i])[::-1]
    p = special.softmax(falling.astype(np.float64) / TEMPERATURE[kind[i]])
    cut[i] = falling[np.sum(np.cumsum(p) - p < TOP_P[kind[i]]) - 1]
  return logits, key, TEMPERATURE[kind], cut


@functools.cache
def drawn_by(impl):
  """`verify_sample`, compiled where that is of use; on numpy arrays."""
  draw = functools.partial(verify_sample.verify_sample, impl=impl)
  run = jax.jit(draw)

  def call(*args):
    with triton_kernels.interpreted():
      return jax.device_get(run(*args))

  return call


def assert_exact(sample, logits, key, temperature, cut):
  """Against float64, and noise whose argmax is no near-tie."""
  x = logits.astype(np.float64) / np.where(temperature > 0, temperature, 1.0)[:, None]
  g = np.asarray(noise.gumbel(key, jnp.arange(logits.shape[1])), np.float64)
  kept = logits >= cut[:, None]
  perturbed = np.where(kept, x + g * (temperature > 0)[:, None], -np.inf)
  if logits.shape[1] > 1:
    second, best = np.sort(perturbed, -1)[:, -2:].T
    assert (best - second > 1e-4).all()
  token = perturbed.argmax(-1)
  np.testing.assert_array_equal(sample.token, token)

  def at(x):
    return np.take_along_axis(x, token[:, None], -1)[:, 0]

  before = at(special.log_softmax(x, -1))
  after = at(special.log_softmax(np.where(kept, x, -np.inf), -1))
  np.testing.assert_allclose(sample.logp, before, rtol=1e-6, atol=3e-6)
  after = np.where(temperature > 0, after, 0.0)
  np.testing.assert_allclose(sample.logp_filtered, after, rtol=1e-6, atol=3e-6)


SIZES = [(1, 5), (64, 11), (129, 5), (32_000, 3), (49_152, 2), (151_936, 2)]


@pytest.mark.parametrize(("V", "rows"), SIZES)
@pytest.mark.parametrize("impl", ["ref", *KERNELS])
def test_it_is_the_argmax_under_noise_and_its_probability(impl, V, rows):
  """Of vocabularies that blocks do and do not divide, greedy and filtered rows too."""
  args = some_rows(V, rows)
  assert_exact(drawn_by(impl)(*args), *args)


@pytest.mark.parametrize("impl", ["ref", *KERNELS])
def test_without_a_cut_nothing_is_cut(impl):
  logits, key, temperature, _ = some_rows(5000)
  cut = np.full(5, -np.inf, np.float32)
  wanted = drawn_by(impl)(logits, key, temperature, cut)
  for a, b in zip(drawn_by(impl)(logits, key, temperature), wanted, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("V", "rows"), [(64, 11), (32_000, 5), (151_936, 48)])
@pytest.mark.parametrize(
  "impl",
  [
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param("pallas", marks=pytest.mark.tpu),
  ],
)
def test_an_accelerator_draws_the_same(impl, V, rows):
  """By the kernel for it; and a row the same bits alone."""
  args = some_rows(V, rows)
  run = jax.jit(functools.partial(verify_sample.verify_sample, impl=impl))
  sample = jax.device_get(run(*args))
  assert_exact(sample, *args)
  for whole, alone in zip(sample, run(*(x[3:4] for x in args)), strict=True):
    np.testing.assert_array_equal(alone, whole[3:4])


def test_it_draws_what_the_samplers_draw_draws():
  """`sampling.draw`, whose noise and filters are the same."""
  logits = np.random.default_rng(7).normal(0, 2, (5, 5000)).astype(np.float32)
  filters = (
    np.array([1.0, 0.7, 0.7, 0.0, 1.3], np.float32),
    np.array([0, 50, 40, 1, 12], np.int32),
    np.array([0.5, 1.0, 0.95, 1.0, 0.6], np.float32),
    np.array([0.0, 0.0, 0.01, 0.05, 0.0], np.float32),
  )
  position = np.arange(5, dtype=np.int32)
  s = sampling.Sampling(np.full(5, 3, np.uint32), np.arange(5, dtype=np.uint32), *filters)
  drawn = jax.jit(sampling.draw)(logits, s, position)
  key = noise.row_key(s.seed, s.request, position)
  cut = jax.jit(find_cut.find_cut)(logits, *filters)
  sample = drawn_by("ref")(logits, key, filters[0], cut)
  np.testing.assert_array_equal(sample.token, drawn.token)
  np.testing.assert_allclose(sample.logp, drawn.logp, atol=3e-6)
  np.testing.assert_allclose(sample.logp_filtered, drawn.logp_filtered, atol=3e-6)


def sample_part(impl):
  """An implementation, of some tokens of a row."""
  if impl == "triton":
    from tlt_jax.pallas_kernels.verify_sample import triton

    return triton.sample_part
  return functools.partial(pallas.sample_part, interpret=True)


@pytest.mark.parametrize("impl", KERNELS)
def test_unequal_shards_combine(impl):
  """Tokens 0-1665, 1666-2499 and 2500-4999 on their own."""
  logits, *rest = some_rows(5000)
  found = []
  with triton_kernels.interpreted():
    for start, stop in ((0, 1666), (1666, 2500), (2500, 5000)):
      run = jax.jit(sample_part(impl))
      found.append(run(logits[:, start:stop], *rest, jnp.int32(start)))
  whole = parts.combine_all(jax.tree.map(lambda *x: jnp.stack(x), *found))
  assert_exact(parts.finish(whole, rest[1]), logits, *rest)


@pytest.mark.parametrize("impl", KERNELS)
def test_a_row_is_the_same_bits_in_any_batch(impl):
  """Alone, among others at another place, and beside rows of NaN."""
  args = some_rows(9000)
  whole = drawn_by(impl)(*args)
  alone = drawn_by(impl)(*(x[3:4] for x in args))
  order = np.array([4, 0, 3, 2, 1, 3, 0, 2, 4, 1, 3])
  among = [x[order] for x in args]
  among[0][[1, 6]] = np.nan
  shuffled = drawn_by(impl)(*among)
  valid = ~np.isin(np.arange(11), [1, 6])
  for name in parts.Sample._fields:

    def of(sample, name=name):
      return getattr(sample, name)

    np.testing.assert_array_equal(of(alone), of(whole)[3:4])
    np.testing.assert_array_equal(of(shuffled)[valid], of(whole)[order][valid])


def test_a_row_of_nan_has_a_token_and_no_probability():
  """A token of the vocabulary, so that a dead row cannot hurt."""
  logits, *rest = some_rows(64)
  logits[2] = np.nan
  for impl in ("ref", "interpret"):
    sample = drawn_by(impl)(logits, *rest)
    assert sample.token[2] == 0 and np.isnan(sample.logp[2])


# Of the noise.


def hashed(key, ids):
  """Both halves of the hash u32[rows ids], in numpy and unsigned."""

  def mix(x):
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)

  upper = mix(mix(ids.astype(np.uint32) ^ key[:, :1]) + key[:, 1:])
  return upper, mix(upper ^ np.uint32(0xB7E15162))


def noise_in_xla(key, ids):
  upper = noise.high(key[:, :1], key[:, 1:], ids)
  return upper, noise.mix(upper ^ noise.LOW), pallas._gumbel(upper)


def noise_in_pallas(key, ids):
  def kernel(key, ids, *out):
    for ref_, x in zip(out, noise_in_xla(key[...], ids[...]), strict=True):
      ref_[...] = x

  def shape(dtype):
    return jax.ShapeDtypeStruct((key.shape[0], ids.shape[1]), dtype)

  out = [shape(jnp.int32), shape(jnp.int32), shape(jnp.float32)]
  return pl.pallas_call(kernel, out_shape=out, interpret=True)(key, ids)


def noise_in_triton(key, ids):
  from tests import noise_triton

  rows, count = key.shape[0], ids.shape[1]

  def shape(dtype):
    return jax.ShapeDtypeStruct((rows, count), dtype)

  return triton_call.triton_call(
    key,
    ids,
    kernel=noise_triton.noise_kernel,
    out_type=[shape(jnp.int32), shape(jnp.int32), shape(jnp.float32)],
    grid=(rows,),
    name="noise",
    num_warps=4,
    num_stages=3,
    COUNT=count,
    LOW=noise.LOW,
  )


@pytest.mark.parametrize(
  "compiler",
  [
    noise_in_xla,
    noise_in_pallas,
    pytest.param(noise_in_triton, marks=triton_kernels.requires_triton),
  ],
)
def test_every_compiler_computes_the_same_noise(compiler):
  """Integers bit for bit, noise within 1e-6, for the smallest and the largest ids too."""
  ids = np.r_[0:600, 151_536:151_936, 2**31 - 24 : 2**31].astype(np.int32)[None]
  key = np.random.default_rng(0).integers(0, 2**32, (20, 2), np.uint32)
  with triton_kernels.interpreted():
    found = jax.jit(compiler)(key.view(np.int32), ids)
  upper, lower, g = map(np.asarray, found)
  wanted = hashed(key, ids)
  np.testing.assert_array_equal(upper.view(np.uint32), wanted[0])
  np.testing.assert_array_equal(lower.view(np.uint32), wanted[1])
  wanted = noise.gumbel(key, ids[0])
  np.testing.assert_allclose(g, wanted, rtol=1e-6, atol=1e-6)


def test_the_kernels_noise_is_finite_for_every_hash():
  """From the largest, where the hash is 0, to the smallest, where it is 2^32 - 1."""
  upper = np.array([0, 1, 2, 255, 2**16, 2**29, 2**31, 2**32 - 129, 2**32 - 1], np.uint32)
  lower = np.asarray(noise.mix(upper.view(np.int32) ^ np.int32(noise.LOW)))
  v = (upper.astype(np.float64) + lower.view(np.uint32) * 2.0**-32) * 2.0**-32
  g = np.asarray(jax.jit(pallas._gumbel)(upper.view(np.int32)))
  exact = -np.log(-np.log1p(-np.minimum(v, 1 - 2.0**-24)))
  np.testing.assert_allclose(g, exact, rtol=1e-6, atol=1e-6)


# Of shards.


def on_shards(impl):
  """The text of a program for a mesh of 2 x 2, what it draws, and its arguments."""
  mesh = tiny.mesh(2, 2)
  args = some_rows(5000, rows=10)

  def looped(*args):
    def step(i, _):
      return verify_sample.verify_sample(args[0] + 0.0 * i, *args[1:], impl=impl)

    zero = args[2] * 0.0
    start = parts.Sample(zero.astype(jnp.int32), zero, zero)
    return jax.lax.fori_loop(0, 2, step, start)

  run = jax.shard_map(
    looped,
    mesh=mesh,
    in_specs=slices.ROWS,
    out_specs=slices.ROWS,
    axis_names={axes.DATA},
    # Interpreted kernels take no part in the check of what varies.
    check_vma=impl == "ref",
  )

  def put(x, *spec):
    return jax.device_put(x, axes.sharding(mesh, *spec))

  placed = put(args[0], axes.DATA, axes.MODEL), *(put(x, axes.DATA) for x in args[1:])
  compiled = jax.jit(run).lower(*placed).compile()
  return compiled.as_text(), jax.device_get(compiled(*placed)), args


@pytest.mark.parametrize("impl", ["ref", "interpret"])
def test_shards_of_the_vocabulary_draw_the_same(impl):
  """Rows over two slices, in each the vocabulary over two devices.

  They exchange one round of sums, each of [shards R] numbers; no logits are gathered.
  """
  text, sample, args = on_shards(impl)
  assert_exact(sample, *args)
  exchanged = hlo_counts.collectives(text)
  assert {i.opcode for i in exchanged} == {"all-reduce"}
  assert max(i.num_elements for i in exchanged) <= 2 * 5 * len(parts.Part._fields)


def test_sums_of_shards_do_not_depend_on_where_a_row_stands():
  """Four shards, whose sums a ring would take in an order by place."""
  mesh = tiny.mesh(1, 4)
  args = some_rows(4000)
  rows = [np.tile(x, (2,) + (1,) * (x.ndim - 1)) for x in args]
  run = slices.per_slice(mesh, verify_sample.verify_sample, slices.ROWS, slices.ROWS)

  def put(x, *spec):
    return jax.device_put(x, axes.sharding(mesh, *spec))

  sample = jax.jit(run)(put(rows[0], None, axes.MODEL), *map(put, rows[1:]))
  for x in jax.device_get(sample):
    np.testing.assert_array_equal(x[:5], x[5:])
  assert_exact(jax.tree.map(lambda x: np.asarray(x)[:5], sample), *args)


def test_a_vocabulary_that_the_shards_do_not_divide_is_whole():
  """63 tokens over two devices."""
  mesh = tiny.mesh(1, 2)
  args = some_rows(63)
  run = slices.per_slice(mesh, verify_sample.verify_sample, slices.ROWS, slices.ROWS)
  assert_exact(jax.device_get(jax.jit(run)(*args)), *args)


# Of compilers.


def shapes(R, V):
  """Of the arguments."""
  shape, row = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((R,), jnp.float32)
  return shape((R, V), jnp.float32), shape((R, 2), jnp.uint32), row, row


@pytest.mark.parametrize("kind", tpu_kernels.KINDS)
def test_it_lowers_for_tpus(kind):
  """For a vocabulary of 151,936 tokens and for a small one."""
  draw = functools.partial(verify_sample.verify_sample, impl="pallas")
  for R, V in ((128, 151_936), (3, 64)):
    text = tpu_kernels.lowered(draw, kind, *shapes(R, V))
    assert text.count("tpu_custom_call") == 1


@triton_kernels.requires_triton
def test_it_lowers_for_cuda(monkeypatch):
  """For an H100 or H200, where jax's plugin is installed."""
  triton_kernels.lower_for(90, monkeypatch)
  draw = functools.partial(verify_sample.verify_sample, impl="triton")
  traced = jax.jit(draw).trace(*shapes(128, 151_936))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("triton_kernel_call") == 1


@functools.cache
def machine(capability, filters):
  from tlt_jax.pallas_kernels.verify_sample import triton

  floats = ("logits", "temperature", "cut", "best", "at", "top", "total", "kept")
  types = {f"{name}_ptr": "*fp32" for name in floats}
  types |= {f"{name}_ptr": "*i32" for name in ("key", "offset", "token")}
  sizes = dict(R=128, V=151_936, TILE=triton.TILE, TILES=triton.TILES, FILTERS=filters)
  return machine_code.compiled(
    triton.verify_sample_kernel,
    capability,
    types,
    sizes | triton.CONSTANTS,
    triton.NUM_WARPS,
    triton.NUM_STAGES,
  )


@triton_kernels.requires_triton
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_gpus(capability, filters):
  """Without spilled registers, for drivers of CUDA 12.9 on, and a logit takes at most 45
  instructions where no token of a tile may win and nothing is filtered.
  """
  from tlt_jax.pallas_kernels.verify_sample import triton

  made = machine(capability, filters)
  assert made.stack == 0
  assert made.ptx_version <= (9, 0)
  per_thread = triton.TILE / (32 * triton.NUM_WARPS)
  assert machine_code.shortest_loop(made.machine_code) / per_thread <= 45


# Of faults.

PALLAS_FAULTS = {
  "what is beyond counts": ("jnp.where(inside, logits[...], -jnp.inf)", "logits[...]"),
  "nothing is cut": ("keep = inside & (raw >= least)", "keep = inside"),
  "the last kept is cut": ("raw >= least", "raw > least"),
  "the sum is not rescaled": ("out.total[...] * old", "out.total[...]"),
  "what is kept is not rescaled": ("out.kept[...] * old", "out.kept[...]"),
  "no first block": ("block == 0", "block == 1"),
  "ids of a block": ("place += block", "place += 0 * block"),
  "the later of equals": ("best > out.best", "best >= out.best"),
  "the bound is too low": ("out.best[:, :1] + (", "out.best[:, :1] - 12 + ("),
  "noise where it is greedy": ("jnp.where(random, _gumbel(upper), 0.0)", "_gumbel(upper)"),
}
TRITON_FAULTS = {
  "what is beyond counts": (', mask=inside, other=-float("inf")', ""),
  "nothing is cut": ("keep = inside & (raw >= cut)", "keep = inside"),
  "the sum is not rescaled": ("total * old", "total"),
  "what is kept is not rescaled": ("kept * old", "kept"),
  "a tile less": ("start + TILE * TILES, V)", "start + TILE * TILES - TILE, V)"),
  "the later of equals": ("highest > best", "highest >= best"),
  "the bound is too low": ("lift = m - best + (", "lift = m - best - 12 + ("),
  "noise where it is greedy": ("tl.where(random, gumbel(", "tl.where(ids >= 0, gumbel("),
  "another row's key": ("key_ptr + row * 2)", "key_ptr + row)"),
  "another row's part": ("* R + row", "* R + (R - 1 - row)"),
}


@functools.cache
def telling():
  """A case that tells the faults: logits that grow, equals, cuts, a row of NaN last."""
  logits, key, temperature, _ = some_rows(1900)
  logits += np.linspace(0, 9, 1900, dtype=np.float32)
  logits[0, 100:1000:100] = 50.0
  logits[4] = np.nan
  cut = np.sort(logits)[np.arange(5), [-1, -900, -1, -9, 0]]
  cut[2] = -np.inf
  return logits, key, temperature, cut


def finds(sample_part):
  """Whether the tests would find that an implementation is wrong."""
  logits, key, temperature, cut = telling()
  offset = 700
  with triton_kernels.interpreted():
    part = jax.jit(sample_part)(logits, key, temperature, cut, jnp.int32(offset))
  wanted = ref.sample_part(logits, key, temperature, cut, jnp.int32(offset))
  sample, wanted = (parts.finish(x, temperature) for x in (part, wanted))
  try:
    for x, y in zip(sample, wanted, strict=True):
      np.testing.assert_allclose(x[:4], y[:4], rtol=1e-6, atol=3e-6)
  except AssertionError:
    return True
  return False


def mutant(file, fault, folder):
  """The function of an implementation that has a fault."""
  module = mutants.load(file, fault, folder)
  module.TILE, module.TILES = 512, 2
  return module.sample_part


@pytest.mark.parametrize("fault", [None, *PALLAS_FAULTS])
def test_faults_of_the_pallas_kernel_are_found(fault, tmp_path):
  """And none in the kernel as it is."""
  part = mutant(pallas.__file__, PALLAS_FAULTS.get(fault), tmp_path)
  assert finds(functools.partial(part, interpret=True)) == (fault is not None)


@triton_kernels.requires_triton
@pytest.mark.parametrize("fault", [None, *TRITON_FAULTS])
def test_faults_of_the_triton_kernel_are_found(fault, tmp_path):
  """And none in the kernel as it is."""
  file = inspect.getfile(pallas).replace("pallas.py", "triton.py")
  part = mutant(file, TRITON_FAULTS.get(fault), tmp_path)
  assert finds(part) == (fault is not None)
