"""The filters' cut is that of a sort, on one device and on shards of the vocabulary."""

import jax
import numpy as np
import pytest

from dev import hlo_counts
from tests import mutants
from tests import sorting
from tests import tiny
from tlt_jax import axes
from tlt_jax.pallas_kernels import find_cut
from tlt_jax.pallas_kernels.find_cut import ref
from tlt_jax.spec_decode.decoding import slices


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("V", "bits"), [(64, 4), (49_152, 1), (151_936, 1)])
def test_it_keeps_what_sorting_keeps(V, bits, exact):
  """Few blocks decide peaked rows, flat ones are looked at whole."""
  for spread in (0.3, 1.5, 4.0) if V == 49_152 else (1.5,):
    logits = sorting.some_logits(V, spread)
    for settings in (sorting.FEW, sorting.MANY):
      cut = sorting.find(logits, *sorting.columns(settings), bits=bits, exact=exact)
      sorting.assert_kept(cut, logits, settings)
  assert cut[0] == -np.inf


def test_it_keeps_what_sorting_keeps_of_many_rows():
  """Of 24 tokens: with ties, all alike, and top_p 0 and 1, in every combination."""
  rng, rows, V = np.random.default_rng(0), 2_000, 24
  logits = rng.normal(0, rng.choice([0.3, 2.0], (rows, 1)), (rows, V)).astype(np.float32)
  logits[::3] = np.round(logits[::3])
  logits[::50] = logits[::50, :1]
  settings = dict(
    temperature=rng.choice([0.0, 0.7, 1.0, 1.3], rows).astype(np.float32),
    top_k=rng.choice([0, 1, 5, 24, 100], rows).astype(np.int32),
    top_p=rng.choice([0.0, 0.31, 0.87, 1.0], rows).astype(np.float32),
    min_p=rng.choice([0.0, 0.03, 0.5], rows).astype(np.float32),
  )
  cut = sorting.find(logits, *settings.values(), bits=4)
  kept = np.sum(logits >= cut[:, None], -1)
  for row in range(rows):
    s = {name: x[row] for name, x in settings.items()}
    falling = np.sort(logits[row].astype(np.float64))[::-1]
    last = falling[min(s["top_k"] or V, V) - 1]
    largest = falling[falling >= last]  # of top-k, ties with the last of them included

    def count(slack, s=s, falling=falling, largest=largest):
      """Tokens that are kept if the bounds, which are rounded, are moved so far."""
      top_p = s["top_p"] + slack * (0 < s["top_p"] < 1)
      by_p = sorting.num_kept(largest, s["temperature"], 0, top_p, s["min_p"] * (1 - slack))
      return np.sum(falling >= falling[by_p - 1])

    assert count(-1e-6) <= kept[row] <= count(1e-6), (row, s, kept[row])


def test_it_is_a_logit_of_the_row_and_keeps_ties():
  """Whatever the temperature rounds: exactly k distinct logits stay, or their equals."""
  logits = sorting.some_logits(64, 1.0)
  logits[1] = np.arange(64) // 8
  logits[2, ::2] = -np.inf
  settings = [{**sorting.OFF, "top_k": 9, "temperature": 0.7}] * 6
  cut = sorting.find(logits, *sorting.columns(settings))
  kept = np.sum(logits >= cut[:, None], -1)
  assert kept[1] == 16 and (np.delete(kept, 1) == 9).all()
  assert (np.sort(logits, -1)[np.arange(6), -kept] == cut).all()


@pytest.mark.parametrize("V", [1000, 262_144])
def test_exact_sums_do_not_depend_on_their_order(V):
  """Others do, in the last bits; no digit overflows."""
  rng = np.random.default_rng(0)
  x = np.exp(rng.normal(0, 4, V)).astype(np.float32)
  x = np.stack([x / x.max(), np.ones(V, np.float32)])
  orders = [x] + [x[:, rng.permutation(V)] for _ in range(5)]
  exact = {np.asarray(ref._add_exactly(None, y))[0].tobytes() for y in orders}
  assert len(exact) == 1 and len({np.sum(y[0]).tobytes() for y in orders}) > 1
  np.testing.assert_allclose(ref._add_exactly(None, x), np.sum(x, -1, np.float64), 1e-6)


def test_odd_values_keep_the_likeliest():
  """No mass allowed, and logits that are all alike or all but one impossible."""
  logits = np.zeros((3, 64), np.float32)
  logits[1, 1:] = -np.inf
  logits[2] = -1e30
  others = (dict(top_p=0.0), dict(top_k=5), dict(top_p=0.5))
  settings = [{**sorting.OFF, **s} for s in others]
  cut = sorting.find(logits, *sorting.columns(settings))
  np.testing.assert_array_equal(cut, [0.0, -np.inf, np.float32(-1e30)])


def test_shards_of_the_vocabulary_find_the_same():
  """Rows over two slices, in each the vocabulary over two devices. They exchange sums and
  maxima, none larger than [shards R 15]; no logits are gathered."""
  mesh = tiny.mesh(2, 2)
  run = slices.per_slice(mesh, looped, slices.ROWS, slices.ROWS)
  logits = sorting.some_logits(10_000, 4.0)

  def put(x, *spec):
    return jax.device_put(x, axes.sharding(mesh, *spec))

  settings = sorting.columns(sorting.FEW)
  args = put(logits, "data", "model"), *(put(x, "data") for x in settings)
  compiled = jax.jit(run).lower(*args).compile()
  sorting.assert_kept(compiled(*args), logits, sorting.FEW)
  exchanged = hlo_counts.collectives(compiled.as_text())
  assert {i.opcode for i in exchanged} == {"all-reduce"}
  assert max(i.num_elements for i in exchanged) <= 2 * len(sorting.FEW) // 2 * 15


def looped(*args):
  """`find_cut` in a loop, as decoding has it."""

  def step(i, _):
    return find_cut.find_cut(args[0] + 0.0 * i, *args[1:])

  return jax.lax.fori_loop(0, 2, step, args[1])


FAULTS = {
  "the k-th falls": ("code > p[:, None]", "code >= p[:, None]"),
  "a digit less": ("jnp.arange(1, 2**bits", "jnp.arange(2, 2**bits"),
  "negative logits in reverse": ("~x, x |", "x, x |"),
  "top-p of all mass": ("logits >= by_k", "logits >= -1e9 + 0 * by_k"),
  "min-p is absolute": (">= min_p[:, None]", ">= (min_p * total)[:, None]"),
  "no temperature": ("jnp.where(temperature > 0", "jnp.where(temperature < 0"),
  "more is in few blocks": ("near > rest[:, None]", "near > -1e9 + 0 * rest[:, None]"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_are_found(fault, tmp_path):
  """By the comparison with sorting, which the search as it is passes."""
  mutant = mutants.load(ref.__file__, FAULTS.get(fault), tmp_path)
  logits = sorting.some_logits(10_000, 1.0, peak=1.0)
  settings = [*sorting.FEW[:3], *sorting.FEW[4:], {**sorting.OFF, "top_k": 500}]
  cut = sorting.find(logits, *sorting.columns(settings), search=mutant.find_cut, bits=2)
  if fault is None:
    sorting.assert_kept(cut, logits, settings)
  else:
    with pytest.raises(AssertionError):
      sorting.assert_kept(cut, logits, settings)
