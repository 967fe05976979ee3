"""Attention of draft nodes to a cache: each implementation against float64."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dev import machine_code
from tests import mutants
from tests import tiny
from tests import tpu_kernels
from tests import triton_kernels
from tlt_jax import axes
from tlt_jax.pallas_kernels import tree_attention
from tlt_jax.pallas_kernels.tree_attention import pallas
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

IMPLS = ["ref", "interpret", pytest.param("triton", marks=triton_kernels.requires_triton)]
KERNELS = IMPLS[1:]
attend = jax.jit(tree_attention.tree_attention, static_argnames="impl")


@pytest.fixture(autouse=True)
def _without_gpu(request):
  """Lets impl="triton" interpret its kernels, but for the tests of accelerators."""
  if any(map(request.node.get_closest_marker, ("gpu", "tpu"))):
    yield
  else:
    with triton_kernels.interpreted():
      yield


class Case(NamedTuple):
  """Arguments of `tree_attention`."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  start: np.ndarray  # i32[B]
  tail: np.ndarray  # bool[B J size]
  pages: np.ndarray | None = None  # i32[B S/L], with k and v as f[P K L H]

  def __call__(self, attend=attend, **options):
    """Runs an implementation on it, in pages: f[B J N H], in float64."""
    if self.pages is None:
      return self.in_pages(64)(attend, **options)
    k, v = self.k, self.v
    if options.get("impl") == "ref":  # multiplies what nobody sees by 0
      k, v = (np.where(x != x, 0, x).astype(x.dtype) for x in (k, v))
    seen = seen_lib.of_mask(jnp.asarray(self.start), jnp.asarray(self.tail))
    out = attend(self.q, k, v, seen, self.pages, **options)
    return np.asarray(out).astype(float)

  def rows(self, rows) -> "Case":
    return Case(*(x[rows] for x in self[:5]))

  def in_pages(self, L: int, shared: int = 0) -> "Case":
    """With the cache in pages of L slots, in random order, and NaN in a page of nobody.

    The first `shared` pages of all rows are those of the first one.
    """
    B, K, S, H = self.v.shape
    M = -(-S // L)
    order = np.random.default_rng(0).permutation(B * M + 1).astype(np.int32)
    pages, nobody = order[:-1].reshape(B, M), order[-1]
    pages[:, :shared] = pages[0, :shared]
    pools = []
    for x in (self.k, self.v):
      x = np.pad(x, ((0, 0), (0, 0), (0, M * L - S), (0, 0)))
      pool = np.full((B * M + 1, K, L, H), np.nan, x.dtype)
      pool[pages] = x.reshape(B, K, M, L, H).swapaxes(1, 2)
      pools.append(pool)
    beyond = np.arange(M) * L >= self.start[:, None] + self.tail.shape[2]
    return Case(self.q, *pools, self.start, self.tail, np.where(beyond, nobody, pages))

  def poisoned(self) -> "Case":
    """With NaN in every slot that no node of its row may see."""
    k, v = self.k.copy(), self.v.copy()
    for b, start in enumerate(self.start):
      k[b, :, start + self.tail.shape[2] :] = np.nan
      v[b, :, start + self.tail.shape[2] :] = np.nan
    return self._replace(k=k, v=v)


def case(starts, S, *, J, G, H=64, K=2, size=None, dtype=np.float32, seed=0) -> Case:
  """Random queries, keys and values; a random tree of J nodes, the last of `size` slots."""
  rng = np.random.default_rng(seed)
  size, B = size or J, len(starts)

  def normal(*shape):
    return rng.normal(size=shape).astype(dtype)

  q, k, v = normal(B, J, K * G, H), normal(B, K, S, H), normal(B, K, S, H)
  tail = np.tril(np.ones((J, size), bool), size - J) & (rng.random((B, J, size)) < 0.7)
  tail[:, range(J), range(size - J, size)] = True
  return Case(q, k, v, np.array(starts, np.int32), tail)


def exact(c: Case) -> np.ndarray:
  """What the case should give, in float64."""
  K, G = c.k.shape[1], c.q.shape[2] // c.k.shape[1]
  q, k, v = (x.astype(np.float64) for x in (c.q, c.k, c.v))
  seen = np.zeros((*c.q.shape[:2], c.k.shape[2]), bool)
  for b, start in enumerate(c.start):
    seen[b, :, :start] = True
    tail = seen[b, :, start : start + c.tail.shape[2]]
    tail[:] = c.tail[b, :, : tail.shape[1]]
  scores = np.einsum("bjkgh,bksh->bjkgs", q.reshape(*q.shape[:2], K, G, -1), k)
  scores /= np.sqrt(q.shape[-1])
  weights = np.exp(scores) * seen[:, :, None, None]  # no score is large
  total = np.sum(weights, -1, keepdims=True)
  out = np.einsum("bjkgs,bksh->bjkgh", weights / np.where(total > 0, total, 1), v)
  return out.reshape(q.shape)


SHAPES = [
  dict(J=1, G=1, H=64),
  dict(J=5, G=4, H=128),
  dict(J=16, G=7, H=64, K=1),
  dict(J=48, G=4, H=64, K=1),
  dict(J=4, G=3, H=64, size=70),  # a drafter's nodes, behind those of earlier levels
]


def _id(shape) -> str:
  return "-".join(f"{name}{x}" for name, x in shape.items())


@functools.cache
def _boundaries(shape: int, dtype: str) -> tuple[Case, np.ndarray]:
  """Rows that begin or end where a block or split does, or the cache; and the truth."""
  S, size = 576, SHAPES[shape].get("size", SHAPES[shape]["J"])
  starts = [0, 63, 513 - size, S - 1]
  if size < 16:
    starts += [1, 64, 65, S - size]
  c = case(starts, S, dtype=jnp.dtype(dtype), **SHAPES[shape])
  return c, exact(c)


@pytest.mark.parametrize(
  "shape, dtype, atol",
  [
    *((shape, "float32", 1e-5) for shape in range(len(SHAPES))),
    (2, "bfloat16", 2e-2),
  ],
  ids=lambda x: _id(SHAPES[x]) if isinstance(x, int) else None,
)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_float64_at_every_boundary(impl, shape, dtype, atol):
  """Also where what nobody sees holds NaN, and where nodes lie beyond the cache."""
  c, want = _boundaries(shape, dtype)
  c = c.poisoned()
  np.testing.assert_allclose(c(impl=impl), want, rtol=0, atol=atol)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_node_that_sees_nothing_gets_zeros(impl):
  """Beside others that see something, in the same row and in the same block."""
  c = case([0, 40], 64, J=3, G=2)
  c.tail[:, 1] = False
  c.tail[0, 2] = False
  out = c(impl=impl)
  np.testing.assert_allclose(out, exact(c), rtol=0, atol=1e-5)
  assert not out[0, 1:].any() and out[0, 0].all() and out[1].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", KERNELS)
def test_a_row_has_the_same_bits_in_any_batch_and_bucket(impl, dtype):
  """With other rows around it, at another place, and with a longer or shorter cache."""
  c = case([0, 300, 600, 550], 1088, J=5, G=2, dtype=jnp.dtype(dtype))
  want = c(impl=impl)
  for rows, length in [([1], 320), ([0, 3, 1, 0, 3, 1], 768)]:
    part = c.rows(rows)
    part = part._replace(k=part.k[:, :, :length], v=part.v[:, :, :length])
    np.testing.assert_array_equal(part(impl=impl), want[rows])


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_may_be_shared_and_of_any_size(impl):
  """Those of a prompt by all rows; the bits are the same, but on a TPU."""
  c = case([0, 300, 1020, 550], 1088, J=5, G=2)
  prompt = c.k[:1, :, :128], c.v[:1, :, :128]
  c.k[:, :, :128], c.v[:, :, :128] = prompt
  want = c(impl=impl)
  np.testing.assert_allclose(want, exact(c), rtol=0, atol=1e-5)
  for L, shared in [(64, 2), (1024, 0)]:
    out = c.in_pages(L, shared)(impl=impl)
    if impl != "triton":
      np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    else:
      np.testing.assert_array_equal(out, want)


def test_a_token_sees_itself_and_all_before_it():
  """As `causal` packs it: consecutive tokens, the last of them beyond the cache."""
  start = jnp.array([0, 7, 37])
  last = start[:, None] + jnp.arange(5)
  want = jnp.arange(40) <= last[..., None]
  np.testing.assert_array_equal(seen_lib.causal(start, 5).mask(0, 40), want)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70])
