"""Drawn tokens follow the exact distribution, filters included; margins mean it.

Every distribution test uses one checker, and the same checker must reject draws
whose rule was broken on purpose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from scipy import stats

from dev import hlo_counts
from tests import tiny
from tlt_jax import axes
from tlt_jax import noise
from tlt_jax.spec_decode.decoding import sampling

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
CASES = {
  "plain": {},
  "cold": dict(temperature=0.6),
  "hot": dict(temperature=1.7),
  "top_k": dict(top_k=4),
  "top_p": dict(top_p=0.7),
  "min_p": dict(min_p=0.2),
  "top_k_top_p": dict(top_k=5, top_p=0.75),
  "all": dict(temperature=0.8, top_k=7, top_p=0.93, min_p=0.08),
  "all_hot": dict(temperature=1.5, top_k=8, top_p=0.9, min_p=0.3),
  "one_left": dict(top_k=1),
  "greedy": dict(temperature=0.0, top_p=0.5),
}
DRAWS = 2**17
LOGITS = np.array([0.3, 1.9, -0.4, 1.2, 0.9, -2.0, 1.5, 0.1, -1.1, 0.6], np.float32)


def exact(logits, temperature, top_k, top_p, min_p):
  """The distribution that a token is drawn from, f64[V], one filter after the other."""
  if temperature == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  p = special.softmax(logits.astype(np.float64) / temperature)
  order = np.argsort(-p)
  if top_k:
    p[order[top_k:]] = 0
    p /= p.sum()
  if top_p < 1:
    better = np.cumsum(p[order]) - p[order]
    p[order[better >= top_p]] = 0
    p /= p.sum()
  p[p < min_p * p.max()] = 0
  return p / p.sum()


def parameters_of(settings, request, seed=1) -> sampling.Sampling:
  """Of rows for these requests; row i is sampled by the settings i modulo their number."""
  rows = len(request)
  turn = np.arange(rows) % len(settings)

  def column(name):
    return np.array([s[name] for s in settings])[turn]

  return sampling.Sampling(
    seed=np.full(rows, seed, np.uint32),
    request=request.astype(np.uint32),
    temperature=column("temperature").astype(np.float32),
    top_k=column("top_k").astype(np.int32),
    top_p=column("top_p").astype(np.float32),
    min_p=column("min_p").astype(np.float32),
  )


def make(cases, rows, seed=1):
  """`Sampling` in which row i is sampled as case i modulo their number, and positions."""
  i = np.arange(rows)
  settings = [{**OFF, **CASES[case]} for case in cases]
  return parameters_of(settings, i // 64, seed), (i % 64).astype(np.int32)


def draw(logits, parameters, position) -> sampling.Draw:
  """`sampling.draw` as it is now (it may have been broken on purpose), as numpy."""
  run = jax.jit(lambda *args: sampling.draw(*args))
  return jax.device_get(run(logits, parameters, position))


@functools.cache
def mixed() -> sampling.Draw:
  """Every case in one batch, row by row in turn."""
  rows = DRAWS * len(CASES)
  return draw(np.tile(LOGITS, (rows, 1)), *make(CASES, rows))


def pvalue(tokens, case) -> float:
  """Of a chi-square test of drawn tokens against the case's distribution."""
  p = exact(LOGITS, **{**OFF, **CASES[case]})
  counts = np.bincount(tokens, minlength=len(p))
  if counts[p == 0].any():
    return 0.0
  counts, p = counts[p > 0], p[p > 0]
  assert counts.sum() * p.min() > 5
  return stats.chisquare(counts, counts.sum() * p).pvalue if len(p) > 1 else 1.0


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case):
  """131,072 draws each, from one batch whose rows have parameters of their own."""
  tokens = mixed().token[list(CASES).index(case) :: len(CASES)]
  assert pvalue(tokens, case) > 1e-3


