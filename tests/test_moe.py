"""Experts: the sums by definition however they are computed, lossless, and trained."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from benchmarks import routing
from dev import hlo_counts
from tests import test_hf
from tests import tiny
from tlt_jax import axes
from tlt_jax import expert_products
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import hf
from tlt_jax.models import moe
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import losses
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib

EXPERTS = config_lib.Experts(count=8, per_token=2, width=24, norm_weights=True)
CONFIG = dataclasses.replace(
  tiny.CONFIG, architecture="Qwen3MoeForCausalLM", experts=EXPERTS
)
OPTIONS = rollout.Options(**tiny.SIZES, slots=8, chunk=16)


@functools.cache
def params():
  made = jax.jit(lambda key: target.init_params(CONFIG, key))(jax.random.key(0))
  # Experts that differ, and matter.
  made = jax.tree.map(lambda x: x * 8 if x.ndim == 3 else x, made)
  return made | {"head": made["head"] * 20.0}


def on(mesh):
  shardings = axes.shardings(mesh, axes.ROLLOUT, target.abstract_params(CONFIG))
  return jax.device_put(params(), shardings)


# --- products


def by_definition(x, gate, up, down, chosen, weight):
  every = jnp.einsum("rd,efd->ref", x, gate), jnp.einsum("rd,efd->ref", x, up)
  out = jnp.einsum("ref,edf->red", jax.nn.silu(every[0]) * every[1], down)
  taken = jnp.take_along_axis(out, chosen[..., None], 1)
  return jnp.sum(taken * weight[..., None], 1)


def arguments(rows, favourite, k=3, E=10, D=16, F=12):
  """Random ones; `favourite`: an expert that all rows take, and another that none does."""
  rng = np.random.default_rng(rows)
  scores = rng.normal(size=(rows, E))
  if favourite is not None:
    scores[:, favourite], scores[:, favourite - 1] = 9, -9
  chosen = np.argsort(-scores, -1)[:, :k].astype(np.int32)
  shapes = (rows, D), (E, F, D), (E, F, D), (E, D, F), (rows, k)
  x, gate, up, down, weight = (rng.normal(size=s).astype(np.float32) for s in shapes)
  return x, gate, up, down, chosen, weight


@pytest.mark.parametrize("favourite", [None, 4])
@pytest.mark.parametrize("rows", [1, 3, 70, 700])
def test_every_way_to_multiply_gives_the_sums_by_definition(rows, favourite):
  """Also the ways of GPUs; 700 rows take several blocks of an expert."""
  *args, weight = arguments(rows, favourite)
  want = by_definition(*args, weight)
  products = expert_products
  for way in (products._in_blocks, products._gathered, products._dense):
    got = expert_products._weighted(jax.jit(way)(*args), weight)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3, err_msg=way.__name__)
  assert expert_products._make_blocks(jnp.asarray(args[-1]), 10).size == min(rows, 128)


def gradient_by_hand(experts, coef, x, router, gate, up, down, seed, is_token):
  """Of `sum(y * seed) + coef * balance` for what `layer_loss` takes, in float64."""
  (R, _), E, k = x.shape, experts.count, experts.per_token
  dx, drouter, dgate, dup, ddown = map(np.zeros_like, (x, router, gate, up, down))
  probabilities, dprobabilities = np.zeros((R, E)), np.zeros((R, E))
  times_chosen = np.zeros(E)
  for r in range(R):
    raised = np.exp(router @ x[r])
    p = probabilities[r] = raised / raised.sum()
    chosen = sorted(range(E), key=lambda e: (-raised[e], e))[:k]
    total = p[chosen].sum() if experts.norm_weights else 1.0
    dweight = np.zeros(k)
    for j, e in enumerate(chosen):
      g, u = gate[e] @ x[r], up[e] @ x[r]
      sigmoid = 1 / (1 + np.exp(-g))
      hidden = g * sigmoid * u
      dweight[j] = down[e] @ hidden @ seed[r]
      dout = p[e] / total * seed[r]
      dhidden = dout @ down[e]
      dg = dhidden * u * (sigmoid + g * sigmoid * (1 - sigmoid))
      du = dhidden * g * sigmoid
      ddown[e] += np.outer(dout, hidden)
      dgate[e] += np.outer(dg, x[r])
      dup[e] += np.outer(du, x[r])
      dx[r] += dg @ gate[e] + du @ up[e]
      times_chosen[e] += is_token[r]
    dprobabilities[r, chosen] = dweight / total
    if experts.norm_weights:
      dprobabilities[r, chosen] -= dweight @ p[chosen] / total**2
  shares = times_chosen / times_chosen.sum()
  for r in range(R):
    if is_token[r]:
      dprobabilities[r] += coef * E * shares / is_token.sum()
    p = probabilities[r]
    dlogits = p * (dprobabilities[r] - p @ dprobabilities[r])
    drouter += np.outer(dlogits, x[r])
    dx[r] += dlogits @ router
  return (dx, drouter, dgate, dup, ddown), times_chosen


def layer_loss(experts, coef, x, router, gate, up, down, seed, is_token):
  """The layer of a policy, and the loss of its learner."""
  config = dataclasses.replace(CONFIG, width=x.shape[1], experts=experts)
  params = dict(router=router, gate_proj=gate, up_proj=up, down_proj=down)
  layer = moe.MLP(config)
  y, sown = layer.apply({"params": params}, x[None], mutable=[moe.ROUTING])
  sown = {moe.ROUTING: {"mlp": sown[moe.ROUTING]}}
  load = jax.tree.map(lambda x: x[None], moe.load(experts, sown, is_token[None]))
  whole = jax.sharding.PartitionSpec()
  share = jax.shard_map(losses.balance, mesh=tiny.mesh(1), in_specs=whole, out_specs=whole)
  return jnp.sum(y[0] * seed) + coef * share(load, jnp.sum(is_token, dtype=jnp.float32))


@pytest.mark.parametrize(
  ("rows", "normed", "coef"), [(3, True, 0.5), (90, False, 0.0), (700, True, 2.0)]
)
def test_gradients_are_those_by_hand(rows, normed, coef):
  """One expert gets all rows, another none; of equal logits the lower index is chosen."""
  E, D, F = 9, 16, 12
  experts = config_lib.Experts(count=E, per_token=3, width=F, norm_weights=normed)
  rng = np.random.default_rng(rows)
  # Sums of such numbers are exact in float32: logits that are equal stay so.
  x, router = (rng.integers(-8, 9, (n, D)) / 16 for n in (rows, E))
  x[:, 0], router[:, 0] = 1, 0
  router[5, 0], router[2, 0] = 3, -3
  router[7] = router[4] = router[3]
  shapes = (E, F, D), (E, F, D), (E, D, F), (rows, D)
  floats = x, router, *(rng.normal(size=s).astype(np.float32) for s in shapes)
  is_token = rng.random(rows) < 0.7
  is_token[0] = True
  as_double = (np.asarray(a, np.float64) for a in floats)
  want, times_chosen = gradient_by_hand(experts, coef, *as_double, is_token)
  assert times_chosen[5] == is_token.sum() and times_chosen[2] == 0
  assert rows == 3 or times_chosen[3] > times_chosen[4] > times_chosen[7]
  as_float = [jnp.asarray(a, jnp.float32) for a in floats]
  loss = functools.partial(layer_loss, experts, coef)
  got = jax.jit(jax.grad(loss, range(5)))(*as_float, is_token)
  for name, x, y in zip(("x", "router", "gate", "up", "down"), got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * np.abs(y).max(), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpus_read_one_expert_at_a_time(dtype):
  """In each iteration of a loop, with its gradient of another; nothing casts all experts,
  as XLA would for products of bfloat16."""
  *floats, chosen, weight = arguments(5, None)
  x, gate, up, down, weight = (jnp.asarray(a, dtype) for a in (*floats, weight))

  def loss(*args):
    return jnp.sum(expert_products.mix(*args, chosen, weight).astype(jnp.float32) ** 2)

  for f, matrices in ((loss, 3), (jax.grad(loss), 6)):
    text = jax.jit(f).lower(x, gate, up, down).compile().as_text()
    reads = hlo_counts.Counter(text, {}, 1.0).reads(gate.size)
    assert sum(reads.values()) == matrices * gate[0].nbytes
    assert len(reads) == matrices // 3 and hlo_counts.ENTRY not in reads


@pytest.mark.parametrize(("rows", "few"), [(1, True), (3, True), (4, False)])
def test_gpus_read_the_experts_of_few_rows(rows, few):
  """By gathers, as long as rows have together no more choices than there are experts."""
  args = arguments(rows, None)
  lowered = jax.jit(expert_products.mix).trace(*args).lower(lowering_platforms=("cuda",))
  # Operations with an operand of all 10 experts' weights: each and its result.
  pattern = r"stablehlo\.(\w+).*tensor<10x1[26]x1[26]x.* -> (.*)"
  used = re.findall(pattern, lowered.as_text())
  made = {(op, math.prod(map(int, re.findall(r"(\d+)x", result)))) for op, result in used}
  each = args[1][0].size
  if few:
    assert made == {("gather", 3 * rows * each)} and len(used) == 3
  else:
    assert {op for op, _ in made} == {"dot_general"} and len(used) == 3


@pytest.mark.parametrize("normed", [True, False])
def test_routing(normed):
  """Of equal logits the lower index goes first; weights are a softmax over all experts."""
  experts = dataclasses.replace(EXPERTS, norm_weights=normed)
  logits = jnp.array([[0.0, 1.0, 3.0, 1.0, 3.0, 1.0, 0.0, 0.0]], jnp.bfloat16)
  chosen, weight = moe.route(experts, logits)
  assert chosen.tolist() == [[2, 4]] and weight.dtype == jnp.bfloat16
  each = np.exp(3) / np.exp(np.float32(logits)).sum()
  np.testing.assert_allclose(np.float32(weight), 0.5 if normed else each, rtol=0.01)
  chosen, _ = moe.route(dataclasses.replace(experts, per_token=4), logits)
  assert chosen.tolist() == [[2, 4, 1, 3]]


# --- files


def test_tensors_of_all_experts_are_read_too(tmp_path):
  """As the modules of transformers 5 have them."""
  config, params = hf.load(test_hf.GOLDEN / "qwen3_moe")
  path = test_hf.copy("qwen3_moe", tmp_path)

  def fuse(tensors):
    for i in range(config.num_layers):
      experts = f"model.layers.{i}.mlp.experts."
      gate, up, down = (
        np.stack([tensors.pop(f"{experts}{e}.{kind}_proj.weight") for e in range(5)])
        for kind in ("gate", "up", "down")
      )
      tensors[f"{experts}gate_up_proj"] = np.concatenate([gate, up], 1)
      tensors[f"{experts}down_proj"] = down

  test_hf.edit(path, fuse)
  again, params2 = hf.load(path)
  assert again == config
  test_hf.assert_same(params, params2)
  _, split = hf.load(path, tiny.mesh(2, 4), axes.TRAIN)
  test_hf.assert_same(params, split)


def test_experts_are_read_in_parts_and_saved_from_them(tmp_path):
  """Each device reads its hidden units, of files as they are published."""
  path = test_hf.copy("qwen3_moe", tmp_path, num_local_experts=None, num_experts=5)
  config, params = hf.load(path, tiny.mesh(2, 4), axes.TRAIN)
  gate = params["layer_0"]["mlp"]["gate_proj"]
  assert gate.sharding.shard_shape(gate.shape) == (5, 3, 8)
  hf.save(tmp_path / "out", config, params)
  raw = json.loads((tmp_path / "out/config.json").read_text())
  assert (raw["num_experts"], raw["moe_intermediate_size"]) == (5, 12)
  theirs, ours = (
    safetensors.numpy.load_file(folder / "model.safetensors")
    for folder in (path, tmp_path / "out")
  )
  test_hf.assert_same(theirs, ours)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    (dict(mlp_only_layers=[0]), "mlp_only_layers"),
    (dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    (dict(num_experts_per_tok=6), "cannot be chosen"),
    (dict(num_local_experts=None), "num_experts"),
    (dict(num_local_experts=6), "experts.5."),
    (dict(num_local_experts=4), "experts.4."),
    (dict(moe_intermediate_size=13), "config.json says ("),
  ],
)
def test_a_folder_that_does_not_fit_is_refused(changes, named, tmp_path):
  assert named in test_hf.message(test_hf.copy("qwen3_moe", tmp_path, **changes))


# --- rollouts


def run(made, data=1, model=1, strategy=None, drafter=None):
  choose = strategy and selector_lib.always(strategy_lib.parse(strategy))
  mesh = tiny.mesh(data, model)
  engine = rollout.make(CONFIG, mesh, OPTIONS, selector=choose, drafter=drafter)
  return engine(on(mesh), made)


@functools.cache
def drafter() -> spot_lib.Frozen:
  made = drafter_lib.of_target(CONFIG)
  return spot_lib.Frozen(made, drafter_lib.init_params(made, jax.random.key(5)))


@functools.cache
def plain():
  made = tiny.requests(temperature=0.5)
  return made, run(made)


@pytest.mark.parametrize(
  ("data", "model", "strategy"),
  [
    (1, 1, "3_1_4"),
    tiny.slow(1, 1, "ngram_3"),
    tiny.slow(1, 1, "3_2_6"),
    (2, 2, "3_2_6"),
    (1, 2, None),
    tiny.slow(1, 2, "3_1_4"),
    tiny.slow(1, 4, None),
    tiny.slow(1, 4, "3_1_4"),
    tiny.slow(1, 4, "3_2_6"),
  ],
)
def test_drafts_and_layouts_change_no_token(data, model, strategy):
  """Experts in 1, 2 and 4 parts: the claim is that of dense policies."""
  made, want = plain()
  got = run(made, data, model, strategy, drafter() if strategy else None)
  result = compare.compare(CONFIG, params(), made, want, got)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1 and result.total_tokens > 200
  np.testing.assert_array_equal(want.finish_reason, got.finish_reason)
  same = (want.tokens == got.tokens).all(1)
  np.testing.assert_allclose(want.logp[same], got.logp[same], atol=2e-5)


def test_a_drafters_layer_is_dense():
  layer = drafter().config.layer
  assert layer.experts is None and layer.architecture == "Qwen3ForCausalLM"
  shape = drafter().params["mlp"]["gate_proj"].shape
  assert shape == (CONFIG.mlp_width, CONFIG.width)


# --- training


def test_a_drafter_trains_on_the_responses_and_no_token_changes():
  mesh, made = tiny.mesh(1), drafter_lib.of_target(CONFIG)
  options = spot_lib.Options(
    row_tokens=32, context_tokens=4, rows=12, carried_rows=6, after_rollout_share=0.0
  )
  trainer = spot_lib.make_trainer(
    CONFIG,
    made,
    mesh,
    optimizer=optax.adam(1e-2),
    longest=96,
    loss=draft_loss.Loss(steps=2),
    options=options,
  )
  before = drafter_lib.init_params(made, jax.random.key(5))
  spot = spot_lib.Spot(trainer, options, jax.tree.map(jnp.copy, before))
  choose = selector_lib.always(strategy_lib.parse("3_1_4"))
  requests, want = plain()
  engine = rollout.make(CONFIG, mesh, OPTIONS, spot, choose)
  goes_on = iter([True, True, False])  # while rewards are computed
  samples = engine(
    on(mesh), requests, train=True, score=lambda samples: lambda: next(goes_on)
  )
  result = compare.compare(CONFIG, params(), requests, want, samples)
  assert result.differing_tokens == 0 and int(spot.state.step) > 0
  changed = jax.tree.map(lambda x, y: np.abs(x - y).max() > 0, before, spot.state.params)
  assert all(jax.tree.leaves(changed))


def batch():
  rng = np.random.default_rng(2)
  prompts = [rng.integers(0, 64, n).astype(np.int32) for n in (3, 5, 2, 7)]
  responses = [rng.integers(0, 64, n).astype(np.int32) for n in (9, 20, 14, 5)]
  reward = np.array([[1.0, 0.0, 0.5, 0.25]], np.float32)
  lengths = np.array([[len(r) for r in responses]], np.int32)
  scored = algorithm_lib.Responses(reward, lengths)
  return batch_lib.Batch(prompts, responses, np.ones(4, np.float32), scored)


def trained(data, model, **options):
  """One step of plain descent: what it subtracts, and the log-probabilities before."""
  made = learner_lib.make(
    CONFIG,
    algorithm_lib.make("grpo"),
    optax.sgd(1.0),
    tiny.mesh(data, model),
    **dict(buckets=((4, 32),)) | options,
  )
  state = made.init(jax.tree.map(jnp.copy, params()))
  logp = made.score_responses(state.params, batch())
  after, metrics = made.train(state, batch())
  gradient = jax.tree.map(
    lambda x, y: np.asarray(x) - np.asarray(y), params(), after.params
  )
  return gradient, logp, metrics


def test_the_learner_trains_experts_in_any_layout():
  """The router too, by weights of the experts that were chosen."""
  want, logp, _ = trained(1, 1, remat=False)
  for path, x in jax.tree_util.tree_leaves_with_path(want):
    assert np.isfinite(x).all() and np.abs(x).max() > 1e-5, path
  got, logp2, _ = trained(2, 2)
  np.testing.assert_allclose(logp2, logp, atol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), got, want
  )


def loss_of_transformers(logits, mask, E, k):
  """Of layers' router logits [tokens E], as its `load_balancing_loss_func`, in numpy."""
  logits, mask = np.concatenate(logits), np.tile(mask, len(logits))
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights = weights / weights.sum(-1, keepdims=True)
  chosen = np.argsort(-weights, -1, kind="stable")[:, :k]
  one_hot = np.eye(E)[chosen] * mask[:, None, None]
  tokens_per_expert = one_hot.sum(0) / mask.sum()
  probability_per_expert = (weights * mask[:, None]).sum(0) / mask.sum()
  return (tokens_per_expert * probability_per_expert[None]).sum() * E