def test_bits_say_what_the_mask_says(size):
  """Across words, and where the cache ends before the tail."""
  rng = np.random.default_rng(size)
  tail, start = rng.random((3, 4, size)) < 0.5, np.array([0, 5, 20])
  seen = seen_lib.of_mask(jnp.asarray(start), jnp.asarray(tail))
  whole = np.zeros((3, 4, 20 + size), bool)
  for b in range(3):
    whole[b, :, : start[b]] = True
    whole[b, :, start[b] : start[b] + size] = tail[b]
  for length in (20, 20 + size):
    np.testing.assert_array_equal(seen.mask(0, length), whole[..., :length])


@pytest.mark.parametrize("window", [1, 3, 6, 70, 200])
def test_a_window_counts_positions_not_nodes(window):
  """Of a tree whose nodes, in order, are at depths 0, 1, 1, 2, 3; kernels pass it on."""
  depth, parents = np.array([0, 1, 1, 2, 3]), [{0}, {0, 1}, {0, 2}, {0, 2, 3}]
  tail = np.zeros((3, 5, 5), bool)
  for node, known in enumerate([*parents, {0, 2, 3, 4}]):
    tail[:, node, [*known]] = True
  c = case([0, 4, 100], 128, J=5, G=2)._replace(tail=tail)
  position = c.start[:, None] + depth
  seen = seen_lib.of_mask(jnp.asarray(c.start), jnp.asarray(tail))
  seen = seen.within(jnp.asarray(position), window)
  slots = np.arange(128) + np.zeros((3, 1), int)  # the position of each slot
  for b, start in enumerate(c.start):
    slots[b, start : start + 5] = position[b]
  shown = np.asarray(seen_lib.of_mask(jnp.asarray(c.start), jnp.asarray(tail)).mask(0, 128))
  shown = shown & (slots[:, None] > position[..., None] - window)
  np.testing.assert_array_equal(seen.mask(0, 128), shown)
  want = ref.attend(c.q, c.k, c.v, jnp.asarray(shown))
  paged = c.in_pages(64)
  args = paged.q, np.nan_to_num(paged.k), np.nan_to_num(paged.v), seen, paged.pages
  for impl in ("ref", "interpret"):
    np.testing.assert_allclose(attend(*args, impl=impl), want, atol=2e-6)


