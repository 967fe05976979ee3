"""Checks on a GPU that the bits of a row do not depend on other rows; times few rows.

    python -m benchmarks.few_rows --model=qwen3-0.6b

A decoder by the kernels of `pallas_kernels.few_rows`, with random weights:

  bits    chains of four of 4, 8 and 16 requests in one pass (16, 32 and 64 rows), and
          trees, against plain steps of each request alone, in a cache of another length:
          logits and hidden states of every node, and the cache
  step    seconds of a step, by rows, compared with reading the weights at the measured
          bandwidth; and of two of its kernels
  one row XLA's product of one row with the weights of all layers: by default, as one of
          several rows (`few_rows_matmul`), and with sums in float32; and of two rows

It fails if a bit differs. The last line is JSON. `--dry_run` runs the operations in
jax.numpy, in tiny sizes, on any machine; there bits may differ.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import sys

from absl import flags
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_time
from benchmarks import kernels
from benchmarks import shapes
from experiments import launch
from experiments import tables
from tlt_jax import few_rows_matmul
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import few_rows
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import few_rows as kernels_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib

CHAIN = 4  # nodes
REQUESTS = (4, 8, 16)
ROWS = (1, 4, 16, 64)
PARENTS = (0, 0, 0, 1, 1, 3, 2, 3, 0)  # of a tree's nodes
_LENGTH = 2048  # tokens of a cache
_PAGE = 64  # slots
_COMPARED = 2  # layers whose bits are compared; the others are alike


def weights(config: config_lib.ModelConfig) -> dict:
  """Random weights of a target, in bfloat16, norms and biases included."""
  abstract = nn.meta.unbox(target.abstract_params(config))
  leaves, structure = jax.tree.flatten(abstract)

  @jax.jit
  def make(key):
    keys = jax.random.split(key, len(leaves))
    made = []
    for key, x in zip(keys, leaves, strict=True):
      random = jax.random.normal(key, x.shape)
      random = random * x.shape[-1] ** -0.5 if len(x.shape) > 1 else 1 + 0.1 * random
      made.append(random.astype(jnp.bfloat16))
    return jax.tree.unflatten(structure, made)

  return make(jax.random.key(0))


def chains(tokens: jax.Array) -> tree_lib.Tree:
  """Of tokens i32[B J]; plain steps, if J is 1."""
  return tree_lib.chain(tokens, tokens.shape[1] - 1)


def trees(tokens: jax.Array, parents: Sequence[int] = PARENTS) -> tree_lib.Tree:
  depth = [0] * len(parents)
  for node, parent in enumerate(parents[1:], 1):
    depth[node] = depth[parent] + 1
  parent, depth = (jnp.broadcast_to(jnp.array(x), tokens.shape) for x in (parents, depth))
  return tree_lib.Tree(tokens, parent, depth, jnp.ones(tokens.shape, bool))


def tokens_of(config: config_lib.ModelConfig, batch: int, count: int) -> jax.Array:
  return jax.random.randint(jax.random.key(1), (batch, count), 0, config.vocab_size)


def step(
  config: config_lib.ModelConfig,
  impl: str,
  params: dict,
  kv: cache_lib.KVCache,
  tree: tree_lib.Tree,
  start: jax.Array,
) -> few_rows.Pass:
  """A pass over the nodes of trees, the first of which is in slot `start` i32[B]."""
  ancestors, J = tree_lib.ancestors(tree.parent), tree.tokens.shape[1]
  nodes = kernels_lib.tree(start, tree.depth, ancestors, J - 1)
  rotations = layers.rotation(config, jnp.arange(kv.length))
  positions = start[:, None] + tree.depth
  args = config, params, kv, tree.tokens, positions, nodes, rotations
  return few_rows.run(*args, taps=(0,), impl=impl)


def cache(
  config: config_lib.ModelConfig, batch: int, length: int, filled
) -> cache_lib.KVCache:
  """Random numbers in the first slots of each row, `filled` i32[B], and NaN behind."""
  made = cache_lib.init(config, batch, length, page=_PAGE, kernels="ref")
  pages = made.pages.shape[1]
  slot = jnp.arange(pages * _PAGE).reshape(pages, 1, _PAGE, 1)
  empty = slot >= jnp.asarray(filled)[:, None, None, None, None]
  empty = jnp.pad(
    jnp.broadcast_to(empty, (batch, *slot.shape)).reshape(-1, 1, _PAGE, 1),
    ((0, 1), (0, 0), (0, 0), (0, 0)),
    constant_values=True,
  )
  keys = iter(jax.random.split(jax.random.key(3), 2 * len(made)))

  def random(x):
    y = jax.random.normal(next(keys), x.shape, jnp.bfloat16)
    return jnp.where(empty, jnp.nan, y).astype(jnp.bfloat16)

  return made.replace(pools=jax.tree.map(random, made.pools))


def _of_row(kv: cache_lib.KVCache, row: int, more: int) -> cache_lib.KVCache:
  """A cache with one of the rows, and `more` unwritten pages that it could grow to."""
  old = kv.pages[row]
  pages = jnp.arange(len(old) + more)[None]

  def take(x):
    return jnp.concatenate([x[old], jnp.full((more + 1, *x.shape[1:]), jnp.nan, x.dtype)])

  return kv.replace(pools=jax.tree.map(take, kv.pools), pages=pages.astype(jnp.int32))


def differing_bits(
  config: config_lib.ModelConfig, impl: str, tree: tree_lib.Tree, length: int
) -> dict[str, int]:
  """Compares a pass over trees with plain steps of each request alone.

  Returns:
    numbers: compared, of logits, hidden states, keys and values
    differing: of these
  """
  config = dataclasses.replace(config, num_layers=_COMPARED)
  params, (B, J) = weights(config), tree.tokens.shape
  run = jax.jit(functools.partial(step, config, impl))
  start = np.random.default_rng(0).integers(0, length - J, B).astype(np.int32)
  before = cache(config, B, length, start)
  made = run(params, before, tree, start)
  found = dict(numbers=0, differing=0)

  def compare(a, b):
    a, b = (np.asarray(y.astype(jnp.float32)) for y in (a, b))
    found["numbers"] += a.size
    found["differing"] += int(np.sum((a != b) & ~(np.isnan(a) & np.isnan(b))))

  def slots(kv, row, first, count):
    at = np.arange(first, first + count)
    at = np.asarray(kv.pages)[row, at // _PAGE], at % _PAGE
    return [x[at[0], :, at[1]] for x in jax.tree.leaves(kv.pools)]

  for row in range(B):
    alone = {-1: _of_row(before, row, more=1)}  # after each node
    for node in range(J):
      parent = int(tree.parent[row, node]) if node else -1
      at = start[row] + int(tree.depth[row, node])
      one = chains(tree.tokens[row : row + 1, node : node + 1])
      plain = run(params, alone[parent], one, at[None])
      alone[node] = plain.kv
      for a, b in zip(made[:3], plain[:3], strict=True):
        compare(a[row, node], b[0, 0])
      its = slots(made.kv, row, int(start[row]) + node, 1)
      for a, b in zip(its, slots(plain.kv, 0, int(at), 1), strict=True):
        compare(a, b)
    its = slots(made.kv, row, 0, int(start[row]))
    for a, b in zip(its, slots(before, row, 0, int(start[row])), strict=True):
      compare(a, b)
  return found


def seconds(
  config: config_lib.ModelConfig,
  impl: str,
  rows: int,
  length: int,
  timing: device_time.Timing,
) -> dict[str, dict]:
  """Times a plain step, and two of its kernels on the weights of all layers."""
  params, operations = weights(config), kernels_lib.of(impl)
  start = jnp.full(rows, length - 1, jnp.int32)
  kv = cache(config, rows, length, np.full(rows, length))
  eps, D = config.norm_eps, config.width
  count = jnp.zeros(max(config.mlp_width, D) // kernels_lib.TILE, jnp.int32)
  tokens = jnp.arange(rows, dtype=jnp.int32)[:, None]
  wide = jax.random.normal(jax.random.key(2), (rows, config.mlp_width), jnp.bfloat16)
  blocks = [params[f"layer_{i}"] for i in range(config.num_layers)]
  scale = params["final_norm"]["scale"]
  entered = jax.jit(operations.enter)(tokens[:, 0], params["embedding"], scale)

  def feed(result, first):  # the same values, which depend on the result
    return first + (0 * result.reshape(-1)[0]).astype(first.dtype)

  def whole(tokens, params, kv):
    return step(config, impl, params, kv, chains(tokens), start).logits

  def down(wide, blocks):
    total = entered.sums
    for w in blocks:
      total = operations.project(wide, w["mlp"]["down_proj"], total, scale, count).sums
    return total

  def gate_up(x, blocks):
    for w in blocks:
      mlp = w["mlp"]
      y = operations.gate_up(
        entered._replace(scaled=x), mlp["gate_proj"], mlp["up_proj"], count, eps
      )
      x = y[:, :D]
    return x

  sides = {
    "step": device_time.Side(whole, (tokens, params, kv), feed),
    "down": device_time.Side(down, (wide, blocks), feed),
    "gate_up": device_time.Side(gate_up, (entered.scaled, blocks), feed),
  }
  return timing.measure(sides, expected_s=1e-3)


def by_xla(config: config_lib.ModelConfig, timing: device_time.Timing) -> dict[str, dict]:
  """Times XLA's products of a row with the `down` weights of all layers."""
  params = weights(config)
  matrices = [params[f"layer_{i}"]["mlp"]["down_proj"] for i in range(config.num_layers)]

  def side(product, n: int) -> device_time.Side:
    x = jax.random.normal(jax.random.key(2), (n, config.mlp_width), jnp.bfloat16)

    def run(x, matrices):
      for w in matrices:
        y = product(x, w).astype(x.dtype)
        x = jnp.pad(y, ((0, 0), (0, x.shape[1] - y.shape[1])))
      return x

    return device_time.Side(run, (x, matrices), feed=lambda result, first: result)

  def dot(x, w, **options):
    return jnp.dot(x, w.T, **options)

  in_float32 = functools.partial(dot, preferred_element_type=jnp.float32)
  sides = {
    "one row": side(dot, 1),
    "as one of several": side(few_rows_matmul.linear, 1),
    "summed in float32": side(in_float32, 1),
    "two rows": side(dot, 2),
  }
  return timing.measure(sides, expected_s=1e-3)


