"""The kernels of packed attention, interpreted: equal to the reference in blocks."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from tests import mutants
from tests import test_few_rows_code as code
from tests import test_packed_attention as packed
from tests import tiny
from tests import triton_kernels
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.rl import fsdp

pytestmark = triton_kernels.requires_triton

SHARED = 99 * 1024  # bytes of a program, on any GPU from compute capability 8.0 on


@pytest.fixture(autouse=True)
def interpreted(request):
  if request.node.get_closest_marker("gpu"):
    yield
  else:
    with triton_kernels.interpreted():
      yield


def load():
  return implementations.load(packed_attention.__name__, "triton")


def cut(monkeypatch, queries: int, keys: int, triton=None) -> None:
  """Has kernels use small blocks, so that short rows have many."""
  triton = triton or load()
  tiles = triton.Tiles(queries, keys, warps=4, stages=1)
  monkeypatch.setattr(triton.Tiles, "of", lambda *_: tiles)


def arrays(ids, N, K, H, dtype):
  """Queries, keys, values, and weights of the result, 0 of padding."""
  B, T = ids.shape
  shapes = (B, T, N, H), (B, K, T, H), (B, K, T, H), (B, T, N, H)
  keys = jax.random.split(jax.random.key(0), 4)
  *args, weight = (
    jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)
  )
  return *args, weight * (ids > 0)[..., None, None]


def gradients(f, q, k, v, weight):
  """The result and the gradient of each argument."""

  def loss(*args):
    out = f(*args)
    return jnp.sum(out.astype(jnp.float32) * weight), out

  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return jnp.where(weight != 0, out, 0), *grads


def by(impl, ids, window=None):
  segments = packed_attention.Segments(jnp.asarray(ids), kernels=impl)
  segments = segments.replace(window=window)
  return lambda q, k, v: packed_attention.packed_attention(q, k, v, segments)


def assert_close(found, wanted, dtype="float32"):
  """To 1e-5; of bfloat16 to what its roundings make of two orders of sums."""
  most = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
  for x, y in zip(found, wanted, strict=True):
    assert x.dtype == y.dtype == dtype
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=0, atol=most * np.abs(y).max())


MANY = (3, 1, 30, 16, 2, 40, 5, 15)
ROWS = {
  "many segments": (131, (MANY, (64, 32))),
  "one segment": (131, ((131,),)),
  "whole blocks": (128, ((32, 64, 32), (16, 16, 32))),
  "padding": (50, ((), (20,))),
}


@pytest.mark.parametrize(
  "rows, queries, keys",
  [
    *((rows, 32, 16) for rows in ROWS),
    ("many segments", 16, 32),
    *(tiny.slow(rows, 16, 32) for rows in list(ROWS)[1:]),
  ],
)
def test_kernels_equal_blockwise(rows, queries, keys, monkeypatch):
  """In the result and the gradients, in float32, of rows of all kinds."""
  cut(monkeypatch, queries, keys)
  ids = packed.rows(*ROWS[rows])
  args = arrays(ids, 4, 2, 16, "float32")
  found, wanted = (gradients(by(impl, ids), *args) for impl in ("triton", "ref"))
  assert_close(found, wanted)


@pytest.mark.parametrize(
  "N, K, H, dtype",
  [
    (2, 2, 80, "float32"),
    (7, 1, 64, "bfloat16"),
    tiny.slow(4, 1, 128, "bfloat16"),
    tiny.slow(2, 1, 96, "float32"),
    tiny.slow(2, 1, 256, "bfloat16"),
  ],
)
def test_kernels_equal_blockwise_with_heads_of_any_size(N, K, H, dtype):
  """In blocks as on a GPU."""
  ids = packed.rows(150, ((90, 20), (150,)))
  args = arrays(ids, N, K, H, dtype)
  found, wanted = (gradients(by(impl, ids), *args) for impl in ("triton", "ref"))
  assert_close(found, wanted, dtype)


def masked(ids, window):
  """With every score at once."""
  token = np.arange(ids.shape[1])
  behind = token[:, None] - token
  mask = (ids[:, :, None] == ids[:, None]) & (behind >= 0) & (behind < window)
  return lambda q, k, v: ref.attend(q, k, v, jnp.asarray(mask))


@pytest.mark.parametrize("window", [2, 20, tiny.slow(48), tiny.slow(200)])
@pytest.mark.parametrize("queries, keys", [(32, 16), (16, 32)])
def test_a_token_sees_its_window(window, queries, keys, monkeypatch):
  """Shorter than a block, of several blocks, and longer than any segment."""
  cut(monkeypatch, queries, keys)
  ids = packed.rows(120, ((100, 9),))
  args = arrays(ids, 2, 1, 16, "float32")
  found = gradients(by("triton", ids, window), *args)
  assert_close(found, gradients(masked(ids, window), *args))


def test_blocks_without_own_tokens_are_not_read(monkeypatch):
  """Of other segments, or outside of the window; what nobody may read holds NaN."""
  cut(monkeypatch, 16, 16)
  ids = packed.rows(96, ((32, 48),))
  q, k, v, weight = arrays(ids, 2, 1, 16, "float32")
  weight *= (np.arange(96) >= 64)[:, None, None]
  read = (np.arange(96) >= 48)[None, None, :, None]  # by token 64, in a window of 17
  poisoned = (jnp.where(read, x, jnp.nan) for x in (k, v))
  found, wanted = (
    [x[:, 64:] if x.shape == q.shape else x[:, :, 64:] for x in gradients(f, *args, weight)]
    for f, args in (
      (by("triton", ids, 17), (q, *poisoned)),
      (masked(ids, 17), (q, k, v)),
    )
  )
  assert_close(found, wanted)


def test_padding_gets_zeros():
  ids = np.zeros((1, 20), np.int32)
  q, k, v, _ = arrays(ids, 2, 1, 16, "float32")
  weight = jnp.ones_like(q)
  for x in gradients(by("triton", ids), q, k, v, weight):
    np.testing.assert_array_equal(x, jnp.zeros_like(x))


FAULTS = {
  "segments are not compared": ("(of_query == of_key) & ", ""),
  "a block too many is taken for whole": (
    "tl.where(tl.load(ids_ptr + lo * BLOCK) == segment, lo, lo + 1)",
    "lo",
  ),
  "heads of a group are left out": ("range(0, G * count)", "range(0, count)"),
  "sums are not rescaled": ("sum * shrink[:, None]", "sum"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch, tmp_path):
  mutant = mutants.load(load().__file__, FAULTS[fault], tmp_path)
  cut(monkeypatch, 32, 16, mutant)
  ids = packed.rows(100, ((3, 70, 20),))
  args = arrays(ids, 2, 1, 16, "float32")
  found = gradients(lambda *a: mutant.packed_attention(*a, jnp.asarray(ids), None), *args)
  with pytest.raises(AssertionError):
    assert_close(found, gradients(by("ref", ids), *args))


@pytest.mark.parametrize("K", [2, tiny.slow(1)])
def test_kernels_on_the_devices_of_slices(K, monkeypatch):
  """Manual over `data`, as the learner; heads over `model`, if it divides them."""
  cut(monkeypatch, 32, 32)
  mesh, spec = tiny.mesh(2, 2), PartitionSpec("data")
  ids = jnp.asarray(packed.rows(40, ((30, 10), (40,))))
  args = arrays(ids, 4, K, 16, "float32")

  def run(ids, *args, impl):
    return gradients(by(impl, ids), *args)

  found, wanted = (
    jax.jit(fsdp.on_slices(mesh, functools.partial(run, impl=impl), spec, spec))(ids, *args)
    for impl in ("triton", "ref")
  )
  assert_close(found, wanted)


def test_heads_that_do_not_fit_go_in_blocks():
  """A head_dim above 256, or above 128 in float32."""
  fits = load().fits
  assert fits(256, "bfloat16") and not fits(320, "bfloat16")
  assert fits(128, "float32") and not fits(256, "float32")


@pytest.mark.parametrize(
  "H, dtype",
  [
    (64, "bfloat16"),
    (128, "bfloat16"),
    tiny.slow(256, "bfloat16"),
    tiny.slow(64, "float32"),
    tiny.slow(128, "float32"),
  ],
)
@pytest.mark.parametrize("window", [None, tiny.slow(512)])
def test_kernels_spill_nothing_and_fit_any_gpu(H, dtype, window):
  """And add no float in the order in which programs arrive."""
  q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((2, 4096, 28, H), (2, 4, 4096, H)))
  ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

  def run(q, k, v, ids):
    out, back = jax.vjp(lambda *a: load().packed_attention(*a, ids, window), q, k, v)
    return back(out)

  for (call,) in code.recorded(run, q, k, k, ids).values():
    machine = code.built(call)
    assert machine.stack == 0 and machine.shared <= SHARED
    assert not re.search(r"\b(LDL|STL)\b", machine.machine_code)
    assert not re.search(r"\b(atom|red)\.", machine.ptx)
    assert machine.instructions("HGMMA") + machine.instructions("HMMA") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("H, dtype", [(64, "bfloat16"), (128, "bfloat16"), (64, "float32")])
def test_kernels_on_a_gpu(H, dtype):
  """Equal to blocks, and to the last bit the same in every run."""
  ids = packed.rows(1301, ((100, 1000, 201), (1301,), (5, 800)))
  args = arrays(ids, 14, 2, H, dtype)
  run = jax.jit(lambda *args: gradients(by("triton", ids), *args))
  found, again = run(*args), run(*args)
  for x, y in zip(found, again, strict=True):
    np.testing.assert_array_equal(x, y)
  assert_close(found, jax.jit(lambda *args: gradients(by("ref", ids), *args))(*args), dtype)