def test_the_loss_for_balance_is_that_of_transformers():
  rng, k, E = np.random.default_rng(1), EXPERTS.per_token, EXPERTS.count
  uneven = rng.normal(size=(5, 40, E)) + np.linspace(0, 3, E)
  logits = uneven.astype(np.float32)
  is_token = rng.random((2, 20)) < 0.7

  def share(logits):
    sown = [{"logits": (x,), "chosen": (moe.route(EXPERTS, x)[0],)} for x in logits]
    loads = [moe.load(EXPERTS, {moe.ROUTING: {"mlp": x}}, is_token) for x in sown]
    load = jax.tree.map(lambda *x: jnp.stack(x), *loads)
    return losses.balance(load, jnp.float32(is_token.sum()))

  mesh, whole = tiny.mesh(1), jax.sharding.PartitionSpec()
  mapped = jax.shard_map(share, mesh=mesh, in_specs=whole, out_specs=whole)
  want = loss_of_transformers(list(logits), is_token.reshape(-1), E, k)
  np.testing.assert_allclose(k * mapped(logits), want, rtol=1e-5)
  assert want > 1.2 * k
  # Each expert is as often the first choice, and as often the second.
  even = 5 * (np.eye(E) + 0.5 * np.roll(np.eye(E), 1, 1)).astype(np.float32)
  is_token = np.ones((1, E), bool)
  np.testing.assert_allclose(mapped(even[None]), 1, rtol=1e-6)