def test_heads_stay_on_their_devices():
  """Split over `model`, also where it is of size 1, and where it does not divide them."""
  c = case([0, 40, 3, 7], 64, J=3, G=2).in_pages(64)
  whole = np.asarray(c(impl="interpret"))
  P = jax.sharding.PartitionSpec

  def run(q, k, v, seen, pages):
    return attend(q, k, v, seen, pages, impl="interpret")

  for model, gathers in [(1, False), (2, False), (4, True)]:
    mesh = axes.make_mesh(model, jax.devices()[:model])
    heads = axes.MODEL if c.k.shape[1] % model == 0 else None
    specs = (None, axes.MODEL), (heads,), (heads,), (), (), ()
    *qkv, start, tail, pages = (
      jax.device_put(x, axes.sharding(mesh, axes.DATA, *spec))
      for x, spec in zip(c, specs, strict=True)
    )
    args = *qkv, seen_lib.of_mask(start, tail), pages
    # Unchecked, because types cannot say of interpreted kernels what varies.
    program = jax.jit(
      jax.shard_map(
        run,
        mesh=mesh,
        in_specs=P(axes.DATA),
        out_specs=P(axes.DATA),
        axis_names={axes.DATA},
        check_vma=False,
      )
    )
    compiled = program.lower(*args).compile()
    assert ("all-gather" in compiled.as_text()) == gathers
    np.testing.assert_array_equal(compiled(*args), whole.astype(np.float32))


