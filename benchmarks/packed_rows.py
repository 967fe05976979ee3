"""Attention of a learner's packed rows, and its gradients: time, share of peak, error.

"jax cudnn" is `jax.nn.dot_product_attention`, which knows no segments without a mask of
all pairs, and so takes part in rows of one sequence only.
"""

from collections.abc import Callable, Mapping, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_time
from benchmarks import shapes
from experiments import tables
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import packed_attention

_LENGTHS = (300, 1100, 700, 2000, 150, 900)  # of sequences in turn, in a row of many
_COMPARED = 64  # queries at a row's end
_FLOPS = {"forward": 4, "gradients": 14}  # of a pair of tokens, per head and feature

Shape = tuple[str, config_lib.ModelConfig, int, int, bool]


def segments(rows: int, tokens: int, many: bool) -> np.ndarray:
  """i32[rows tokens]: one segment, or many, in full rows."""
  lengths = np.tile(_LENGTHS, tokens // sum(_LENGTHS) + 1) if many else [tokens]
  ids = np.repeat(np.arange(len(lengths), dtype=np.int32) + 1, lengths)[:tokens]
  return np.tile(ids, (rows, 1))


def pairs(ids: np.ndarray) -> int:
  """Of a token and one that it sees."""
  counts = [np.unique(row, return_counts=True)[1].astype(int) for row in ids]
  return sum(int(np.sum(n * (n + 1) // 2)) for n in counts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_arrays(config: config_lib.ModelConfig, rows: int, tokens: int) -> tuple:
  N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
  sizes = (rows, tokens, N, H), (rows, K, tokens, H), (rows, K, tokens, H)
  keys = jax.random.split(jax.random.key(tokens), 3)
  return tuple(
    jax.random.normal(key, size, config.dtype)
    for key, size in zip(keys, sizes, strict=True)
  )


def of_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  k, v = (x.swapaxes(1, 2) for x in (k, v))
  attend = jax.nn.dot_product_attention
  return attend(q, k, v, is_causal=True, implementation="cudnn")


def operations(ids: np.ndarray, kernels: Sequence[str], many: bool) -> dict[str, Callable]:
  """Attention by each of our implementations, and by jax."""

  def ours(impl: str) -> Callable:
    known = packed_attention.Segments(jnp.asarray(ids), kernels=impl)
    return lambda q, k, v: packed_attention.packed_attention(q, k, v, known)

  found = {impl: ours(impl) for impl in kernels if impl in ("ref", "triton")}
  if jax.default_backend() == "gpu" and not many:
    found["jax cudnn"] = of_jax
  return found


def gradients(attend: Callable) -> Callable:
  """Those of the result's sum, after the forward pass."""

  def run(q, k, v):
    out, back = jax.vjp(attend, q, k, v)
    return back(jnp.ones_like(out))

  return run


def _fed(result, q):
  """The next queries; of gradients one more kernel, which adds up what it must not drop."""
  if not isinstance(result, tuple):
    return result
  dq, dk, dv = result
  return dq + (dk[0, 0, 0, 0] + dv[0, 0, 0, 0]).astype(q.dtype)


def exact(arrays, ids: np.ndarray) -> dict[str, np.ndarray]:
  """The result and the queries' gradient in float64: the last tokens, the first head."""
  q, k, v = arrays
  seen = ids[0] == ids[0, -1]
  q, k, v = (
    np.asarray(x.astype(jnp.float32), np.float64)
    for x in (q[0, -_COMPARED:, 0], k[0, 0], v[0, 0])
  )
  token = np.arange(len(k))
  mask = seen & (token <= token[-_COMPARED:, None])
  scale = q.shape[-1] ** -0.5
  scores = np.where(mask, q @ k.T * scale, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  d_weights = np.sum(v, -1)  # of the result's sum
  delta = weights @ d_weights
  dq = weights * (d_weights - delta[:, None]) @ k * scale
  return {"forward": weights @ v, "gradients": dq}


def measure(
  name: str,
  config: config_lib.ModelConfig,
  rows: int,
  tokens: int,
  many: bool,
  kernels: Sequence[str],
  machine: Mapping[str, float],
  timing: device_time.Timing,
) -> list[dict]:
  """Measures attention of rows with one segment or many, without and with gradients."""
  ids, arrays = segments(rows, tokens, many), random_arrays(config, rows, tokens)
  wanted, cells = exact(arrays, ids), []
  per_pair = config.num_heads * config.head_dim
  for direction, flops in _FLOPS.items():
    chosen = operations(ids, kernels, many)
    if direction == "gradients":
      chosen = {side: gradients(attend) for side, attend in chosen.items()}
    sides = {n: device_time.Side(run, arrays, _fed) for n, run in chosen.items()}
    expected = flops * per_pair * pairs(ids) / machine["flops_per_s"]
    found = timing.measure(sides, expected_s=4 * expected)
    for side, result in found.items():
      if "error" not in result:
        made = jax.tree.leaves(jax.jit(chosen[side])(*arrays))[0]
        made = np.asarray(made[0, -_COMPARED:, 0].astype(jnp.float32))
        error = np.abs(made - wanted[direction]).max()
        result["max_error"] = float(error / np.abs(wanted[direction]).max())
        result["matmul_share"] = expected / result["median_s"]
    cell = {"model": name, "tokens": tokens, "many": many, "direction": direction}
    cells.append(cell | {"sides": found})
  return cells


def report(cells: Sequence[Mapping]) -> None:
  names = list(dict.fromkeys(side for cell in cells for side in cell["sides"]))

  def text(cell, side) -> str:
    found = cell["sides"].get(side)
    if found is None or "error" in found:
      return "failed" if found else ""
    share, error = found["matmul_share"], found["max_error"]
    return f"{device_time.micros(found)} {share:.0%} {error:.0e}"

  tables.show(
    "Attention of packed rows: microseconds, share of matmul peak, error against float64",
    ["model", "tokens", "segments", "pass", *names],
    [
      [
        *(c["model"], str(c["tokens"]), "many" if c["many"] else "one", c["direction"]),
        *(text(c, side) for side in names),
      ]
      for c in cells
    ],
  )


def tiny_shapes() -> list[Shape]:
  """The shapes of a dry run."""
  name, config = next(iter(shapes.MODELS.items()))
  return [(name, shapes.tiny(config), 2, 600, many) for many in (False, True)]


def all_shapes() -> list[Shape]:
  """(name, model, rows, tokens of a row, whether of many segments)."""
  return [
    (name, config, max(8192 // tokens, 1), tokens, many)
    for tokens in (4096, 32_768)
    for name, config in shapes.MODELS.items()
    for many in (False, True)
  ]
