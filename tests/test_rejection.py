"""Verification by rejection: output follows the target's distribution, whatever is drafted.

One checker decodes many short sequences, iteration after iteration, and compares how
often each occurs with the target's exact probability. The same checker must reject
draws whose rule was broken on purpose.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from scipy import stats

from tests import test_sampling
from tests import tiny
from tlt_jax import noise
from tlt_jax.spec_decode.decoding import sampling
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.speculation import rejection
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify

V, LENGTH, DRAWS, START = 5, 3, 200_000, 40
OFF = test_sampling.OFF
CASES = {
  "plain": {},
  "filtered": dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05),
  "two_left": dict(top_k=2),  # fewer than the children of a node
  "greedy": dict(temperature=0.0, top_p=0.5),
}
RANDOM = ("plain", "filtered", "two_left")
# The parent of each node. The tree's nodes have 3, 2, 1 and then no children.
SHAPES = {"chain": (0, 0, 1), "tree": (0, 0, 0, 0, 1, 1, 2)}

_rng = np.random.default_rng(2)
TARGET = _rng.normal(0, 1.0, (V, V)).astype(np.float32)  # logits after each token
DRAFT = (TARGET + _rng.normal(0, 0.8, (V, V))).astype(np.float32)


def make(cases, rows) -> sampling.Sampling:
  """Row i is sampled as case i modulo their number; each is a request of its own."""
  settings = [{**OFF, **CASES[case]} for case in cases]
  return test_sampling.parameters_of(settings, np.arange(rows))


def tables(cases):
  """p and q after each token, f32[cases V V]."""
  parameters = sampling.repeat(make(cases, len(cases)), V)
  of = lambda distribution, logits: distribution(
    jnp.tile(logits, (len(cases), 1)), parameters
  ).reshape(len(cases), V, V)
  return of(rejection.target_distribution, TARGET), of(rejection.draft_distribution, DRAFT)


def draft(shape, q, parameters, last, position):
  """A tree of that shape after token `last`, and q at its nodes, of q f32[cases V V]."""
  case = jnp.arange(len(last)) % len(q)
  depth, tokens, q_nodes = [0], [last], []
  for node, parent in enumerate(shape):
    if node:
      depth.append(depth[parent] + 1)
    q_nodes.append(q[case, tokens[node]])
    if width := shape[1:].count(node):
      at = position + depth[node] + 1
      drawn = rejection.draw_candidates(q_nodes[-1], parameters, at, width)
      tokens += [drawn[:, w] for w in range(width)]
    else:
      q_nodes[-1] = jnp.zeros_like(q_nodes[-1])  # nothing reads it at a leaf
  tokens = jnp.stack(tokens, 1)
  whole = lambda x: jnp.broadcast_to(jnp.array(x, jnp.int32), tokens.shape)
  tree = tree_lib.Tree(tokens, whole(shape), whole(depth), tokens >= 0)
  return tree, jnp.stack(q_nodes, 1)


def accept(shape, p, parameters, tree, q_nodes, position):
  """How many drafted tokens stand, and the output."""
  case = jnp.arange(len(position)) % len(p)
  p_nodes = p[case[:, None], tree.tokens]
  width = shape[1:].count(0)
  return rejection.verify(tree, p_nodes, q_nodes, parameters, position, LENGTH, width)[1:]


def make_iteration(shape, cases):
  """(parameters, (last, length, out)) -> the same, with one to three tokens more.

  Draws by the rules as they are now (one may have been broken). The two parts are
  programs of their own, as only one of them is another if a rule is broken.
  """
  p, q = tables(cases)
  drafted = jax.jit(lambda *args: draft(SHAPES[shape], *args))
  accepted = jax.jit(lambda *args: accept(SHAPES[shape], *args))

  def iteration(parameters, carry):
    last, length, out = carry
    position = START + length
    tree, q_nodes = drafted(q, parameters, last, position)
    count, tokens = accepted(p, parameters, tree, q_nodes, position)
    at = jnp.arange(LENGTH) - length[:, None]
    new = jnp.take_along_axis(tokens, jnp.clip(at, 0, LENGTH - 1), 1)
    last = jnp.take_along_axis(tokens, count[:, None], 1)[:, 0]
    return last, length + count + 1, jnp.where(at >= 0, new, out)

  return iteration


def begin(parameters):
  zero = (parameters.request * 0).astype(jnp.int32)
  return zero, zero, jnp.repeat(zero[:, None], LENGTH, 1)


def run(shape, cases, draws=DRAWS):
  """Sequences i32[B LENGTH] after token 0 of the cases in turn.

  Returns:
    them, and how many tokens came of the first iteration, i32[B]
  """
  parameters = make(cases, draws * len(cases))
  iteration, carry, lengths = make_iteration(shape, cases), begin(parameters), []
  for _ in range(LENGTH):
    carry = iteration(parameters, carry)
    lengths.append(carry[1])
  return jax.device_get((carry[2], lengths[0]))


@functools.cache
def mixed(shape):
  """All but greedy in one batch, row by row in turn."""
  return run(shape, RANDOM)


def of_case(x, case):
  return x[RANDOM.index(case) :: len(RANDOM)]


def pvalue(tokens, case) -> float:
  """Of a chi-square test of all sequences against the case's exact distribution."""
  p = np.stack([test_sampling.exact(row, **{**OFF, **CASES[case]}) for row in TARGET])
  p = np.einsum("a,ab,bc->abc", p[0], p, p).ravel()
  counts = np.bincount(tokens @ [V * V, V, 1], minlength=V**LENGTH)
  if counts[p == 0].any():
    return 0.0
  rare = p * len(tokens) < 10
  merge = lambda x: np.append(x[~rare], x[rare].sum())
  counts, p = merge(counts), merge(p)
  counts, p = counts[p > 0], p[p > 0]
  return stats.chisquare(counts, len(tokens) * p).pvalue if len(p) > 1 else 1.0


