"""Every config is a tree of its command, and its full size type-checks.

Nothing large is allocated: models, decoding and updates are traced on shapes.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import pytest

from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import memory_plan
from experiments import sizes
from experiments import trees
from tests import tiny
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax.models import config as model_lib
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import offline as draft_learner

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
COMMAND = re.compile(r"python -m experiments\.(\w+)")


def module(name: str):
  spec = importlib.util.spec_from_file_location(f"config_{name}", FOLDER / f"{name}.py")
  made = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(made)
  return made


def load(name: str, arg: str = "") -> dict:
  return module(name).get_config(arg).to_dict()


def command(name: str) -> str:
  """The command that a config is for, by the first one in its docstring."""
  return COMMAND.search(module(name).__doc__)[1]


TREES = {
  "train": config_lib.RunConfig,
  "train_drafter": config_lib.DrafterConfig,
  "warm_start": config_lib.WarmStartConfig,
}
TRAIN = [name for name in NAMES if command(name) == "train"]
BF16 = dict(dtype="bfloat16", head_dim=128, num_layers=28)
QWEN2_5_7B = model_lib.ModelConfig(
  architecture="Qwen2ForCausalLM",
  vocab_size=152064,
  width=3584,
  mlp_width=18944,
  num_heads=28,
  num_kv_heads=4,
  rope_theta=1e6,
  max_position=32768,
  qkv_bias=True,
  **BF16,
)
MATH = {  # what `policy` holds by the argument of `math_problems`, and its parameters
  "qwen2_5_7b": (QWEN2_5_7B, 7_615_616_512),
  "qwen2_5_1_5b": (
    dataclasses.replace(
      QWEN2_5_7B,
      vocab_size=151936,
      width=1536,
      mlp_width=8960,
      num_heads=12,
      num_kv_heads=2,
      tie_embeddings=True,
    ),
    1_543_714_304,
  ),
  "qwen3_8b": (
    dataclasses.replace(
      QWEN2_5_7B,
      architecture="Qwen3ForCausalLM",
      vocab_size=151936,
      width=4096,
      mlp_width=12288,
      num_layers=36,
      num_heads=32,
      num_kv_heads=8,
      max_position=40960,
      qkv_bias=False,
      qk_norm=True,
    ),
    8_190_735_360,
  ),
  "llama3_1_8b": (
    dataclasses.replace(
      QWEN2_5_7B,
      architecture="LlamaForCausalLM",
      vocab_size=128256,
      width=4096,
      mlp_width=14336,
      num_layers=32,
      num_heads=32,
      num_kv_heads=8,
      rope_theta=5e5,
      rope_scaling=model_lib.RopeScaling(8.0, 1.0, 4.0, 8192),
      norm_eps=1e-5,
      max_position=131072,
      qkv_bias=False,
    ),
    8_030_261_248,
  ),
}
MODELS = {  # what `policy` holds at full size
  "countdown": model_lib.ModelConfig(**load("warm_start", "9m")["model"]),
  **dict.fromkeys(
    ("algorithms", "tail"), model_lib.ModelConfig(**load("warm_start")["model"])
  ),
  **dict.fromkeys(("smollm2", "reasoning_mix"), tiny.SMOLLM2),
  **dict.fromkeys(("qwen2_5_7b", "math_problems", "long_reasoning"), QWEN2_5_7B),
}
LONG_CONTEXT = dataclasses.replace(QWEN2_5_7B, max_position=131072)
LONG = {  # what `policy` holds by the argument of `long_reasoning`, on which machine
  "qwen2_5_7b": (LONG_CONTEXT, "8x80"),
  "r1_distill_qwen_7b": (dataclasses.replace(LONG_CONTEXT, rope_theta=1e4), "8x80"),
  "qwen2_5_32b": (
    dataclasses.replace(
      LONG_CONTEXT,
      width=5120,
      mlp_width=27648,
      num_layers=64,
      num_heads=40,
      num_kv_heads=8,
    ),
    "32x80",
  ),
  "llama3_3_70b": (
    dataclasses.replace(
      MATH["llama3_1_8b"][0], width=8192, mlp_width=28672, num_layers=80, num_heads=64
    ),
    "64x80",
  ),
  "tpu": (LONG_CONTEXT, "16x32"),
}
# Those that differ from another in prompts and algorithm only are not traced again.
ALIKE = ("reasoning_mix", "math_problems", "long_reasoning")
SHAPES = [name for name in TRAIN if name not in ALIKE]


def load_tree(name: str, arg: str = "") -> typing.Any:
  """The tree of a config."""
  return trees.validate(TREES[command(name)], load(name, arg))


def completed(name: str, arg: str = "") -> config_lib.RunConfig:
  """A run's config with the sizes that it leaves open, for prompts of 100 tokens."""
  config = load_tree(name, arg)
  machine = sizes.Machine(slices=2, free=2**33, is_cpu=True)
  asked = sizes.Asked(100, config.batch.prompts, config.batch.responses)
  most = config.sampling.max_tokens
  options = sizes.fit_rollout(config.rollout, most, MODELS[name], asked, machine)
  config = dataclasses.replace(config, rollout=options)
  learner = sizes.fit_learner(config.learner, config.max_length, machine)
  return dataclasses.replace(config, learner=learner)


