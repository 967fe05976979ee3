"""Checks on a GPU that the bits of a row do not depend on other rows; times few rows.

    python -m benchmarks.few_rows --model=qwen3-0.6b

The layers of a decoder by the kernels of `pallas_kernels.few_rows`, with random weights:

  bits    chains of four of 4, 8 and 16 requests in one pass (16, 32 and 64 rows), against
          plain steps of each request alone, in a cache of another length: the hidden state
          of every node, and the cache
  step    seconds of all layers in one program, by rows, compared with reading the weights
          at the measured bandwidth; and of two of its kernels
  one row XLA's product of one row with the weights of all layers: by default, as one of
          several rows (`few_rows_matmul`), and with sums in float32; and of two rows

It fails if a bit differs. The last line is JSON. `--dry_run` runs the operations in
jax.numpy, in tiny sizes, on any machine; there bits may differ.
"""

import dataclasses
import functools
import json
import sys
from types import ModuleType

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_time
from benchmarks import kernels
from benchmarks import shapes
from experiments import launch
from experiments import tables
from tlt_jax import few_rows_matmul
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers as layers_lib
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

CHAIN = 4  # nodes
REQUESTS = (4, 8, 16)
ROWS = (1, 4, 16, 64)
_LENGTH = 2048  # tokens of a cache
_COMPARED = 2  # layers whose bits are compared; the others are alike


def weights(config: config_lib.ModelConfig, layers: int) -> list[dict[str, jax.Array]]:
  D, F, H = config.width, config.mlp_width, config.head_dim
  N, K = config.num_heads * H, config.num_kv_heads * H
  sizes = dict(q=(D, N), k=(D, K), v=(D, K), o=(N, D), gate=(D, F), up=(D, F), down=(F, D))
  vectors = dict(before=D, after=D, q_norm=H, k_norm=H, q_bias=N, k_bias=K, v_bias=K)

  @jax.jit
  def make(key):
    keys = iter(jax.random.split(key, len(sizes) + len(vectors)))

    def normal(shape):
      return jax.random.normal(next(keys), shape)

    matrices = {n: normal(s) * s[0] ** -0.5 for n, s in sizes.items()}
    others = {n: 1 + 0.1 * normal((s,)) for n, s in vectors.items()}
    return {n: x.astype(jnp.bfloat16) for n, x in (matrices | others).items()}

  return [make(jax.random.key(i)) for i in range(layers)]


def projections(config: config_lib.ModelConfig, w: dict) -> few_rows.Projections:
  bias = (w["q_bias"], w["k_bias"], w["v_bias"]) if config.qkv_bias else None
  norm = (w["q_norm"], w["k_norm"]) if config.qk_norm else None
  return few_rows.Projections(w["q"], w["k"], w["v"], bias, norm)


def step(
  config: config_lib.ModelConfig, impl: ModuleType, params, x, start, cache, count
):
  """One pass of all layers: hidden states bf16[B*J D], and the cache.

  Args:
    impl: of `few_rows.of`
    params: of `weights`
    x: bf16[B J D] embeddings of J consecutive tokens of each request
    start: i32[B] the position of the first
    cache: keys and values bf16[B K S H] by layer
    count: i32[...] zeros
  """
  B, J, D = x.shape
  eps, position = config.norm_eps, (start[:, None] + jnp.arange(J)).reshape(-1)
  by = layers_lib.rotation(config, position)
  seen = seen_lib.causal(start, J)
  rows, new = few_rows.enter(x.reshape(-1, D), params[0]["before"]), []
  for i, (w, (k, v)) in enumerate(zip(params, cache, strict=True)):
    args = (rows, projections(config, w), by.cos, by.sin, position, count)
    q, k, v = impl.qkv(*args, k, v, eps)
    new.append((k, v))
    q = q.reshape(B, J, config.num_heads, config.head_dim)
    out = impl.attend(q, k, v, seen, count).reshape(B * J, -1)
    rows = impl.project(out, w["o"], rows.sums, w["after"], count)
    hidden = impl.gate_up(rows, w["gate"], w["up"], count, eps)
    following = params[(i + 1) % len(params)]["before"]
    rows = impl.project(hidden, w["down"], rows.sums, following, count)
  return rows.sums, new