def weight_bytes(config: config_lib.ModelConfig) -> dict[str, int]:
  """Bytes of the matrices that each of `seconds` reads."""
  D, F, H = config.width, config.mlp_width, config.head_dim
  mlp = 2 * config.num_layers * D * F
  heads = 2 * config.num_heads + 2 * config.num_kv_heads
  attention = 2 * config.num_layers * D * H * heads
  head = 2 * config.vocab_size * D
  return {"step": 3 * mlp + attention + head, "down": mlp, "gate_up": 2 * mlp}


def tiny(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The same kind of model, as small as the kernels allow."""
  return dataclasses.replace(shapes.tiny(config), width=128, mlp_width=128, head_dim=64)


def main(model: str, repeats: int, dry: bool):
  launch.start(1)
  kernels.check_device(dry)
  config = shapes.MODELS[model]
  impl = "ref" if dry else "triton"
  config, length = (tiny(config), 96) if dry else (config, _LENGTH)
  timing = device_time.Timing(repeats=repeats, most_calls=2 if dry else 200)
  passes = {f"{n} chains": chains(tokens_of(config, n, CHAIN)) for n in REQUESTS}
  passes["4 trees"] = trees(tokens_of(config, 4, len(PARENTS)))
  bits = {name: differing_bits(config, impl, x, length) for name, x in passes.items()}
  rows = [[n, str(b["differing"]), f"{b['numbers']:,}"] for n, b in bits.items()]
  tables.show("bits", ["a pass over", "differing numbers", "compared"], rows)
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