ARGUMENTS = [
  *itertools.product(NAMES, ("", "smoke")),
  *itertools.product(("countdown", "drafter"), ("small",)),
  *itertools.product(("smollm2",), ("gsm8k", "countdown")),
  *itertools.product(("warm_start",), ("9m", "smollm2")),
]


@pytest.mark.parametrize(("name", "arg"), ARGUMENTS)
def test_every_config_is_a_tree_of_its_command(name, arg):
  """Which its docstring names. The learner takes what the rollouts give."""
  assert (ROOT / "experiments" / f"{command(name)}.py").is_file()
  config = load_tree(name, arg)
  optimizer.make(**config.optimizer)
  if command(name) == "train":
    config = completed(name, arg)
    from_config.rollout_options(config)
    sizes.check_learner(config)
    algorithm_lib.make(**config.algorithm)
    assert from_config.make_selector(dataclasses.replace(config, drafter="eagle2"))


@pytest.mark.parametrize("responses", [4, 32])
def test_the_tail_has_as_many_responses_per_slice_as_asked(responses):
  config = load("tail", str(responses))
  prompts, slots = config["batch"]["prompts"], config["rollout"]["slots"]
  assert slots == responses == prompts * config["batch"]["responses"] / 2
  assert max(config["rollout"]["buckets"]) == slots
  for wrong in ("2", "16,1000"):
    with pytest.raises(ValueError, match=f"1,024 tokens or more, not '{wrong}'"):
      load("tail", wrong)


def test_the_tail_is_as_long_as_asked():
  config = load("tail", "16,1536")
  longest = 1536 + config["rollout"]["max_prompt"]
  assert config["sampling"]["max_tokens"] == 1536
  assert max(length for _, length in config["learner"]["buckets"]) == longest


def test_the_larger_warm_start_has_the_size_that_it_says():
  config = load("warm_start", "9m")
  boxed = target.abstract_params(model_lib.ModelConfig(**config["model"]))
  assert 8.75e6 < sum(x.size for x in jax.tree.leaves(boxed)) < 8.95e6


@pytest.mark.parametrize("name", TRAIN)
def test_a_drafter_that_a_config_drafts_with_trains(name):
  """As long as that pays, in idle slices and after rollouts: one slice is never idle."""
  named = [text.partition("`")[0] for text in module(name).__doc__.split("`:")[1:]]
  for arg in {"", *named} - {"smoke"}:
    config = completed(name, arg if re.fullmatch(r"\w*", arg) else "")
    arms = [arm for level in levels.parse(config.strategies) for arm in level.arms]
    assert any(map(strategy.uses_drafter, arms)) and config.drafter
    assert config.spot.train and config.spot.after_rollout_share > 0


def test_every_number_on_a_command_line_has_a_least_value():
  """The flags of commands, beside the configs."""
  for path in (ROOT / "experiments").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
      if called in ("flags.DEFINE_integer", "flags.DEFINE_float"):
        assert "lower_bound" in {k.arg for k in node.keywords}, (path, node.lineno)


@pytest.mark.parametrize(
  "section, changes, message",
  [
    ("sampling", {"max_tokens": 5000}, r"may have 5\d+ tokens .*learner.buckets holds"),
    ("rollout", {"max_prompt": 5000}, r"may have \d+ tokens \(rollout.max_prompt"),
    ("learner", {"buckets": ()}, r"buckets=\(\): takes one \(rows, length\)"),
    ("learner", {"buckets": ((2, 4096), (2, 64))}, "buckets=.* by increasing length"),
    ("learner", {"buckets": ((2, 4096), (4, 4096))}, "buckets=.* by increasing length"),
    ("learner", {"updates": 7}, r"\d+ responses cannot be .* over 7 updates: batch"),
  ],
)
def test_sizes_that_do_not_fit_each_other_are_named(section, changes, message):
  """Before anything is loaded."""
  changes = {f"{section}.{name}": value for name, value in changes.items()}
  config = trees.change(load_tree("countdown"), changes)
  with pytest.raises(ValueError, match=message):
    sizes.check_learner(config)