BALANCED = dict(balance_coef=0.5, buckets=((2, 32),))  # two micro-batches of two rows


def test_a_policy_is_trained_for_balance():
  """As a mean over the tokens of micro-batches, prompts' too; all layers' routers."""
  tokens = [np.concatenate(x) for x in zip(batch().prompts, batch().responses, strict=True)]
  # Of 12, 25, 16 and 12 tokens, the longest first: rows (1), (2, 0) and (3).
  every = [[tokens[i] for i in (1, 2, 0)], [tokens[3]]]

  def of_transformers(params, micro_batch):
    logits = []
    for x in micro_batch:
      args = {"params": params}, x[None], jnp.arange(len(x))[None]
      _, sown = target.Target(CONFIG).apply(*args, mutable=[moe.ROUTING])
      logits += [x["mlp"]["logits"][0] for x in sown[moe.ROUTING].values()]
    logits = jnp.concatenate(logits)
    chosen, _ = moe.route(EXPERTS, logits)
    f = jnp.mean(jax.nn.one_hot(chosen, EXPERTS.count), 0)
    return EXPERTS.count * jnp.sum(f * jnp.mean(jax.nn.softmax(logits), 0))

  @jax.jit
  def balance(params):
    sizes = [sum(map(len, x)) for x in every]
    found = [of_transformers(params, x) for x in every]
    return sum(n * x for n, x in zip(sizes, found, strict=True)) / sum(sizes)

  value, gradient = jax.value_and_grad(balance)(params())
  plain, _, _ = trained(1, 1, buckets=BALANCED["buckets"])
  got, _, metrics = trained(1, 1, **BALANCED)
  k = EXPERTS.per_token
  np.testing.assert_allclose(metrics["policy/experts_balance"], value / k, rtol=1e-4)
  assert metrics["policy/experts_balance"] > 1.001
  assert np.abs(gradient["layer_0"]["mlp"]["router"]).max() > 1e-2
  jax.tree.map(
    lambda x, y, z: np.testing.assert_allclose(x - y, 0.5 * z, rtol=1e-2, atol=2e-5),
    got,
    plain,
    gradient,
  )