@pytest.mark.parametrize("case", RANDOM)
@pytest.mark.parametrize("shape", [tiny.slow("chain"), "tree"])
def test_sequences_follow_the_targets_distribution(shape, case):
  """200,000 of each; the same position is drafted again after a rejection before it."""
  assert pvalue(of_case(mixed(shape)[0], case), case) > 1e-3


def always(accepts):
  return lambda u, p, q: u < 2


def inverted(accepts):
  return lambda u, p, q: u * p < q


def not_subtracted(residual):
  """The bonus comes from the target's distribution, as if nothing had been tried."""
  return lambda p, q: p


def not_normalised(residual):
  return lambda p, q: jnp.maximum(p - q, 0)


def from_the_drafter(residual):
  return lambda p, q: q


def with_replacement(without):
  """Of a sibling that was drawn without the first."""
  return lambda q, token: q


def only_zeroed(without):
  return lambda q, token: jnp.where(jnp.arange(V) == token[:, None], 0, q)


def shared_by_siblings(uniform):
  return lambda s, position, count: jnp.repeat(uniform(s, position, 1), count, -1)


def shared_by_positions(uniform):
  return lambda s, position, count: uniform(s, position * 0, count)


def likeliest_first(draw_candidates):
  """Siblings in the order of their scores, not of their drawing."""

  def broken(q, s, position, width):
    drawn = draw_candidates(q, s, position, width)
    order = jnp.argsort(-jnp.take_along_axis(q, drawn, 1), 1)
    return jnp.take_along_axis(drawn, order, 1)

  return broken


def better_of_two(draw_candidates):
  """The tree's shape depends on what was drawn."""
  broken = likeliest_first(draw_candidates)
  return lambda q, s, position, width: broken(q, s, position, width + 1)[:, :width]


def one_for_all(gumbel):
  return lambda s, position, purpose, ids: gumbel(s, position, 1, ids)


def bonus_from_the_childrens(gumbel):
  return lambda s, position, purpose, ids: gumbel(
    s, position, {3: 1}.get(purpose, purpose), ids
  )


def unfiltered(target_distribution):
  off = lambda s: s.replace(top_k=s.top_k * 0, top_p=s.top_p * 0 + 1, min_p=s.min_p * 0)
  return lambda logits, s: target_distribution(logits, off(s))


def ignore_temperature(target_distribution):
  return lambda logits, s: target_distribution(
    logits, s.replace(temperature=s.temperature * 0 + 1)
  )


