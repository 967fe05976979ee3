"""Drafting by the kernels for few rows: what the drafter's module computes."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from tests import mutants
from tests import tiny
from tests import triton_kernels
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows as kernels
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import draft_tree

pytestmark = triton_kernels.requires_triton

LENGTH, PENDING, DEPTH, WIDTH, SIZE = 192, 4, 4, 2, 9
# The last rows: a free slot, and a request of one token, without any pair.
COUNT, LIVE = np.array([PENDING, 2, 3, 0], np.int32), np.array([True, True, False, True])
# The first row crosses a page. A chain may end behind the cache, a tree has room.
POSITION = {
  "chain": np.array([62, LENGTH - 1, 0, 0], np.int32),
  "tree": np.array([62, LENGTH - WIDTH * (DEPTH - 1), 0, 0], np.int32),
}
TARGETS = {name: bench.tiny(config) for name, config in shapes.MODELS.items()}
TAPS = dict(taps=(0, 1))
SOME = dict(vocab=tuple(range(70)))  # no whole tiles
KINDS = {
  "eagle2": ("qwen2.5-7b", "eagle2", {}),
  "eagle2 with a bias": ("qwen3-0.6b", "eagle2", dict(fc_bias=True)),
  "eagle3": ("qwen3-0.6b", "eagle3", TAPS),
  "eagle3 of some": ("qwen2.5-7b", "eagle3", TAPS | dict(vocab=tuple(range(0, 128, 2)))),
  "mtp": ("qwen3-0.6b", "my_package.mtp", TAPS),
}
_of = kernels.of


def config_of(kind: str, **changes) -> drafter_lib.DrafterConfig:
  model, name, fields = KINDS[kind]
  return drafter_lib.of_target(TARGETS[model], name, **fields | changes)


def weights(config):
  """Of target and drafter, random, norms and biases included."""
  leaves, structure = jax.tree.flatten(nn.meta.unbox(drafter_lib.abstract_params(config)))
  made = []
  for key, x in zip(jax.random.split(jax.random.key(2), len(leaves)), leaves, strict=True):
    random = jax.random.normal(key, x.shape)
    random = random * x.shape[-1] ** -0.5 if len(x.shape) > 1 else 1 + 0.3 * random
    made.append(random.astype(config.layer.dtype))
  return bench.weights(config.layer), jax.tree.unflatten(structure, made)


def arguments(config, shape: str, impl: str, rows: int = len(LIVE)):
  """Weights, slots, and a drafter's state.

  Its pool has random pairs, and NaN behind them: zeros for XLA, which reads all slots.
  """
  position, count, live = (np.resize(x, rows) for x in (POSITION[shape], COUNT, LIVE))
  filled = np.maximum(position - count, 0)
  kv = bench.cache(config.layer, rows, LENGTH, filled).replace(kernels=impl)
  kv = kv.replace(
    pools=kv.pools if impl == "triton" else jax.tree.map(jnp.nan_to_num, kv.pools)
  )
  row, one = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows)
  sampling = sampling_lib.Sampling(
    row.astype("uint32"), row.astype("uint32"), one, *[None] * 3
  )
  slots = slots_lib.Slots(
    pending=row + 5,
    position=jnp.asarray(position),
    remaining=jnp.asarray(9 * live),
    stop_tokens=row[:, None],
    sampling=sampling,
    kv=kv.of_live(jnp.asarray(live)),
    features=None,
  )
  size = features_lib.of_drafter(config).size
  features = jax.random.normal(jax.random.key(4), (rows, PENDING, size))
  tokens = jax.random.randint(
    jax.random.key(5), (rows, PENDING), 0, config.layer.vocab_size
  )
  newest = jnp.arange(PENDING) == np.maximum(count - 1, 0)[:, None]
  state = draft_lib.DraftState(
    (kv.pools[0],),
    features.astype(config.layer.dtype),
    jnp.where(newest, slots.pending[:, None], tokens),
    jnp.asarray(count),
  )
  return weights(config), slots, state


def propose(config, shape: str, weights, slots, state):
  layout = features_lib.of_drafter(config)
  rotations = layers.rotation(config.layer, jnp.arange(slots.length))
  draft = draft_lib.Draft(config, layout, *weights, rotations, slots.kernels)
  depth = jnp.int32(DEPTH)
  if shape == "chain":
    return draft_lib.draft_chain(draft, state, slots, depth, SIZE)
  sizes = dict(width=WIDTH, size=SIZE, scratch=WIDTH * DEPTH)
  return draft_tree.draft_tree(draft, state, slots, depth, **sizes)


def drafted(config, shape: str, impl: str):
  """The tree, the pool, and the features of every step.

  Logits do not depend on the features: else bfloat16's roundings would change guesses.
  """
  outputs = []

  def logits(self, h):
    jax.debug.callback(outputs.append, h, ordered=True)
    rows, U = h.size // h.shape[-1], len(config.target_ids)
    return 3 * jax.random.normal(jax.random.key(6), (rows, U))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(draft_lib.Draft, "logits", logits)
    run = jax.jit(functools.partial(propose, config, shape))
    tree, cache = jax.block_until_ready(run(*arguments(config, shape, impl)))
    jax.effects_barrier()
  return tree, cache.pool, outputs


def numbers(x) -> np.ndarray:
  return np.asarray(x.astype(jnp.float32))


def assert_close(found, wanted, to=0.03):
  """To 3% of the largest number: bfloat16's roundings; trees are equal."""
  for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
    np.testing.assert_array_equal(a[LIVE], b[LIVE])
  assert len(found[2]) == len(wanted[2]) == DEPTH
  pairs = [(numbers(a), numbers(b)) for a, b in zip(found[2], wanted[2], strict=True)]
  pairs = [tuple(x.reshape(len(LIVE), -1)[LIVE] for x in pair) for pair in pairs]
  for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
    a, b = numbers(a), numbers(b)
    written = np.isfinite(a)
    assert not np.nan_to_num(b)[~written].any()
    pairs.append((a[written], b[written]))
  for a, b in pairs:
    assert np.abs(a - b).max() < to * np.abs(b).max()