def test_balance_does_not_depend_on_the_layout():
  want, _, metrics = trained(1, 1, **BALANCED)
  got, _, metrics2 = trained(2, 2, **BALANCED)
  key = "policy/experts_balance"
  np.testing.assert_allclose(metrics2[key], metrics[key], rtol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), got, want
  )


def test_balance_needs_experts():
  with pytest.raises(ValueError, match="learner.balance_coef=0.1"):
    learner_lib.make(
      tiny.CONFIG,
      algorithm_lib.make("grpo"),
      optax.sgd(1.0),
      tiny.mesh(1),
      ((2, 32),),
      balance_coef=0.1,
    )


def test_rollout_and_learner_give_the_same_log_probabilities():
  made, samples = plain()
  responses = [samples.response(i) for i in range(len(made))]
  prompts = [made.prompt(i) for i in range(len(made))]
  lengths = np.array([[len(r) for r in responses]], np.int32)
  scored = algorithm_lib.Responses(np.zeros(lengths.shape, np.float32), lengths)
  batch = batch_lib.Batch(prompts, responses, np.full(len(made), 0.5, np.float32), scored)
  learner = learner_lib.make(
    CONFIG, algorithm_lib.make("grpo"), optax.sgd(1.0), tiny.mesh(1), buckets=((4, 96),)
  )
  found = learner.score_responses(learner.init(params()).params, batch)[0]
  for i, response in enumerate(responses):
    n = len(response)
    np.testing.assert_allclose(found[i, :n], samples.logp[i][:n], atol=2e-4)


