"""Attention to a KV cache, by our kernels and by jax: time, bandwidth, error.

Every side gets its best layout and, if it takes one, a mask, both made in advance. "jax" is
`jax.nn.dot_product_attention`; "pallas.ops" is the decoding kernel of jax, for single
queries.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_time
from benchmarks import shapes
from experiments import tables
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import tree_attention
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

ROWS = 8  # B
_PAGE = 128  # slots, of jax's paged kernel


def in_pages(cache: jax.Array) -> jax.Array:
  """A cache f[B K S H] as our pool of pages, f[P K L H], with a sink."""
  B, K, S, H = cache.shape
  L = min(cache_lib.PAGE, S)
  pool = cache.reshape(B, K, S // L, L, H).swapaxes(1, 2).reshape(-1, K, L, H)
  return jnp.concatenate([pool, jnp.zeros_like(pool[:1])])


def table(rows: int, length: int) -> jax.Array:
  """i32[B M]: the pages of the rows of `in_pages`."""
  pages = length // min(cache_lib.PAGE, length)
  return jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)


class Arrays(NamedTuple):
  """The arguments of a shape; the lengths of the cache are separate."""

  q: jax.Array  # f[B J N H]
  k: jax.Array  # f[B K S H]
  v: jax.Array  # f[B K S H]
  tail: jax.Array  # bool[B J J]  what nodes see of each other


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def random_arrays(
  config: config_lib.ModelConfig, rows: int, num_nodes: int, length: int
) -> Arrays:
  """Queries, a full cache, and a tree."""
  N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
  of_q, of_k, of_v, of_tree = jax.random.split(jax.random.key(num_nodes), 4)
  normal = functools.partial(jax.random.normal, dtype=config.dtype)
  tail = jax.random.bernoulli(of_tree, 0.5, (rows, num_nodes, num_nodes))
  tail = jnp.tril(tail) | jnp.eye(num_nodes, dtype=bool)
  return Arrays(
    normal(of_q, (rows, num_nodes, N, H)),
    normal(of_k, (rows, K, length, H)),
    normal(of_v, (rows, K, length, H)),
    tail,
  )


def sides(
  arrays: Arrays, start: jax.Array, kernels: Sequence[str]
) -> dict[str, device_time.Side]:
  """Our implementations, and those of the platform.

  Args:
    start: i32[B]  slots that every node of a row sees
    kernels: our implementations
  """
  q, k, v, tail = arrays
  seen = seen_lib.of_mask(start, tail)

  def side(run, *args) -> device_time.Side:
    return device_time.Side(run, args, feed=lambda out, q: out)

  def of_jax(name: str):
    def run(q, k, v, mask):
      return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=name)

    return run

  paged = in_pages(k), in_pages(v), seen, table(len(k), k.shape[2])
  found = {
    impl: side(functools.partial(tree_attention.tree_attention, impl=impl), q, *paged)
    for impl in kernels
  }
  slots_first = [x.swapaxes(1, 2) for x in (k, v)]  # f[B S K H]
  mask = seen.mask(0, k.shape[2])[:, None]  # bool[B 1 J S]
  for name in ("xla", "cudnn")[: 2 if jax.default_backend() == "gpu" else 1]:
    found[f"jax {name}"] = side(of_jax(name), q, *slots_first, mask)
  if q.shape[1] == 1 and (theirs := _of_single_queries(arrays, start, slots_first)):
    found["pallas.ops"] = side(*theirs)
  return found


def _of_single_queries(arrays: Arrays, start: jax.Array, slots_first) -> tuple:
  """A kernel of `jax.experimental.pallas.ops`, and its arguments; () without one."""
  q, k, v, _ = arrays
  B, K, S, H = k.shape
  if jax.default_backend() == "gpu":

    def of_gpu(q, k, v, length):
      from jax.experimental.pallas.ops.gpu import decode_attention  # may be gone

      return decode_attention.gqa(q[:, 0], k, v, kv_seq_len=length)[:, None]

    return of_gpu, q, *slots_first, start + 1
  if jax.default_backend() == "tpu":
    index = jnp.arange(B * S // _PAGE, dtype=jnp.int32).reshape(B, -1)

    def of_tpu(q, k, v, length, index):
      from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

      q = q[:, 0] * q.shape[-1] ** -0.5  # it does not scale
      return paged_attention(q, k, v, length, index, pages_per_compute_block=4)[:, None]

    pages = (x.swapaxes(0, 1).reshape(K, B * S // _PAGE, _PAGE, H) for x in (k, v))
    return of_tpu, q, *pages, start + 1, index
  return ()


def exact(arrays: Arrays, start: jax.Array) -> np.ndarray:
  """Attention of the first row and kv head in float64: f64[J G H]."""
  G = arrays.q.shape[2] // arrays.k.shape[1]
  q, k, v = (
    np.asarray(x.astype(jnp.float32), np.float64)
    for x in (arrays.q[0, :, :G], arrays.k[0, 0], arrays.v[0, 0])
  )
  mask = np.asarray(seen_lib.of_mask(start, arrays.tail).mask(0, len(k)))[0]  # [J S]
  scores = np.einsum("jgh,sh->jgs", q, k) * q.shape[-1] ** -0.5
  scores = np.where(mask[:, None], scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("jgs,sh->jgh", weights, v) / weights.sum(-1)[..., None]


def measure(
  name: str,
  config: config_lib.ModelConfig,
  num_nodes: int,
  length: int,
  kernels: Sequence[str],
  machine: Mapping[str, float],
  timing: device_time.Timing,
) -> list[dict]:
  """Measures one shape, with caches half full and full.

  Args:
    num_nodes, length: J and S
    kernels: our implementations
    machine: measured "bytes_per_s" and "flops_per_s"
  """
  arrays = random_arrays(config, ROWS, num_nodes, length)
  K, H, width = config.num_kv_heads, config.head_dim, arrays.k.dtype.itemsize
  cells = []
  for filled in (length // 2, length):
    start = jnp.full((ROWS,), filled - num_nodes, jnp.int32)
    read = 2 * ROWS * K * filled * H * width + 2 * arrays.q.size * width
    flops = 4 * arrays.q.size * filled
    chosen = sides(arrays, start, kernels)
    found = timing.measure(chosen, expected_s=2 * read / machine["bytes_per_s"])
    want = exact(arrays, start)
    for side, result in found.items():
      if "error" not in result:
        out = jax.jit(chosen[side].operation)(*chosen[side].args)
        close = np.asarray(out[0, :, : want.shape[1]].astype(jnp.float32)) - want
        result["max_error"] = float(np.abs(close).max())
    for side in found.values():
      if "median_s" in side:
        side["bandwidth_share"] = read / side["median_s"] / machine["bytes_per_s"]
        side["matmul_share"] = flops / side["median_s"] / machine["flops_per_s"]
    cell = {"model": name, "nodes": num_nodes, "cache": length, "filled": filled}
    cells.append(cell | {"sides": found})
  return cells


def report(cells: Sequence[Mapping]) -> None:
  names = list(dict.fromkeys(side for cell in cells for side in cell["sides"]))

  def time(cell, side):
    found = cell["sides"].get(side)
    return device_time.micros(found) if found else ""

  def shape(c: Mapping) -> list[str]:
    return [c["model"], *(str(c[key]) for key in ("nodes", "cache", "filled"))]

  def share(side: Mapping) -> str:
    if "median_s" not in side:
      return ""
    of_bandwidth, of_matmuls = side["bandwidth_share"], side["matmul_share"]
    return f"{of_bandwidth:.0%} {of_matmuls:.0%} {side['max_error']:.0e}"

  where = ["model", "J", "cache", "filled"]
  tables.show(
    f"Attention, {ROWS} rows: microseconds, median ± half of the mean's 95% interval",
    [*where, *names],
    [[*shape(cell), *(time(cell, side) for side in names)] for cell in cells],
  )
  tables.show(
    "Share of copy bandwidth, of matmul peak; largest error against float64",
    [*where, *names],
    [
      [*shape(cell), *(share(cell["sides"].get(side, {})) for side in names)]
      for cell in cells
    ],
  )


def tiny_shapes() -> list[tuple[str, config_lib.ModelConfig, int, int]]:
  """The shapes of a dry run."""
  name, config = next(iter(shapes.MODELS.items()))
  return [(name, shapes.tiny(config), nodes, 64) for nodes in (1, 4)]


def all_shapes() -> list[tuple[str, config_lib.ModelConfig, int, int]]:
  """(name, model, J, S): the middle length first, as the most informative."""
  return [
    (name, config, nodes, length)
    for length in (8192, 2048, 32_768)
    for name, config in shapes.DENSE.items()
    for nodes in (1, 4, 8, 16, 48)
  ]