def counters(config: config_lib.ModelConfig, batch: int) -> jax.Array:
  """Zeros, for the kernels of a step."""
  heads = config.num_heads + 2 * config.num_kv_heads
  most = max(heads, config.mlp_width // few_rows.TILE, batch * config.num_kv_heads)
  return jnp.zeros(most, jnp.int32)


def caches(config: config_lib.ModelConfig, layers: int, batch: int, length: int, filled):
  """Caches with random numbers in the first slots, `filled` i32[B], and NaN behind."""
  shape = (batch, config.num_kv_heads, length, config.head_dim)
  empty = (jnp.arange(length) >= jnp.asarray(filled)[:, None])[:, None, :, None]

  def cache(i: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    return jnp.where(empty, jnp.nan, x).astype(jnp.bfloat16)

  return [(cache(2 * i), cache(2 * i + 1)) for i in range(layers)]


def differing_bits(
  config: config_lib.ModelConfig, impl: ModuleType, requests: int, length: int
) -> dict[str, int]:
  """Compares a pass over chains with plain steps of each request alone.

  Returns:
    numbers: compared, of hidden states and of the cache
    differing: of these
  """
  params = weights(config, _COMPARED)
  run = jax.jit(functools.partial(step, config, impl))
  rng = np.random.default_rng(0)
  start = rng.integers(0, length - CHAIN, requests).astype(np.int32)
  x = jax.random.normal(jax.random.key(1), (requests, CHAIN, config.width), jnp.bfloat16)
  cache = caches(config, _COMPARED, requests, length, start)
  hidden, after = run(params, x, start, cache, counters(config, requests))
  hidden = hidden.reshape(x.shape)
  found = dict(numbers=0, differing=0)

  def compare(a, b):
    a, b = (np.asarray(y.astype(jnp.float32)) for y in (a, b))
    found["numbers"] += a.size
    found["differing"] += int(np.sum((a != b) & ~(np.isnan(a) & np.isnan(b))))

  longer = ((0, 0), (0, 0), (0, few_rows.TILE), (0, 0))
  for r in range(requests):
    alone = [tuple(jnp.pad(y[r : r + 1], longer) for y in layer) for layer in cache]
    for j in range(CHAIN):
      at = start[r : r + 1] + j
      one = counters(config, 1)
      state, alone = run(params, x[r : r + 1, j : j + 1], at, alone, one)
      compare(hidden[r, j], state[0])
    for mine, its in zip(alone, after, strict=True):
      for a, b in zip(mine, its, strict=True):
        compare(a[0, :, :length], b[r])
  return found


def seconds(
  config: config_lib.ModelConfig,
  impl: ModuleType,
  rows: int,
  length: int,
  timing: device_time.Timing,
) -> dict[str, dict]:
  """Times a plain step of all layers, and each of its kernels on the weights of all."""
  params = weights(config, config.num_layers)
  start = jnp.full(rows, length - 1, jnp.int32)
  cache = caches(config, config.num_layers, rows, length, np.full(rows, length))
  count, eps = counters(config, rows), config.norm_eps
  x = jax.random.normal(jax.random.key(1), (rows, config.width), jnp.bfloat16)
  wide = jax.random.normal(jax.random.key(2), (rows, config.mlp_width), jnp.bfloat16)

  def feed(result, first):  # the same values, which depend on the result
    return first + (0 * result[: len(first), :1]).astype(first.dtype)

  def whole(x, params, cache):
    return step(config, impl, params, x[:, None], start, cache, count)[0]

  def down(wide, params):
    total = x
    for w in params:
      total = impl.project(wide, w["down"], total, w["before"], count).sums
    return total

  def gate_up(x, params):
    for w in params:
      rows_ = few_rows.enter(x, w["after"])
      x = impl.gate_up(rows_, w["gate"], w["up"], count, eps)[:, : config.width]
    return x

  sides = {
    "step": device_time.Side(whole, (x, params, cache), feed),
    "down": device_time.Side(down, (wide, params), feed),
    "gate_up": device_time.Side(gate_up, (x, params), feed),
  }
  return timing.measure(sides, expected_s=1e-3)


def by_xla(
  config: config_lib.ModelConfig, timing: device_time.Timing
) -> dict[str, dict]:
  """Times XLA's products of a row with the `down` weights of all layers."""
  matrices = [w["down"] for w in weights(config, config.num_layers)]

  def side(product, n: int) -> device_time.Side:
    x = jax.random.normal(jax.random.key(2), (n, config.mlp_width), jnp.bfloat16)

    def run(x, matrices):
      for w in matrices:
        y = product(x, w).astype(x.dtype)
        x = jnp.pad(y, ((0, 0), (0, x.shape[1] - y.shape[1])))
      return x

    return device_time.Side(run, (x, matrices), feed=lambda result, first: result)

  in_float32 = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  sides = {
    "one row": side(jnp.dot, 1),
    "as one of several": side(lambda x, w: few_rows_matmul.linear(x, w.T), 1),
    "summed in float32": side(in_float32, 1),
    "two rows": side(jnp.dot, 2),
  }
  return timing.measure(sides, expected_s=1e-3)


def weight_bytes(config: config_lib.ModelConfig) -> dict[str, int]:
  """Bytes of the matrices that each of `seconds` reads."""
  D, F, H = config.width, config.mlp_width, config.head_dim
  mlp = 2 * config.num_layers * D * F
  heads = 2 * config.num_heads + 2 * config.num_kv_heads
  attention = 2 * config.num_layers * D * H * heads
  return {"step": 3 * mlp + attention, "down": mlp, "gate_up": 2 * mlp}


def tiny(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The same kind of model, as small as the kernels allow."""
  return dataclasses.replace(shapes.tiny(config), width=128, mlp_width=128, head_dim=32)


def main(model: str, repeats: int, dry: bool):
  launch.start(1)
  kernels.check_device(dry)
  config = shapes.MODELS[model]
  impl = few_rows.of("ref" if dry else "triton")
  config, length = (tiny(config), 96) if dry else (config, _LENGTH)
  timing = device_time.Timing(repeats=repeats, most_calls=2 if dry else 200)
  bits = {n * CHAIN: differing_bits(config, impl, n, length) for n in REQUESTS}
  rows = [[str(n), str(b["differing"]), f"{b['numbers']:,}"] for n, b in bits.items()]
  tables.show("bits", ["rows of a pass", "differing numbers", "compared"], rows)
  bandwidth = kernels.bandwidth(timing, dry)
  moved, cells = weight_bytes(config), []
  for n in ROWS:
    cells.append({"rows": n, "sides": seconds(config, impl, n, length, timing)})

  def share(name: str, side: dict) -> str:
    if "median_s" not in side:
      return ""
    return f" ({moved[name] / side['median_s'] / bandwidth['bytes_per_s']:.0%})"

  rows = [
    [str(c["rows"]), *(device_time.micros(s) + share(n, s) for n, s in c["sides"].items())]
    for c in cells
  ]
  title = f"{model}: microseconds of all layers (weights read, of the bandwidth)"
  tables.show(title, ["rows", *moved], rows)
  xla = by_xla(config, timing)
  tables.show(
    f"{model}: microseconds of `down` of all layers by XLA (weights read)",
    ["rows", "time"],
    [[n, device_time.micros(s) + share("down", s)] for n, s in xla.items()],
  )
  errors = device_time.errors([*cells, {"sides": xla}])
  differs = sum(b["differing"] for b in bits.values())
  if differs and not dry:
    errors.append(f"bits: {differs} numbers differ")
  for line in errors:
    print(f"failed: {line}")
  sizes = {"model": model, "bandwidth": bandwidth, "bytes": moved}
  print(json.dumps(sizes | {"bits": bits, "cells": cells, "by_xla": xla}))
  sys.exit(1 if errors else 0)


if __name__ == "__main__":
  model = flags.DEFINE_enum("model", "qwen3-0.6b", list(shapes.MODELS), "Widths.")
  repeats = flags.DEFINE_integer("repeats", 5, "Of each timing.", lower_bound=2)
  dry_run = flags.DEFINE_bool("dry_run", False, "Tiny sizes, on any machine.")
  launch.run(lambda: main(model.value, repeats.value, dry_run.value))