def test_routes_of_rollout_and_learner_are_compared():
  """In float32 none differs: each is found for its token and layer."""
  found = routing.measure(CONFIG, params(), rows=3, length=20)
  assert found["tokens"] == 3 * 19 and found["mean_abs_log_ratio"] < 1e-4
  assert found["pairs_that_differ"] == found["experts_that_differ"] == 0
  rounded = dataclasses.replace(CONFIG, dtype="bfloat16")
  found = routing.measure(rounded, params(), rows=3, length=20)
  assert found["mean_abs_log_ratio"] > 1e-3
  assert found["experts_that_differ"] <= found["pairs_that_differ"]
  assert found["pairs_that_differ"] <= found["tokens_that_differ"] < 1


def test_muon_turns_the_gradient_of_each_expert_by_itself():
  """As it does a matrix."""
  rng = np.random.default_rng(0)
  w, gradient = rng.normal(size=(2, 3, 6, 4)).astype(np.float32)
  made = optimizer.make("muon", 0.1, max_grad_norm=1e6)

  def update(w, gradient):
    w, gradient = {"mlp": {"w": w}}, {"mlp": {"w": gradient}}
    return made.update(gradient, made.init(w), w)[0]["mlp"]["w"]

  each = [update(*pair) for pair in zip(w, gradient, strict=True)]
  np.testing.assert_allclose(update(w, gradient), each, rtol=1e-4, atol=1e-6)