@pytest.fixture
def reference(monkeypatch):
  """Stands in for the kernels."""
  monkeypatch.setattr(kernels, "of", lambda impl: _of("ref"))
  monkeypatch.setattr(triton_call, "is_available", lambda: True)


@pytest.mark.parametrize(
  "kind, shape",
  [("eagle3", "chain")]
  + [(kind, "tree") for kind in KINDS]
  + [tiny.slow(kind, "chain") for kind in KINDS if kind != "eagle3"],
)
def test_drafts_are_those_of_the_module(kind, shape, reference):
  config = config_of(kind)
  assert_close(drafted(config, shape, "triton"), drafted(config, shape, "ref"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_that_of_the_module(kind, reference):
  config = config_of(kind, unused_rows=((100, 128),))
  made, h = weights(config), jax.random.normal(jax.random.key(0), (2, 3, 128), "bfloat16")
  layout = features_lib.of_drafter(config)
  rotations = layers.rotation(config.layer, jnp.arange(LENGTH))
  found, wanted = (
    jax.jit(draft_lib.Draft(config, layout, *made, rotations, impl).logits)(h)
    for impl in ("triton", "ref")
  )
  assert found.shape == wanted.shape and found.dtype == wanted.dtype
  used = config.target_ids < 100
  np.testing.assert_array_equal(found[..., ~used], wanted[..., ~used])
  found, wanted = found[..., used], wanted[..., used]
  assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.fixture
def interpreted(monkeypatch):
  """In steps of 32, and short splits, so that each sum is cut into parts."""
  triton = kernels.of("triton")
  monkeypatch.setattr(triton, "_STEP", 32)
  monkeypatch.setattr(triton, "_SPLIT", 64)
  with triton_kernels.interpreted():
    yield triton


def assert_as_reference(config, shape):
  """To 5%: Triton's interpreter cuts numbers off where a GPU rounds them to bfloat16."""
  found = drafted(config, shape, "triton")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernels, "of", lambda impl: _of("ref"))
    assert_close(found, drafted(config, shape, "triton"), to=0.05)


@pytest.mark.parametrize(
  "kind, shape", [("eagle2 with a bias", "tree"), ("eagle3 of some", "chain")]
)
def test_kernels_draft_as_their_reference(kind, shape, interpreted):
  assert_as_reference(config_of(kind), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_draft_as_their_reference_on_a_gpu(kind, shape):
  assert_as_reference(config_of(kind), shape)


FAULTS = {
  "rows are normed": (
    "products",
    ("if TILES == 0:", "if TILES < 0:"),
  ),
  "a bias for each row": ("products", ("r[:, None] * STRIDE", "r[:, None] * BN")),
  "a node sees other paths": (
    "attention",
    ("own = tl.where(depth < 0, slot, own)", "own = slot"),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_kernels_are_found(fault, interpreted, monkeypatch, tmp_path):
  name, change = FAULTS[fault]
  mutant = mutants.load(getattr(interpreted, name).__file__, change, tmp_path)
  monkeypatch.setattr(interpreted, name, mutant)
  with pytest.raises(AssertionError):
    assert_as_reference(config_of("eagle2 with a bias"), "tree")


@pytest.mark.slow
@pytest.mark.parametrize(
  "fault",
  [
    ("(start[:, None] + jnp.arange(W))[..., None]", "start[:, None, None]"),
    ("jnp.arange(levels) < d - 1", "jnp.arange(levels) < 0"),
    ("for x in (out, path))", "for x in (out, path[:, ::-1]))"),
    ("_beams(slots.position, d - 1, path)", "_beams(slots.position, d, path)"),
  ],
)
def test_faults_of_paths_are_found(fault, reference, tmp_path):
  """In what the kernels see; the module keeps what it should see."""
  config = config_of("eagle2")
  wanted = drafted(config, "tree", "ref")
  mutant = mutants.load(draft_tree.__file__, fault, tmp_path)
  with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
    patch.setattr(draft_tree, "draft_tree", mutant.draft_tree)
    assert_close(drafted(config, "tree", "triton"), wanted)


@pytest.mark.parametrize(
  "kind, changes, rows, kernels",
  [
    ("eagle2", {}, 4, dict(qkv=2, attend=2, gate_up=2, project=6, head=2)),
    ("eagle3", {}, 4, dict(qkv=2, attend=2, gate_up=2, project=5, head=2)),
    # More pairs than rows of kernels are lacking; the steps have few.
    ("eagle2", {}, 40, dict(qkv=1, attend=1, gate_up=1, project=3, head=2)),
    ("eagle2", {}, 132, {}),
    ("eagle2", SOME, 4, dict(qkv=2, attend=2, gate_up=2, project=6)),
    ("eagle3", dict(mlp_width=96), 4, dict(head=2)),
    ("eagle3", dict(head_dim=32), 4, dict(head=2)),
    ("eagle3", dict(dtype="float32"), 4, {}),
  ],
)
def test_what_fits_runs_by_kernels(kind, changes, rows, kernels, monkeypatch):
  """The calls in a program that drafts a chain: the pairs that lack, and a step."""
  assert calls(config_of(kind, **changes), rows, monkeypatch) == kernels


def test_products_that_may_run_at_once_share_no_counter(monkeypatch):
  """Of two with `fc` one is left to XLA."""
  config = config_of("eagle2")

  def inputs(drafter, e, h):
    return drafter.apply_fc(jnp.concatenate([e, h], -1)), drafter.apply_fc(
      jnp.concatenate([h, e], -1)
    )

  kind = drafters.find(config.kind)._replace(inputs=inputs)
  monkeypatch.setattr(drafters, "find", lambda name: kind)
  assert calls(config, len(LIVE), monkeypatch)["project"] == 6


def calls(config, rows, monkeypatch) -> collections.Counter:
  called = collections.Counter()

  def count(*args, out_type, name, **options):
    called[name] += 1
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

  monkeypatch.setattr(triton_call, "triton_call", count)
  monkeypatch.setattr(triton_call, "is_available", lambda: True)
  args = jax.eval_shape(lambda: arguments(config, "chain", "triton", rows))
  jax.eval_shape(functools.partial(propose, config, "chain"), *args)
  called.pop("tree_attention", None)
  return called