def test_successive_draws_are_independent():
  """Tokens at one position and at the next, and of neighbouring requests."""
  tokens = draw(np.tile(LOGITS, (DRAWS, 1)), *make(["plain"], DRAWS)).token
  assert pvalue(tokens, "plain") > 1e-3
  for step in (1, 64):
    table = np.zeros((len(LOGITS), len(LOGITS)))
    np.add.at(table, (tokens[:-step], tokens[step:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def ignore_temperature(scaled):
  return lambda logits, parameters: logits


def scale_noise(gumbel):
  return lambda key, tokens: 1.05 * gumbel(key, tokens)


def reuse_noise(row_key):
  """Every eighth position draws with the same noise."""
  return lambda seed, request, position: row_key(seed, request * 0, position % 8)


def off_by_one(threshold):
  return lambda logits, s: threshold(logits, s.replace(top_k=s.top_k + 1))


def no_renormalisation(threshold):
  """top-p of the whole distribution's mass, not of what top-k left."""

  def broken(logits, s):
    top_k = threshold(logits, s.replace(top_p=s.top_p * 0 + 1))
    return jnp.maximum(top_k, threshold(logits, s.replace(top_k=s.top_k * 0)))

  return broken


def stop_one_early(threshold):
  """top-p without the token that crosses the bound."""

  def broken(logits, s):
    cut = threshold(logits, s)
    better = jnp.where(logits > cut[:, None], logits, jnp.inf)
    better = jnp.minimum(jnp.min(better, -1), jnp.max(logits, -1))
    return jnp.where(s.top_p < 1, better, cut)

  return broken


def absolute_min_p(threshold):
  """min-p as a probability, not relative to the likeliest token's."""

  def broken(logits, s):
    cut = threshold(logits, s.replace(min_p=s.min_p * 0))
    likely = jax.nn.softmax(sampling.scale(logits, s), -1) >= s.min_p[:, None]
    likely = jnp.min(jnp.where(likely, logits, jnp.inf), -1)
    return jnp.minimum(jnp.maximum(cut, likely), jnp.max(logits, -1))

  return broken


@pytest.mark.parametrize(
  ("module", "name", "broken", "case"),
  [
    (sampling, "scale", ignore_temperature, "cold"),
    (sampling, "scale", ignore_temperature, "hot"),
    (noise, "gumbel", scale_noise, "plain"),
    (noise, "row_key", reuse_noise, "plain"),
    (sampling, "threshold", off_by_one, "top_k"),
    (sampling, "threshold", no_renormalisation, "top_k_top_p"),
    (sampling, "threshold", stop_one_early, "top_p"),
    (sampling, "threshold", absolute_min_p, "min_p"),
    (sampling, "threshold", absolute_min_p, "all_hot"),
  ],
)
def test_the_checker_rejects_a_broken_rule(monkeypatch, module, name, broken, case):
  """The same number of draws and the same test as above."""
  monkeypatch.setattr(module, name, broken(getattr(module, name)))
  tokens = draw(np.tile(LOGITS, (DRAWS, 1)), *make([case], DRAWS)).token
  assert pvalue(tokens, case) < 1e-9


def some(cases=tuple(CASES), rows=704, vocabulary=32, seed=1):
  """Random logits, parameters and positions."""
  logits = np.random.default_rng(seed).normal(0, 2, (rows, vocabulary))
  return logits.astype(np.float32), *make(cases, rows, seed)


def test_log_probabilities_are_those_of_the_distributions():
  """Before filters at the row's temperature, and after them."""
  logits, parameters, position = some()
  drawn = draw(logits, parameters, position)
  for i, token in enumerate(drawn.token):
    settings = {name: getattr(parameters, name)[i] for name in OFF}
    temperature = settings["temperature"] or 1.0
    before = special.log_softmax(logits[i].astype(np.float64) / temperature)
    np.testing.assert_allclose(drawn.logp[i], before[token], atol=1e-5)
    after = np.log(exact(logits[i], **settings)[token])
    np.testing.assert_allclose(drawn.logp_filtered[i], after, atol=1e-5)
  greedy = parameters.temperature == 0
  np.testing.assert_array_equal(drawn.token[greedy], logits[greedy].argmax(-1))
  assert (drawn.logp_filtered[greedy] == 0).all()


def test_a_row_draws_alone_what_it_draws_in_a_batch():
  """Whatever its neighbours filter, and wherever it stands."""
  logits, parameters, position = some()
  whole = draw(logits, parameters, position)
  order = np.random.default_rng(2).permutation(len(position))

  def take(x, rows):
    return jax.tree.map(lambda y: y[rows], x)

  shuffled = draw(*take((logits, parameters, position), order))
  np.testing.assert_array_equal(shuffled.token, whole.token[order])
  for case in range(len(CASES)):  # "plain" alone searches no threshold
    rows = np.arange(case, len(position), len(CASES))
    alone = draw(*take((logits, parameters, position), rows))
    np.testing.assert_array_equal(alone.token, whole.token[rows])
    np.testing.assert_allclose(alone.margin, whole.margin[rows], atol=1e-5)


@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 4)])
def test_a_sharded_vocabulary_draws_the_same(data, model):
  """Logits split over `model`, rows over `data`."""
  args = some()
  whole = draw(*args)
  mesh = tiny.mesh(data, model)
  rows = axes.sharding(mesh, axes.DATA)
  logits = jax.device_put(args[0], axes.sharding(mesh, axes.DATA, axes.MODEL))
  split = draw(logits, *jax.device_put(args[1:], rows))
  np.testing.assert_array_equal(split.token, whole.token)
  for name in ("logp", "logp_filtered", "margin"):
    np.testing.assert_allclose(getattr(split, name), getattr(whole, name), atol=1e-5)


@pytest.mark.parametrize("model", [1, 4])
def test_the_likeliest_are_those_of_a_softmax(model):
  """The first of equals first; of a split vocabulary few numbers are exchanged."""
  rng, V, count = np.random.default_rng(0), 4096, 3
  logits = rng.normal(0, 3, (6, V)).astype(np.float32)
  logits[1] = np.round(logits[1])  # many ties
  logits[2, 5:] = -np.inf
  logits[3] = 0.0
  mesh = tiny.mesh(1, model)
  with jax.set_mesh(mesh):
    split = jax.device_put(logits, axes.sharding(mesh, None, axes.MODEL))
    run = jax.jit(lambda x: sampling.likeliest(x, count)).lower(split).compile()
  logp, token = map(np.asarray, run(split))
  order = np.argsort(-logits, -1, kind="stable")[:, :count]
  np.testing.assert_array_equal(token, order)
  every = special.log_softmax(logits.astype(np.float64), -1)
  np.testing.assert_allclose(logp, np.take_along_axis(every, order, -1), atol=1e-5)
  bodies = hlo_counts.computations(run.as_text()).values()
  exchanged = [i for body in bodies for i in body if hlo_counts.is_collective(i)]
  assert exchanged or model == 1
  assert max((i.num_elements for i in exchanged), default=0) <= 6 * count * model


