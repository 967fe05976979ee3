"""Whether the bits of a row depend on other rows; `passes` is the command.

A decoder by the kernels of `pallas_kernels.few_rows`, with random weights. Rows among
others, chains and trees are compared with plain steps of each request alone, in a cache of
another length: logits and hidden states of every node, and the cache. Of rows the results
of each kernel are, too.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from experiments import tables
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import few_rows
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import few_rows as kernels_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib

ROWS = (4, 16, 64)  # whose bits are compared with those of one
CHAIN, LONG = 4, 16  # nodes
PARENTS = (0, 0, 0, 0, 0, 1, 1, 2, 5, 5, 6, 8, 8, 11, 13, 13)  # of a tree's nodes
PAGE = 64  # slots
_COMPARED = 2  # layers whose bits are compared; the others are alike


def weights(config: config_lib.ModelConfig) -> dict:
  """Random weights of a target, in bfloat16, norms and biases included."""
  return _maker(config)(jax.random.key(0))


@functools.cache
def _maker(config: config_lib.ModelConfig) -> Callable[[jax.Array], dict]:
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

  return make


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
  deepest: int | None = None,
) -> few_rows.Pass:
  """A pass over the nodes of trees, the first of which is in slot `start` i32[B].

  `deepest`: of a node, at most; 0: they are chains.
  """
  J = tree.tokens.shape[1]
  if deepest == 0:
    nodes = kernels_lib.chain(start, J)
  else:
    ancestors = tree_lib.ancestors(tree.parent)
    nodes = kernels_lib.tree(start, tree.depth, ancestors, deepest or J - 1)
  rotations = layers.rotation(config, jnp.arange(kv.length))
  positions = start[:, None] + tree.depth
  args = config, params, kv, tree.tokens, positions, nodes, rotations
  return few_rows.run(*args, taps=(0,), impl=impl)


def deepest_of(tree: tree_lib.Tree) -> int:
  """`step`'s argument: 0 of chains, as rollouts pass over them."""
  J = tree.tokens.shape[1]
  is_chain = np.all(np.asarray(tree.parent) == np.maximum(np.arange(J) - 1, 0))
  return 0 if is_chain else int(np.max(tree.depth))