@pytest.mark.parametrize(
  ("name", "broken", "shape", "case"),
  [
    ("_accepts", always, "chain", "plain"),
    ("_accepts", inverted, "chain", "plain"),
    ("_residual", not_subtracted, "chain", "plain"),
    ("_residual", not_normalised, "tree", "plain"),
    ("_residual", from_the_drafter, "chain", "plain"),
    ("_without", with_replacement, "tree", "plain"),
    ("_without", only_zeroed, "tree", "plain"),
    ("_uniform", shared_by_siblings, "tree", "plain"),
    ("_uniform", shared_by_positions, "chain", "plain"),
    ("draw_candidates", likeliest_first, "tree", "plain"),
    ("draw_candidates", better_of_two, "chain", "plain"),
    ("_gumbel", one_for_all, "chain", "plain"),
    ("_gumbel", bonus_from_the_childrens, "chain", "plain"),
    ("target_distribution", unfiltered, "chain", "filtered"),
    ("target_distribution", ignore_temperature, "chain", "filtered"),
  ],
)
def test_the_checker_rejects_a_broken_rule(monkeypatch, name, broken, shape, case):
  """By the same test as above, of half as many draws."""
  monkeypatch.setattr(rejection, name, broken(getattr(rejection, name)))
  assert pvalue(run(shape, [case], DRAWS // 2)[0], case) < 1e-9


def chance(p, q, width) -> float:
  """That one of `width` children stands: by the definition, child by child."""
  if not width or not q.sum():
    return 0.0
  rest = np.maximum(p - q, 0)
  left = rest / (rest.sum() or 1)
  total = 0.0
  for x in np.flatnonzero(q):
    stands = min(1.0, p[x] / q[x])
    others = np.where(np.arange(V) == x, 0, q)
    others = others / others.sum() if others.any() else others
    total += q[x] * (stands + (1 - stands) * chance(left, others, width - 1))
  return total


@pytest.mark.parametrize("case", RANDOM)
@pytest.mark.parametrize("shape", SHAPES)
def test_children_stand_as_often_as_they_can(shape, case):
  """On a chain the optimum, sum min(p, q); with siblings what enumeration gives."""
  stood = of_case(mixed(shape)[1], case) > 1
  p, q = (
    test_sampling.exact(logits[0], **{**OFF, **CASES[case]}) for logits in (TARGET, DRAFT)
  )
  width = SHAPES[shape][1:].count(0)
  expected = chance(p, q, width)
  if width == 1:
    assert expected == pytest.approx(np.minimum(p, q).sum())
  assert stats.binomtest(int(stood.sum()), len(stood), min(expected, 1)).pvalue > 1e-3


def test_children_are_drawn_without_replacement():
  """Each ordered pair as often as q(x) q(y) / (1 - q(x)); a third changes neither."""
  parameters, position = make(["plain"], DRAWS), np.full(DRAWS, START)
  q = test_sampling.exact(DRAFT[0], **OFF)
  draw = lambda width: np.asarray(
    rejection.draw_candidates(
      jnp.tile(jnp.float32(q), (DRAWS, 1)), parameters, position, width
    )
  )
  pairs = draw(2)
  expected = q[:, None] * q / (1 - q[:, None]) * (1 - np.eye(V))
  counts = np.bincount(pairs @ [V, 1], minlength=V * V)
  assert not counts[expected.ravel() == 0].any()
  some = expected.ravel() > 0
  assert stats.chisquare(counts[some], DRAWS * expected.ravel()[some]).pvalue > 1e-3
  np.testing.assert_array_equal(draw(1), pairs[:, :1])
  np.testing.assert_array_equal(draw(3)[:, :2], pairs)


def test_the_target_distribution_is_that_of_plain_decoding():
  """Filters, temperatures and temperature 0 in one batch."""
  logits, parameters, position = test_sampling.some()
  p = np.asarray(rejection.target_distribution(logits, parameters))
  drawn = test_sampling.draw(logits, parameters, position)
  np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
  with np.errstate(divide="ignore"):
    logp = np.log(p[np.arange(len(p)), drawn.token])
  np.testing.assert_allclose(logp, drawn.logp_filtered, atol=1e-5)
  for i, row in enumerate(p):
    settings = {name: getattr(parameters, name)[i] for name in OFF}
    np.testing.assert_allclose(row, test_sampling.exact(logits[i], **settings), atol=1e-5)


def test_noise_is_independent_of_plain_decodings():
  """Of every purpose, at a position and at the next; and the tokens drawn with it."""
  rows, ids = 2**15, jnp.arange(4)
  parameters = make(["plain"], rows)
  columns = []
  for position in (np.full(rows, START), np.full(rows, START + 1)):
    key = noise.row_key(parameters.seed, parameters.request, position)
    columns.append(noise.gumbel(key, ids))
    columns += [rejection._gumbel(parameters, position, n, ids) for n in (1, 2, 3)]
  uniform = np.exp(-np.exp(-np.concatenate(columns, 1)))
  between = np.corrcoef(uniform.T)[np.triu_indices(uniform.shape[1], 1)]
  assert abs(between).max() < 5 / np.sqrt(rows)

  first = of_case(mixed("chain")[0], "plain")[:, 0]
  every = make(RANDOM, DRAWS * len(RANDOM))
  parameters = jax.tree.map(lambda x: of_case(x, "plain"), every)
  logits = np.tile(TARGET[0], (DRAWS, 1))
  plain = test_sampling.draw(logits, parameters, np.full(DRAWS, START + 1)).token
  table = np.zeros((V, V))
  np.add.at(table, (first, plain), 1)
  assert stats.chi2_contingency(table).pvalue > 1e-3


def random_problem(cases, rows=512, vocabulary=16):
  """A tree of distinct siblings with some p and q: the arguments of `verify`."""
  rng = np.random.default_rng(3)
  shape = SHAPES["tree"]
  J = len(shape)
  parameters = make(cases, rows)
  logits = rng.normal(0, 2, (rows, J, vocabulary)).astype(np.float32)
  p = special.softmax(logits, -1)
  greedy = (parameters.temperature == 0)[:, None, None]
  p = np.where(greedy, np.float32(logits == logits.max(-1, keepdims=True)), p)
  q = special.softmax(rng.normal(0, 2, p.shape).astype(np.float32), -1)
  # Siblings are neighbours in a vocabulary whose likelier tokens tend to come first.
  order = np.argsort(-logits - rng.normal(0, 3, p.shape), -1)
  tokens = np.zeros((rows, J), np.int32)
  for node in range(1, J):
    tokens[:, node] = order[:, shape[node], shape[1:node].count(shape[node])]
  whole = lambda x: np.broadcast_to(np.array(x, np.int32), (rows, J))
  depth = whole([0, 1, 1, 1, 2, 2, 2])
  tree = tree_lib.Tree(tokens, whole(shape), depth, rng.random((rows, J)) < 0.9)
  return tree, p, q, parameters, rng.integers(0, 100, rows).astype(np.int32)


@functools.cache
def program():
  return jax.jit(lambda *args: rejection.verify(*args, LENGTH, 3))


def test_greedy_rows_take_the_argmax():
  """Which is what the coupled walk does at temperature 0, on any tree."""
  tree, p, *rest = random_problem(["greedy"])
  path, accepted, tokens = program()(tree, p, *rest)
  likeliest = np.argmax(p, -1)
  expected = jax.jit(lambda *args: verify.walk(*args, LENGTH))(tree, likeliest)
  np.testing.assert_array_equal(path, expected[0])
  np.testing.assert_array_equal(accepted, expected[1])
  assert (np.bincount(accepted) > 20).all() and accepted.max() == 2
  output = np.take_along_axis(likeliest, np.asarray(path), 1)
  counts = np.arange(LENGTH) <= np.asarray(accepted)[:, None]
  np.testing.assert_array_equal(np.asarray(tokens)[counts], output[counts])


def test_a_row_does_not_depend_on_its_neighbours():
  """Some rows many times, others not at all, each somewhere else."""
  args = random_problem(list(CASES))
  whole = jax.device_get(program()(*args))
  rows = np.random.default_rng(4).integers(0, 512, 512)
  take = lambda x: jax.tree.map(lambda y: np.asarray(y)[rows], x)
  jax.tree.map(np.testing.assert_array_equal, program()(*take(args)), take(whole))
  assert (np.bincount(whole[1]) > 20).all()


def test_a_loop_over_sharded_rows_draws_the_same():
  """In a while loop per slice, as rollouts run, rows split over `data`."""
  parameters = make(RANDOM, 4 * 8 * len(RANDOM))
  iteration = make_iteration("tree", RANDOM)

  def local(parameters):
    running = lambda carry: jnp.any(carry[1] < LENGTH)
    step = functools.partial(iteration, parameters)
    return jax.lax.while_loop(running, step, begin(parameters))[2]

  mapped = slices.per_slice(tiny.mesh(4, 2), local, slices.ROWS, slices.ROWS)
  split = jax.jit(mapped)(parameters)
  np.testing.assert_array_equal(split, mixed("tree")[0][: len(split)])