def test_a_policy_that_cannot_take_what_is_asked_is_named(tmp_path):
  """From its config.json alone."""
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(tiny.CONFIG)))
  config = dataclasses.replace(load_tree("countdown"), policy=str(tmp_path))
  with pytest.raises(ValueError, match="parallel=4 .* 2 key/value heads: .* divisor of 2"):
    from_config.make_mesh(4, config.policy)
  config = trees.change(config, {"sampling.max_tokens": 4096})
  with pytest.raises(ValueError, match="prompt of 32 tokens leaves 4064 .* may have 4096"):
    from_config.complete(config)


def test_a_learner_names_the_argument_that_is_wrong():
  mesh = tiny.mesh(2)
  policy = functools.partial(learner_lib.make, None, None, None, mesh)
  drafter = functools.partial(draft_learner.make, None, None, None, None, mesh)
  for make in (policy, drafter):
    for buckets in ((), ((2, 64), (2, 32))):
      with pytest.raises(ValueError, match="^buckets="):
        make(buckets)
  with pytest.raises(ValueError, match=r"^only='\(' is no regular expression"):
    policy(((2, 32),), only="(")


def abstract_params(model, mesh, rules, dtype):
  """Shapes, dtypes and shardings of a model's parameters."""
  boxed = target.abstract_params(model)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s),
    jax.tree.map(lambda x: x.value, boxed, is_leaf=lambda x: hasattr(x, "value")),
    axes.shardings(mesh, rules, boxed),
  )


def shape(*sizes, dtype=jnp.int32):
  return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture(params=SHAPES)
def full(request):
  """(config, model, mesh) of a training config at full size, two slices."""
  config = completed(request.param)
  return config, MODELS[request.param], tiny.mesh(2, config.tensor_parallel)


def test_the_full_model_runs_forward(full):
  """Without a cache, from tokens to features and logits."""
  config, model, mesh = full
  params = abstract_params(model, mesh, axes.TRAIN, jnp.float32)
  rows, length = config.learner.buckets[0]
  run = lambda p, t: target.Target(model).apply(
    {"params": p}, t, t, method=target.Target.features_and_logits
  )
  features, logits, _ = jax.eval_shape(run, params, shape(rows, length))
  assert features.shape == (rows, length, model.width)
  assert features.dtype == model.dtype
  assert logits.shape == (rows, length, model.vocab_size)
  assert logits.dtype == jnp.float32


def test_the_full_decode_chunk_traces(full):
  """With the largest batch; the slots keep their shapes."""
  config, model, mesh = full
  o = from_config.rollout_options(config)
  params = abstract_params(model, mesh, axes.ROLLOUT, model.dtype)
  pages = o.page_sizes(0)
  slots = slots_lib.abstract_slots(
    mesh, model, batch=o.slots, stops=2, layout=None, sizes=pages
  )
  run = chunk_lib.without_training(decode.decode(model, o.chunk, None))
  shardings = chunk_lib.Done(slots_lib.slots_shardings(mesh, model, None), None, None)
  chunk = chunk_lib.make(mesh, run, shardings)
  weights, limits = chunk_lib.Weights(params), chunk_lib.Limits(jnp.int32(o.chunk))
  done = jax.eval_shape(chunk, weights, slots, None, limits, None)
  plain = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert plain(done.slots) == plain(slots)
  assert pages.page * pages.most >= config.max_length
  assert done.emitted.tokens.shape == (o.slots * mesh.shape[axes.DATA], o.chunk)


def test_the_full_learner_update_traces(full):
  """All buckets, with the log-probabilities of both other policies.

  Of the layers, which are alike, four: tracing all 28 takes half a minute.
  """
  config, model, mesh = full
  model = dataclasses.replace(model, num_layers=min(4, model.num_layers))
  learner = learner_lib.make(
    model,
    algorithm_lib.make(**config.algorithm),
    optimizer.make(**config.optimizer),
    mesh,
    **vars(config.learner),
  )
  B = config.batch.prompts * config.batch.responses // learner.updates
  state = learner.abstract_state()
  packed = tuple(abstract_packed(bucket, B) for bucket in learner.buckets)
  f32 = shape(B, dtype=jnp.float32)
  sequences = batch_lib.Sequences(shape(B, 1, dtype=jnp.float32), shape(B), shape(B), f32)
  logp = jax.eval_shape(learner.score, state.params, packed, f32)
  assert [x.shape for x in logp] == [p.tokens.shape for p in packed]
  by_token = shape(B, learner.buckets[-1].length, dtype=jnp.float32)
  sequences = sequences.replace(old_logp=by_token, reference_logp=by_token)
  new, metrics = jax.eval_shape(learner.update, state, packed, sequences)
  plain = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert plain(new) == plain(state)
  assert {"policy/loss", "policy/kl", "policy/clip_frac"} <= set(metrics)
  assert all(m.shape == () for m in metrics.values())
  on_rollout = jax.eval_shape(learner.to_rollout, new.params)
  assert {x.dtype for x in jax.tree.leaves(on_rollout)} == {jnp.dtype(model.dtype)}


