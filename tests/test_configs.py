"""Every config is a tree of its command, and its full size type-checks.

Nothing large is allocated: models, decoding and updates are traced on shapes.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import memory_plan
from experiments import sizes
from experiments import trees
from tests import commands
from tests import tiny
from tlt_jax import axes
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
QWEN2_5_7B = shapes.MODELS["qwen2.5-7b"]
GEMMA3_270M = model_lib.ModelConfig(
  architecture="Gemma3ForCausalLM",
  vocab_size=262144,
  width=640,
  mlp_width=2048,
  num_layers=18,
  num_heads=4,
  num_kv_heads=1,
  head_dim=256,
  rope_theta=1e6,
  layers=(
    *[model_lib.LayerKind(window=512, rope=model_lib.Rope(1e4))] * 5,
    model_lib.LayerKind(rope=model_lib.Rope(1e6)),
  ),
  query_scalar=256,
  max_position=32768,
  qk_norm=True,
  tie_embeddings=True,
)
MODELS = {  # what `policy` holds at full size
  "countdown": model_lib.ModelConfig(**load("warm_start", "9m")["model"]),
  **dict.fromkeys(
    ("algorithms", "tail"), model_lib.ModelConfig(**load("warm_start")["model"])
  ),
  **dict.fromkeys(("smollm2", "one_gpu", "reasoning_mix"), tiny.SMOLLM2),
  "gemma3_270m": GEMMA3_270M,
  **dict.fromkeys(("qwen2_5_7b", "math_problems", "long_reasoning"), QWEN2_5_7B),
}
LONG_CONTEXT = dataclasses.replace(QWEN2_5_7B, max_position=131072)
LONG = {  # what `policy` holds by the argument of `long_reasoning`, on which machines
  "qwen2_5_7b": (LONG_CONTEXT, "8x80"),
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
  "qwen3_30b_a3b": (shapes.MODELS["qwen3-30b-a3b"], "16x80", "8x141"),
  "tpu": (LONG_CONTEXT, "16x32"),
}
# Those that differ from another in prompts and algorithm only are not traced again.
ALIKE = ("one_gpu", "reasoning_mix", "math_problems", "long_reasoning")
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
  *itertools.product(("math_problems",), ("qwen2_5_1_5b", "qwen3_8b", "llama3_1_8b")),
  *itertools.product(("smollm2",), ("gsm8k", "countdown")),
  *itertools.product(("one_gpu",), ("gsm8k", "gemma3_4b")),
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
    if arg != "smoke":  # in idle slices and after rollouts: one slice is never idle
      assert config.drafter and config.spot.train and config.spot.after_rollout_share > 0


def test_the_default_run_does_what_the_readme_says(tmp_path):
  """It trains the drafter in idle slices, measures the gain, evaluates and saves."""
  run = load_tree("countdown")
  readme = (ROOT / "README.md").read_text()
  assert f"{run.steps} steps lift the accuracy" in readme
  assert run.compare.every == 5 and "Every fifth rollout is repeated" in readme
  assert 0 < run.evaluation.every <= run.steps and run.held_out["size"] > 0
  assert 0 < run.checkpoint.every < run.steps and run.checkpoint.keep > 1
  policy = commands.write_policy(tmp_path / "policy")
  run = dataclasses.replace(run, policy=str(policy))
  model, mesh = hf.load_config(run.policy), tiny.mesh(2)
  drafter = from_config.make_drafter(run, model, mesh)
  selector = from_config.make_selector(run)
  sampler = from_config.make_sampler(run, model, mesh, drafter, selector)
  engine, options = sampler.rollout, sampler.rollout.options
  reached = {s for n in options.buckets for s in engine.chooser.in_bucket(options, n)}
  assert {"3_1_4", "1_1_2"} == set(map(str, selector.strategies)) == set(map(str, reached))
  assert min(run.batch.prompts * run.batch.responses // 2, options.slots) == max(
    level.most for level in levels.parse(run.strategies)
  )
  # The first and third prompt's responses are on one slice, and end first.
  lengths = np.array([[8] * 8, [20] * 5 + [150] * 3] * 2, np.int32)
  source = from_config.RunPrompts(run).train.records
  records = [source[i] for i in range(run.batch.prompts)]
  before = jax.device_get(drafter.params)
  _, params = hf.load(policy, mesh)
  drawn = sampler(
    params,
    records,
    run.batch.responses,
    seed=0,
    lengths=lengths.reshape(-1),
    train=drafter.spot is not None,
  ).samples
  idle = [c for c in drawn.chunks if c.live[1] and not c.live[0]]
  assert idle and sum(c.trained[0] for c in idle) > 0
  assert sum(made["updates"] for made in drawn.training) > 0
  same = jax.tree.map(np.array_equal, before, jax.device_get(drafter.params))
  assert not all(jax.tree.leaves(same))


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
  rotations = chunk_lib.rotations(model, mesh, pages.length, abstract=True)
  weights = chunk_lib.Weights(params, rotations=rotations)
  limits = chunk_lib.Limits(jnp.int32(o.chunk))
  done = jax.eval_shape(chunk, weights, slots, None, limits, None)
  assert shapes_of(done.slots) == shapes_of(slots)
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
  assert shapes_of(new) == shapes_of(state)
  assert {"policy/loss", "policy/kl", "policy/clip_frac"} <= set(metrics)
  assert all(m.shape == () for m in metrics.values())
  on_rollout = jax.eval_shape(learner.to_rollout, new.params)
  assert {x.dtype for x in jax.tree.leaves(on_rollout)} == {jnp.dtype(model.dtype)}


def shapes_of(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def abstract_packed(bucket: packing.Bucket, sequences: int) -> packing.Packed:
  tokens = shape(-(-sequences // bucket.rows), bucket.rows, bucket.length)
  return packing.Packed(
    **dict.fromkeys(("tokens", "targets", "positions", "segments", "sequence_idx"), tokens),
    mask=tokens.update(dtype=bool),
    count=shape(),
  )


@pytest.mark.parametrize("name", SHAPES)
def test_a_dry_run_prints_one_screen(name, tmp_path, capsys):
  """From config.json alone, whatever the machine."""
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(MODELS[name])))
  config = dataclasses.replace(completed(name), policy=str(tmp_path))
  with pytest.raises((SystemExit, MemoryError)):  # it fits here or it does not
    memory_plan.check(memory_plan.of_run(config), dry_run=True)
  printed = capsys.readouterr().out
  assert "policy in training" in printed and len(printed.splitlines()) <= 40


@pytest.mark.parametrize(
  ("arg", "machine"),
  [(arg, machine) for arg, (_, *all_) in LONG.items() for machine in all_],
)
def test_a_policy_of_long_responses_fits_its_machine(arg, machine, tmp_path, capsys):
  """Which is not there; every part is planned, and the policy has the context."""
  model = LONG[arg][0]
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
  chosen = memory_plan.choose_remat(config, memory_phases.Machine.parse(machine))
  algorithm = algorithm_lib.make(**config.algorithm)
  described = memory_plan.described(chosen, None, 1, memory_phases.Machine.parse(machine))
  update = described.learner(algorithm).update_bytes(chosen.learner.remat)
  arrays = sum(p.size for p in plan.phases["update"] if p.name != "policy in rollouts")
  assert arrays + update <= plan.room.free  # the rollout's copy is made when it is done