def test_perturbing_logits_within_the_margin_changes_no_token():
  """Logits over temperature moved by less than half the margin, in the worst directions.

  In each row two tokens nearly tie. The margin is asked about near-ties, so it is
  not tried beyond a thousandth, where two coincidences at once are rare enough.
  """
  rng = np.random.default_rng(0)
  logits, parameters, position = some(rows=len(CASES) * 2**12, vocabulary=12)
  i = np.arange(len(logits))
  one, other = np.argsort(rng.random(logits.shape), -1)[:, :2].T
  logits[i, one] = logits[i, other] + rng.normal(0, 3e-4, len(i))
  drawn = draw(logits, parameters, position)
  assert (drawn.margin < 1e-3).sum() > 500
  reach = np.maximum(0.499 * np.minimum(drawn.margin, 1e-3) - 1e-6, 0)
  reach *= np.where(parameters.temperature > 0, parameters.temperature, 1)
  winner = i[: logits.shape[1]] == drawn.token[:, None]
  better = logits >= logits[i, drawn.token][:, None]
  up = np.ones_like(logits)
  for sign in (
    np.where(winner, -up, up),
    np.where(winner, up, -up),
    np.where(better, up, -up),
    np.where(better, -up, up),
    *np.sign(rng.normal(size=(4, *logits.shape))),
  ):
    moved = logits + reach[:, None] * sign
    again = draw(moved.astype(np.float32), parameters, position)
    np.testing.assert_array_equal(again.token, drawn.token)


def by_hand(scaled, rows=2000, **settings):
  """Draws from one row of logits, and the contest as a reader would write it down."""
  scaled = np.asarray(scaled, np.float32)
  parameters, position = make(["plain"], rows)
  full = {k: np.full(rows, v, np.float32) for k, v in {**OFF, **settings}.items()}
  parameters = dataclasses.replace(
    parameters, **{**full, "top_k": full["top_k"].astype(np.int32)}
  )
  key = noise.row_key(parameters.seed, parameters.request, position)
  perturbed = scaled + np.asarray(noise.gumbel(key, jnp.arange(len(scaled))))
  return draw(np.tile(scaled, (rows, 1)), parameters, position), perturbed


def test_the_margin_of_a_plain_draw_is_the_gap_to_the_second():
  drawn, perturbed = by_hand([2.0, 1.0, 0.5, -1.0])
  best = np.sort(perturbed, -1)
  np.testing.assert_allclose(drawn.margin, best[:, -1] - best[:, -2], atol=1e-5)
  greedy, _ = by_hand([2.0, 1.0, 1.75, -1.0], temperature=0.0)
  np.testing.assert_allclose(greedy.margin, 0.25, atol=1e-6)


@pytest.mark.parametrize(
  ("p", "settings", "num_kept", "slack"),
  [
    # A logit step of 0.1 decides who is second, and so last.
    (np.exp([1.0, 0.9, 0.8, -1.0]), dict(top_k=2), 2, 0.1),
    # The bound is 0.15 beyond the mass before the second, 0.15 short of both.
    ([0.5, 0.3, 0.2], dict(top_p=0.65), 2, 0.15),
    # 0.3 and 0.2 against 0.5 * 0.5.
    ([0.5, 0.3, 0.2], dict(min_p=0.5), 2, 0.05),
    # The bounds are far, but the second and the third may swap places.
    ([0.4, 0.3001, 0.2999], dict(top_p=0.5), 2, np.log(0.3001 / 0.2999)),
    # Only the likeliest is left, which no bound drops: 0.3 against 1.0 * 0.5.
    ([0.5, 0.3, 0.2], dict(min_p=1.0), 1, 0.2),
  ],
)
def test_the_margin_at_the_edge_of_a_filter_is_the_bounds_slack(
  p, settings, num_kept, slack
):
  """If the winner is the last one kept, or the best of those cut off would have won."""
  drawn, perturbed = by_hand(np.log(p), **settings)
  kept = perturbed[:, :num_kept]
  best = np.sort(np.pad(kept, ((0, 0), (1, 0)), constant_values=-np.inf), -1)
  gap = best[:, -1] - best[:, -2]
  edge = (kept.argmax(-1) == num_kept - 1) | (perturbed.argmax(-1) >= num_kept)
  assert edge.mean() > 0.2
  np.testing.assert_array_equal(drawn.token, kept.argmax(-1))
  np.testing.assert_allclose(
    drawn.margin, np.where(edge, np.minimum(gap, slack), gap), atol=1e-5
  )