def abstract_packed(bucket: packing.Bucket, sequences: int) -> packing.Packed:
  tokens = shape(-(-sequences // bucket.rows), bucket.rows, bucket.length)
  return packing.Packed(
    **dict.fromkeys(("tokens", "targets", "positions", "segments", "sequence_idx"), tokens),
    mask=tokens.update(dtype=bool),
    count=shape(),
  )


def test_seven_billion_parameters_fit_the_machine_they_are_meant_for():
  """Split over 8 devices of 80 GB: training state, and weights and KV of a rollout."""
  config, model = load("qwen2_5_7b"), MODELS["qwen2_5_7b"]
  mesh = tiny.mesh(2, 4)
  learner = learner_lib.make(
    model, None, optimizer.make(**config["optimizer"]), mesh, **config["learner"]
  )

  def per_device(tree):
    shards = [(x, x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]
    return sum(x.dtype.itemsize * jnp.prod(jnp.array(s)).item() for x, s in shards) / 1e9

  state = learner.abstract_state()
  assert sum(x.size for x in jax.tree.leaves(state.params)) == 7_615_616_512
  assert per_device(state) == pytest.approx(12 * 7.6156 / 8, rel=0.01)
  pages = from_config.rollout_options(completed("qwen2_5_7b")).page_sizes(0)
  kv = [slots_lib.abstract_pool(mesh, model, pages)] * model.num_layers
  weights = abstract_params(model, mesh, axes.ROLLOUT, jnp.bfloat16)
  reference = per_device(state.params)
  assert per_device((kv, weights)) + per_device(state) + reference < 70


@pytest.mark.parametrize("arg", MATH)
def test_models_for_math_are_those_that_are_meant(arg):
  """By their parameters; and their heads can be split over the devices of a slice."""
  model, count = MATH[arg]
  boxed = target.abstract_params(model)
  assert sum(x.value.size for x in jax.tree.leaves(boxed, is_leaf=is_boxed)) == count
  devices = load("math_problems", arg)["tensor_parallel"]
  assert model.num_kv_heads % devices == model.num_heads % devices == 0


def is_boxed(x) -> bool:
  return hasattr(x, "value")


PLANNED = [(name, "", MODELS[name]) for name in TRAIN]
PLANNED += [("math_problems", arg, model) for arg, (model, _) in MATH.items()]


@pytest.mark.parametrize(("name", "arg", "model"), PLANNED)
def test_a_dry_run_prints_one_screen(name, arg, model, tmp_path, capsys):
  """From config.json alone, whatever the machine."""
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(model)))
  config = dataclasses.replace(completed(name, arg), policy=str(tmp_path))
  with pytest.raises((SystemExit, MemoryError)):  # it fits here or it does not
    memory_plan.check(memory_plan.of_run(config), dry_run=True)
  printed = capsys.readouterr().out
  assert "policy in training" in printed and len(printed.splitlines()) <= 40


@pytest.mark.parametrize("arg", LONG)
def test_a_policy_of_long_responses_fits_its_machine(arg, tmp_path, capsys):
  """Which is not there; every part is planned, and the policy has the context."""
  model, machine = LONG[arg]
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(model)))
  config = completed("long_reasoning", arg)
  config = dataclasses.replace(config, policy=str(tmp_path))
  assert from_config.complete(config)[0] == config
  plan = memory_plan.of_run(config, memory_phases.Machine.parse(machine))
  with pytest.raises(SystemExit):
    memory_plan.check(plan, dry_run=True)
  assert f"GiB of each of {machine.partition('x')[0]} devices" in capsys.readouterr().out
  assert {"kept features", "state of drafts", "drafter in training"} <= {
    part.name for part in plan.phases["rollout"] if part.size
  }


def test_a_machine_to_plan_for_is_read():
  machine = memory_phases.Machine.parse("64x79.5")
  assert machine == (64, memory.Room(int(0.9 * 79.5e9), int(79.5e9)))
  assert memory_phases.Machine.parse("") is None
  for wrong in ("64", "0x80", "64x", "64*80", "64x80GB"):
    with pytest.raises(ValueError, match="DEVICESxGIGABYTES, such as 64x80, not"):
      memory_phases.Machine.parse(wrong)


def test_importing_a_command_reads_neither_the_command_line_nor_a_config():
  """Both are up to `launch.run`; a test or a notebook may import any command."""
  source = """
import sys
sys.argv = ["train", "--config=nowhere.py", "--config.no_such_key=1"]
from absl import flags
from experiments import train
assert "config" not in flags.FLAGS
"""
  subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)
