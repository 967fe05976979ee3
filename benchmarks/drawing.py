"""Sampling of tokens from logits, and top-p: ours against jax.random and sorting."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from benchmarks import device_time
from experiments import tables
from tlt_jax import noise
from tlt_jax.pallas_kernels import find_cut
from tlt_jax.pallas_kernels import verify_sample

_CHECKED = 4  # rows, against float64
_TOP_P, _TOP_K = 0.95, 1024


class Rows(NamedTuple):
  """Rows of logits, with temperature 1 and nothing filtered."""

  key: jax.Array  # u32[R 2]
  logits: jax.Array  # f32[R V]
  temperature: jax.Array  # f32[R]
  cut: jax.Array  # f32[R]


def random_rows(count: int, vocabulary: int) -> Rows:
  """Logits whose softmax is neither flat nor certain."""
  logits = 3 * jax.random.normal(jax.random.key(0), (count, vocabulary))
  key = noise.row_key(jnp.uint32(7), jnp.arange(count, dtype=jnp.uint32), 11)
  return Rows(key, logits, jnp.ones(count), jnp.full(count, -jnp.inf))


def sampling_sides(rows: Rows, kernels: Sequence[str]) -> dict[str, device_time.Side]:
  """Operations that return (token i32[R], log-probability f32[R])."""

  def ours(impl):
    def draw(key, logits, temperature, cut):
      sample = verify_sample.verify_sample(logits, key, temperature, cut, impl=impl)
      return sample.token, sample.logp

    return draw

  def categorical(key, logits):
    token = jax.random.categorical(jax.random.wrap_key_data(key), logits)
    at = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    return token, at - jax.nn.logsumexp(logits, -1)

  def sort(key, logits):
    """As samplers with top-k: sort the largest logits, draw among them."""
    best, ids = jax.lax.top_k(logits, min(_TOP_K, logits.shape[1]))
    place = jax.random.categorical(jax.random.wrap_key_data(key), best)[:, None]
    at = jnp.take_along_axis(best, place, 1)[:, 0]
    token = jnp.take_along_axis(ids, place, 1)[:, 0]
    return token, at - jax.nn.logsumexp(logits, -1)

  def bits(result) -> jax.Array:  # u32[R]
    token, logp = (jax.lax.bitcast_convert_type(x, jnp.uint32) for x in result)
    return token + logp

  def feed_rows(result, key):
    return key + bits(result)[:, None]

  def feed(result, key):
    return key + jnp.sum(bits(result))

  found = {impl: device_time.Side(ours(impl), rows, feed_rows) for impl in kernels}
  args = (jax.random.key_data(jax.random.key(0)), rows.logits)
  found["jax.random.categorical"] = device_time.Side(categorical, args, feed)
  found[f"top_k {_TOP_K}"] = device_time.Side(sort, args, feed)
  return found


def cut_sides(rows: Rows) -> dict[str, device_time.Side]:
  """Operations that return the least logit that top-p keeps, f32[R]."""
  count = rows.logits.shape[0]
  top_p, off = jnp.full(count, _TOP_P), jnp.zeros(count)

  def ours(temperature, logits, top_p, off):
    return find_cut.find_cut(logits, temperature, off.astype(jnp.int32), top_p, off)

  def sort(temperature, logits, top_p):
    scaled = logits / temperature[:, None]
    ordered = jnp.sort(scaled, -1, descending=True)
    mass = jnp.cumsum(jax.nn.softmax(ordered, -1), -1)
    kept = jnp.sum(mass - jax.nn.softmax(ordered, -1) < top_p[:, None], -1)
    return jnp.take_along_axis(ordered, kept[:, None] - 1, 1)[:, 0]

  args = (rows.temperature, rows.logits, top_p)

  def feed(cut, temperature):  # always 1, but the compiler cannot know
    return jnp.where(cut > 1e30, 2.0, 1.0)

  return {
    "find_cut": device_time.Side(ours, (*args, off), feed),
    "sort": device_time.Side(sort, args, feed),
  }


def measure(
  operation: str,
  count: int,
  vocabulary: int,
  kernels: Sequence[str],
  machine: Mapping[str, float],
  timing: device_time.Timing,
) -> dict:
  """Measures one shape.

  Args:
    operation: "sample" or "cut"
    count, vocabulary: R and V
    kernels: our implementations
    machine: measured "bytes_per_s"
  """
  rows = random_rows(count, vocabulary)
  once_s = rows.logits.nbytes / machine["bytes_per_s"]  # to read the logits
  sides = sampling_sides(rows, kernels) if operation == "sample" else cut_sides(rows)
  found = timing.measure(sides, expected_s=10 * once_s)
  logits = np.asarray(rows.logits[:_CHECKED], np.float64)
  check = _check_samples if operation == "sample" else _check_cuts
  want = _compute(sides["ref"]) if operation == "sample" else None
  for name, side in found.items():
    if "error" in side:
      continue
    result = _compute(sides[name])
    side |= check(logits, result) | {"reads": side["median_s"] / once_s}
    if operation == "sample" and name in kernels:  # coupled by the same noise
      side["tokens_unlike_ref"] = int(np.sum(np.asarray(result[0] != want[0])))
  return {"operation": operation, "rows": count, "vocabulary": vocabulary, "sides": found}


def _compute(side: device_time.Side):
  return jax.jit(side.operation)(*side.args)


def _check_samples(logits: np.ndarray, result) -> dict:
  """The error of the drawn tokens' log-probabilities."""
  token, logp = (np.asarray(x)[: len(logits)] for x in result)
  exact = np.take_along_axis(special.log_softmax(logits, -1), token[:, None], 1)[:, 0]
  return {"max_error": float(np.abs(exact - logp).max())}


def _check_cuts(logits: np.ndarray, result) -> dict:
  """The error of cuts, by a sort in float64."""
  ordered = np.sort(logits, -1)[:, ::-1]
  p = special.softmax(ordered, -1)
  kept = np.sum(np.cumsum(p, -1) - p < _TOP_P, -1)
  cut = np.take_along_axis(ordered, kept[:, None] - 1, 1)[:, 0]
  return {"max_error": float(np.abs(cut - np.asarray(result)[: len(logits)]).max())}


def report(cells: Sequence[Mapping]) -> None:
  """Prints a table per operation."""
  for operation in dict.fromkeys(cell["operation"] for cell in cells):
    chosen = [cell for cell in cells if cell["operation"] == operation]
    names = list(dict.fromkeys(side for cell in chosen for side in cell["sides"]))

    def text(side):
      reads = f" ({side['reads']:.1f}x)" if "reads" in side else ""
      return device_time.micros(side) + reads

    tables.show(
      f"{operation}: microseconds (x the time to read the logits once)",
      ["rows", "V", *names],
      [
        [f"{c['rows']}", f"{c['vocabulary']}", *(text(c["sides"][n]) for n in names)]
        for c in chosen
      ],
    )