@pytest.mark.parametrize("kind", tpu_kernels.KINDS)
def test_lowers_for_tpus(kind):
  """A step, a chain, a tree and a prompt, in both dtypes."""
  array = jax.ShapeDtypeStruct
  run = functools.partial(tree_attention.tree_attention, impl="pallas")
  for J, L, dtype in [
    (1, 64, "bfloat16"),
    (16, 256, "bfloat16"),
    (48, 1024, "float32"),
    (256, 256, "bfloat16"),
  ]:
    start = array((2,), jnp.int32)
    seen = jax.eval_shape(functools.partial(seen_lib.causal, num_tokens=J), start)
    q = array((2, J, 28, 128), dtype)
    pool, pages = array((40, 4, L, 128), dtype), array((2, 1024 // L), jnp.int32)
    text = tpu_kernels.lowered(run, kind, q, pool, pool, seen, pages)
    assert text.count("tpu_custom_call") == 1


@triton_kernels.requires_triton
def test_lowers_for_cuda(monkeypatch):
  """For an H100 or H200: two kernels with splits, one without."""
  triton_kernels.lower_for(90, monkeypatch)
  array = jax.ShapeDtypeStruct
  for J, S, calls in [(1, 1024, 2), (48, 1024, 1), (48, 2048, 2)]:
    run = functools.partial(tree_attention.tree_attention, impl="triton")
    q = array((2, J, 28, 128), jnp.bfloat16)
    start = array((2,), jnp.int32)
    seen = jax.eval_shape(functools.partial(seen_lib.causal, num_tokens=J), start)
    pool, pages = array((40, 4, 64, 128), jnp.bfloat16), array((2, S // 64), jnp.int32)
    traced = jax.jit(run).trace(q, pool, pool, seen, pages)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == calls


_slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@triton_kernels.requires_triton
@pytest.mark.parametrize(
  "capability, J, H, page",
  [
    (80, 8, 128, 256),
    (90, 16, 128, 64),
    *(_slow(80, *shape, 64) for shape in [(1, 128), (5, 64), (16, 128), (48, 128)]),
    *(_slow(90, *shape, 64) for shape in [(1, 128), (5, 64), (8, 128), (48, 128)]),
    *(_slow(capability, 8, 128, 256) for capability in (80, 90)),
  ],
)
def test_machine_code_spills_nothing(capability, J, H, page):
  """It multiplies on tensor cores, fits in shared memory, and old drivers load it."""
  from tlt_jax.pallas_kernels.tree_attention import triton

  G, array = 7, "*bf16"
  cut = triton.Tiles.of(J, G, jnp.bfloat16)
  constants = dict(
    J=J, G=G, K=4, H=H, SIZE=J, NODES=cut.nodes, ROWS=cut.rows, BLOCK=cut.block,
    SPLIT=cut.split, SCALE=H**-0.5, PAGE=page, DIRECT=False,
  )  # fmt: skip
  types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), array)
  types |= dict.fromkeys(("start_ptr", "bits_ptr", "pages_ptr"), "*i32")
  types |= dict(length="i32", sum_ptr="*fp32", largest_ptr="*fp32", total_ptr="*fp32")
  code = machine_code.compiled(
    triton._attend, capability, types, constants, cut.warps, cut.stages
  )
  assert code.stack == 0
  assert code.shared <= {80: 163, 90: 227}[capability] * 1024
  # Fewer than 64 rows are too few for a product of a whole warp group.
  product = "HGMMA" if capability == 90 and cut.rows >= 64 else "HMMA"
  assert code.instructions(product) > 0
  assert code.ptx_version <= (9, 0), "install triton as in requirements.txt"


@pytest.mark.tpu
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda i: _id(SHAPES[i]))
def test_equals_float64_on_a_tpu(shape):
  c, want = _boundaries(shape, "bfloat16")
  np.testing.assert_allclose(c.poisoned()(impl="pallas"), want, rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda i: _id(SHAPES[i]))
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_equals_float64_on_a_gpu(shape, dtype, atol):
  """Compiled, as it runs there; and a row has the same bits in any batch and bucket."""
  c, want = _boundaries(shape, dtype)
  out = c.poisoned()(impl="triton")
  np.testing.assert_allclose(out, want, rtol=0, atol=atol)
  part = c.rows([1, 0])
  part = part._replace(k=part.k[:, :, :256], v=part.v[:, :, :256])
  np.testing.assert_array_equal(part(impl="triton"), out[[1, 0]])


# Faults that the tests above must find: a place in the source, and what stands there then.
PALLAS_FAULTS = {
  "the tail is not masked": ("_bits(bits_ref, offset) == 1", "offset >= 0"),
  "off by one at the start": ("(offset < 0) |", "(offset < 1) |"),
  "what is unseen is not cleaned": ("jnp.zeros_like(v))", "v)"),
  "one block less": ("first < start + size))", "first < start + size - 1))"),
  "order of bits": ("offset & 31)", "31 - (offset & 31))"),
  "total is not rescaled": ("total_ref[...] * rescale +", "total_ref[...] +"),
  "not made anew for each head": ("(step == 0)", "(step + pl.program_id(1) == 0)"),
  "wrong head": ("per_page)], h, jax", "per_page)], 0, jax"),
  "wrong page": ("(number, per_page)], h", "(number, per_page + 1)], h"),
  "wrong block of a page": ("jax.lax.rem(number, per_page)", "number"),
  "bits not repeated": ("jnp.repeat(seen.bits, G, 1)", "jnp.tile(seen.bits, (1, G, 1))"),
}
TRITON_FAULTS = {
  "the tail is not masked": ("shifted & 1", "1"),
  "off by one at the start": ("(offset < 0)[", "(offset < 1)["),
  "what is unseen is not cleaned": ("mask=exists[:, None], other=0.0", "mask=None"),
  "one block less": ("tl.cdiv(end, BLOCK))", "tl.cdiv(end - 1, BLOCK))"),
  "order of bits": ("(offset & 31)[", "(31 - (offset & 31))["),
  "total is not rescaled": ("total = total * rescale +", "total = total +"),
  "sum is not rescaled": ("sum * rescale[:, None],", "sum,"),
  "splits are not rescaled": ("sum * mine[:, None] +", "sum +"),
  "a split less": ("range(0, tl.cdiv(end, SPLIT))", "range(0, tl.cdiv(end, SPLIT) - 1)"),
  "wrong page": ("block * BLOCK // PAGE)", "0)"),
  "wrong head of a page": ("v_ptr += head * PAGE", "v_ptr += 0 * PAGE"),
  "wrong block of a page": ("block * BLOCK % PAGE", "0"),
  "pages of another row": ("pages_ptr += b *", "pages_ptr += 0 *"),
  "bits of another node": ("row // G) * ((SIZE", "row % G) * ((SIZE"),
  "bits of another tile": ("(b * J + tile * NODES + row", "(b * J + row"),
}


# Another of pages is found in the same case, which takes seconds.
_SLOW = ("wrong block of a page",)


@functools.cache
def _telling(dtype: str, S: int) -> tuple[Case, np.ndarray]:
  """A small case that tells the faults, at the end of a block, of a split, of the cache.

  The largest scores come last, so that what came before must be rescaled.
  """
  end = S // 512 * 512 + 1  # of a row, one slot behind that of a block
  c = case([1, end - 5, S - 7, S - 2], S, J=5, G=7, dtype=jnp.dtype(dtype))
  c.k[:, :, S - 8 :] *= 3
  return c.poisoned(), exact(c)


def _finds(attend, dtype: str, atol: float, S: int = 576, page: int = 0, **options) -> bool:
  """Whether the tests would find that an implementation is wrong, or wrong with pages."""
  c, want = _telling(dtype, S)
  if page:  # the last row's nodes lie beyond a cache that ends within a page
    c, want = c.rows([0, 1, 2]).in_pages(page), want[:3]
  out = c(attend, **options)
  return not np.allclose(out, want, rtol=0, atol=atol)


@pytest.mark.parametrize("fault", [None, *PALLAS_FAULTS])
def test_faults_of_the_pallas_kernel_are_found(fault, tmp_path):
  """And no fault in the kernel as it is."""
  text = PALLAS_FAULTS[fault] if fault else ("", "")
  mutant = mutants.load(pathlib.Path(pallas.__file__), text, tmp_path).tree_attention
  found = _finds(mutant, "float32", 1e-5, interpret=True)
  found = found or _finds(mutant, "float32", 1e-5, S=1544, page=1024, interpret=True)
  assert found == (fault is not None)


@triton_kernels.requires_triton
@pytest.mark.parametrize(
  "fault", [None, *(tiny.slow(x) if x in _SLOW else x for x in TRITON_FAULTS)]
)
def test_faults_of_the_triton_kernel_are_found(fault, tmp_path):
  """And no fault in the kernel as it is."""
  text = TRITON_FAULTS[fault] if fault else ("", "")
  file = pathlib.Path(pallas.__file__).with_name("triton.py")
  mutant = mutants.load(file, text, tmp_path).tree_attention
  # In float32 a row has two tiles, and takes longer.
  found = _finds(mutant, "bfloat16", 2e-2) or _finds(mutant, "float32", 1e-5)
  found = found or _finds(mutant, "bfloat16", 2e-2, page=128)
  assert found == (fault is not None)