def cache(
  config: config_lib.ModelConfig, batch: int, length: int, filled
) -> cache_lib.KVCache:
  """Random numbers in the first slots of each row, `filled` i32[B], and NaN behind."""
  made = cache_lib.init(config, batch, length, page=PAGE, kernels="ref")
  pages = made.pages.shape[1]
  slot = jnp.arange(pages * PAGE).reshape(pages, 1, PAGE, 1)
  empty = slot >= jnp.asarray(filled)[:, None, None, None, None]
  empty = jnp.pad(
    jnp.broadcast_to(empty, (batch, *slot.shape)).reshape(-1, 1, PAGE, 1),
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


class _Kept:
  """The operations of an implementation; keeps what they return."""

  def __init__(self, impl):
    self._impl = impl
    self.made: dict[str, Any] = {}  # by number and name

  def __getattr__(self, name: str) -> Callable:
    def call(*args):
      made = getattr(self._impl, name)(*args)
      self.made[f"{len(self.made):02} {name}"] = made
      return made

    return call


def step_by_kernel(
  config: config_lib.ModelConfig, impl: str, params, kv, tree, start
) -> tuple[few_rows.Pass, dict[str, Any]]:
  """A plain step, and what each kernel returned, by its place and name."""
  kept = _Kept(kernels_lib.of(impl))
  with mock.patch.object(kernels_lib, "of", lambda impl: kept):
    made = step(config, impl, params, kv, tree, start, deepest=0)
  return made, kept.made


class Programs(NamedTuple):
  """Compiled once for the shapes of several comparisons."""

  step: Callable
  step_by_kernel: Callable

  @classmethod
  def of(cls, config: config_lib.ModelConfig, impl: str) -> "Programs":
    config = dataclasses.replace(config, num_layers=_COMPARED)
    one, by_kernel = (functools.partial(f, config, impl) for f in (step, step_by_kernel))
    return cls(jax.jit(one, static_argnames="deepest"), jax.jit(by_kernel))


def bits(x: jax.Array) -> np.ndarray:
  x = np.asarray(x)
  return x.view(f"u{x.dtype.itemsize}")


def differing_by_kernel(
  config: config_lib.ModelConfig,
  impl: str,
  rows: int,
  length: int,
  programs: Programs | None = None,
) -> dict[str, int]:
  """Compares kernels of a plain step of several rows with those of each row alone.

  The first kernel whose results differ is at fault; the others may follow it.

  Returns:
    differing numbers by kernel
  """
  config = dataclasses.replace(config, num_layers=_COMPARED)
  params, tokens = weights(config), tokens_of(config, rows, 1)
  run = (programs or Programs.of(config, impl)).step_by_kernel
  start = np.random.default_rng(0).integers(0, length - 1, rows).astype(np.int32)
  before = cache(config, rows, length, start)
  together = run(params, before, chains(tokens), start)[1]
  together = {n: list(map(bits, jax.tree.leaves(x))) for n, x in together.items()}
  found = collections.Counter()
  for row in range(rows):
    args = _of_row(before, row, more=1), chains(tokens[row : row + 1]), start[row : row + 1]
    alone = run(params, *args)[1]
    for name, several in together.items():
      one = map(bits, jax.tree.leaves(alone[name]))
      for x, y in zip(several, one, strict=True):
        found[name] += _differing(x, y, row)
  return dict(found)


def _differing(several: np.ndarray, one: np.ndarray, row: int) -> int:
  """Numbers of a row that differ; 0 of what is not by row: pools, counts and scratch."""
  if several.ndim != one.ndim:
    return 0
  axes = [i for i in range(one.ndim) if several.shape[i] != one.shape[i]]
  if len(axes) != 1 or one.shape[axes[0]] != 1:
    return 0
  return int(np.sum(several.take([row], axes[0]) != one))


def differing_bits(
  config: config_lib.ModelConfig,
  impl: str,
  tree: tree_lib.Tree,
  length: int,
  programs: Programs | None = None,
) -> dict[str, int]:
  """Compares a pass over trees with plain steps of each request alone.

  Returns:
    numbers: compared, of logits, hidden states, keys and values
    differing: of these
  """
  config = dataclasses.replace(config, num_layers=_COMPARED)
  params, (B, J) = weights(config), tree.tokens.shape
  run = (programs or Programs.of(config, impl)).step
  start = np.random.default_rng(0).integers(0, length - J, B).astype(np.int32)
  before = cache(config, B, length, start)
  made = run(params, before, tree, start, deepest=deepest_of(tree))
  pages, nodes = np.asarray(before.pages), list(map(bits, made[:3]))
  was, pools = (list(map(bits, jax.tree.leaves(kv.pools))) for kv in (before, made.kv))
  found = dict(numbers=0, differing=0)

  def compare(a, b):
    found["numbers"] += a.size
    found["differing"] += int(np.sum(a != b))

  def slots(pool, row, first, count):
    at = np.arange(first, first + count)
    return pool[pages[row, at // PAGE], :, at % PAGE]

  for row in range(B):
    alone = {-1: _of_row(before, row, more=1)}  # after each node
    for node in range(J):
      parent = int(tree.parent[row, node]) if node else -1
      at = start[row] + int(tree.depth[row, node])
      one = chains(tree.tokens[row : row + 1, node : node + 1])
      plain = run(params, alone[parent], one, at[None], deepest=0)
      alone[node] = plain.kv
      for a, b in zip(nodes, plain[:3], strict=True):
        compare(a[row, node], bits(b)[0, 0])
      for a, b in zip(pools, jax.tree.leaves(plain.kv.pools), strict=True):
        its = slots(a, row, int(start[row]) + node, 1)
        compare(its[0], bits(b)[at // PAGE, :, at % PAGE])
    for a, b in zip(pools, was, strict=True):
      compare(*(slots(x, row, 0, int(start[row])) for x in (a, b)))
  return found


class Case(NamedTuple):
  """A pass over random tokens."""

  live: int  # requests
  nodes: int = 1  # of each
  is_tree: bool = False  # or a chain

  def __str__(self) -> str:
    return f"{self.live} x {self.nodes}{' (tree)' if self.is_tree else ''}"

  def tokens(self, config: config_lib.ModelConfig) -> tree_lib.Tree:
    make = trees if self.is_tree else chains
    return make(tokens_of(config, self.live, self.nodes))


def compared(config: config_lib.ModelConfig, impl: str, length: int) -> dict:
  """Bits that differ, by kernel and by pass; prints both."""
  programs = Programs.of(config, impl)
  rows = {n: differing_by_kernel(config, impl, n, length, programs) for n in ROWS}
  faults = {n: next((k for k, bad in r.items() if bad), "none") for n, r in rows.items()}
  tables.show(
    "bits of kernels: numbers of a row that differ from those of the row alone",
    ["rows", "in all", "first kernel with one"],
    [[str(n), str(sum(r.values())), faults[n]] for n, r in rows.items()],
  )
  cases = [*map(Case, ROWS), *(Case(64 // n, n) for n in (CHAIN, LONG))]
  cases += [Case(n, LONG, is_tree=True) for n in (1, 4)]
  found = {}
  for case in cases:
    tree = case.tokens(config)
    found[str(case)] = differing_bits(config, impl, tree, length, programs)
  tables.show(
    "bits of passes",
    ["requests x nodes", "differing numbers", "compared"],
    [[n, str(b["differing"]), f"{b['numbers']:,}"] for n, b in found.items()],
  )
  kernels_found = {str(n): {k: x for k, x in r.items() if x} for n, r in rows.items()}
  return {"differing_by_kernel": kernels_found, "passes": found}


def tiny(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The same kind of model, as small as the kernels allow."""
  return dataclasses.replace(shapes.tiny(config), width=128, mlp_width=128, head_dim=64)
