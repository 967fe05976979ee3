"""What a run has trained, as folders that other tools open."""

import dataclasses
import functools
import json
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests import commands
from tlt_jax import api
from tlt_jax import checkpoint
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import eagle_files
from tlt_jax.models import hf

home = commands.home
MODEL, SERVERS = commands.COUNTDOWN, eagle_files.SERVERS


@functools.cache
def init():
  return commands.init(MODEL)


def state_of(**parts) -> dict:
  """A checkpoint's state, with other arrays beside what is exported."""
  other = {"opt_state": {"mu": jnp.zeros(3)}, "step": jnp.int32(2)}
  policy = {"params": init(), **other}
  return {"policy": policy, **parts}


def workdir_of(folder, config, state):
  checkpoints = checkpoint.Checkpoints(folder / "checkpoints")
  with checkpoints:
    checkpoints.save(2, state, {}, force=True)
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_is_exported_from_its_latest_checkpoint(home, tmp_path):
  """The policy in its number format, with tokenizer; the drafter that drafts, as it is."""
  export = commands.module("export")
  drafter = drafter_lib.of_target(MODEL)
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  made = {
    name: jax.tree.map(lambda x, i=i: x + i, params)
    for i, name in enumerate(("params", "average"))
  }
  trained = {"state": made | {"step": jnp.int32(1)}, "features": jnp.zeros(5)}
  spot = {"train": True, "average": 0.0}
  config = {"policy": str(home / "policy"), "drafter": "eagle2", "spot": spot}
  run = workdir_of(tmp_path, config, state_of(drafter=trained))
  export.export(run, tmp_path / "out", "sglang")
  model, policy = hf.load(tmp_path / "out" / "policy")
  assert model == MODEL
  assert_equal(policy, init())
  assert (tmp_path / "out" / "policy" / "tokenizer.json").is_file()
  assert_equal(drafter_files.load(tmp_path / "out" / "drafter", MODEL), (drafter, params))
  checkpoints = checkpoint.Checkpoints(run / "checkpoints")
  other = config | {"spot": spot | {"average": 0.9}}
  found = export.drafter_of_run(other, MODEL, checkpoints)
  assert_equal(found, (drafter, made["average"]))


def test_a_frozen_drafter_and_one_trained_offline_are_exported(home, tmp_path):
  """For another server, which has no such class, nothing is written."""
  export = commands.module("export")
  drafter = drafter_lib.of_target(MODEL, qk_norm=False, architecture="LlamaForCausalLM")
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  drafter_files.save(tmp_path / "offline" / "drafter", drafter, params)
  run = {"policy": str(home / "policy"), "spot": {"train": False}}
  run["drafter"] = str(tmp_path / "offline" / "drafter")
  (tmp_path / "rl").mkdir()
  workdir_of(tmp_path / "rl", run, state_of())
  (tmp_path / "offline" / "config.json").write_text(json.dumps({"run": run}))
  for name in ("rl", "offline"):
    command = export.export(tmp_path / name, tmp_path / "out" / name, "vllm")
    assert command.startswith("vllm serve")
    found = drafter_files.load(tmp_path / "out" / name / "drafter", MODEL)
    assert_equal(found, (drafter, params))
    assert (tmp_path / "out" / name / "policy").exists() == (name == "rl")
  with pytest.raises(ValueError, match="would be replaced"):
    export.export(tmp_path / "rl", home, "vllm")
  drafter = drafter_lib.of_target(MODEL)
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  drafter_files.save(run["drafter"], drafter, params)
  with pytest.raises(ValueError, match="--policy_only"):  # norms of q and k
    export.export(tmp_path / "rl", tmp_path / "refused", "vllm")
  assert not (tmp_path / "refused").exists()
  export.export(tmp_path / "rl", tmp_path / "refused", "vllm", policy_only=True)
  assert (tmp_path / "refused" / "policy").exists()
  assert not (tmp_path / "refused" / "drafter").exists()


def test_a_part_of_the_vocabulary_is_served_as_each_server_can(home, tmp_path):
  """SGLang gets a list of tokens, by a command that is printed; vLLM drafts among all."""
  export = commands.module("export")
  vocab = (2, 3, 5, 7, 11)
  drafter = drafter_lib.of_target(
    MODEL, qk_norm=False, architecture="LlamaForCausalLM", vocab=vocab
  )
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  eagle_files.save(tmp_path / "it's" / "drafter", drafter, params)
  config = {"run": {"policy": str(home / "policy"), "drafter": ""}}
  (tmp_path / "it's" / "config.json").write_text(json.dumps(config))
  printed = {s: export.export(tmp_path / "it's", tmp_path / f"s {s}", s) for s in SERVERS}
  make, serve = map(shlex.split, printed["sglang"].splitlines())
  assert serve[-2:] == ["--speculative-token-map", make[-1]]
  compile(make[2], "made", "exec")
  d2t = safetensors.numpy.load_file(make[3])["d2t"]
  assert tuple(d2t + np.arange(len(d2t))) == vocab
  found = drafter_files.load(tmp_path / "s sglang" / "drafter", MODEL)
  assert_equal(found, (drafter, params))
  _, serve = printed["vllm"].splitlines()
  spoken = json.loads(shlex.split(serve)[-1])
  whole = dataclasses.replace(drafter, vocab=())
  assert_equal(drafter_files.load(spoken["model"], MODEL), (whole, params))


@pytest.mark.parametrize(("shifted", "method"), [(False, "dflash"), (True, "dspark")])
def test_drafters_of_blocks_are_served_with_whole_blocks(shifted, method, home, tmp_path):
  export = commands.module("export")
  published = dict(anchored=False, window=None, rank=0)
  block = drafter_lib.Block(size=4, shifted=shifted, mask_token=23, **published)
  drafter = drafter_lib.of_target(MODEL, "block", block=block, vocab=(2, 3, 5))
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  drafter_files.save(tmp_path / "drafter", drafter, params)
  config = {"run": {"policy": str(home / "policy"), "drafter": ""}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  printed = {s: export.export(tmp_path, tmp_path / s, s) for s in SERVERS}
  whole = dataclasses.replace(drafter, vocab=())  # the line before the command says so
  serve = {}
  for server, message in printed.items():
    assert_equal(drafter_files.load(tmp_path / server / "drafter", MODEL), (whole, params))
    note, command = message.splitlines()
    assert "among all 24 tokens" in note
    serve[server] = shlex.split(command)
  spoken = json.loads(serve["vllm"][-1])
  assert (spoken["method"], spoken["num_speculative_tokens"]) == (method, block.guesses)
  assert serve["sglang"][-1] == str(block.guesses + 1) and method.upper() in serve["sglang"]
  config = dataclasses.replace(drafter, block=drafter_lib.Block())
  own = drafter_lib.init_params(config, jax.random.key(1))
  drafter_files.save(tmp_path / "drafter", config, own)
  with pytest.raises(ValueError, match="kind dspark"):
    export.export(tmp_path, tmp_path / "refused", "vllm")
  assert not (tmp_path / "refused").exists()


@pytest.mark.slow  # programs of two rollouts
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_an_exported_drafter_drafts_what_it_did(kind, tmp_path):
  """To the last digit of its acceptance, also where the target's head is its embedding."""
  export = commands.module("export")
  model = dataclasses.replace(
    MODEL,
    architecture="LlamaForCausalLM",
    num_layers=3,
    qk_norm=False,
    tie_embeddings=True,
  )
  commands.write_policy(tmp_path / "policy", model, commands.init(model))
  drafter = drafter_lib.of_target(
    model, kind, **({"taps": (0, 1, 2)} if kind == "eagle3" else {})
  )
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  drafter_files.save(tmp_path / "drafter", drafter, params)
  config = {"run": {"policy": str(tmp_path / "policy"), "drafter": ""}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  export.export(tmp_path, tmp_path / "out", "sglang")
  prompts = [np.arange(i, i + 5) for i in range(1, 9)]
  requests = api.make_requests(prompts, responses=2, max_tokens=24, seed=0)
  measured = []
  for folder in (tmp_path / "drafter", tmp_path / "out" / "drafter"):
    policy = api.load(
      tmp_path / "policy",
      folder,
      max_prompt=8,
      max_tokens=24,
      slots=4,
      strategies="up to 9 live: 2_1_3",
      devices=jax.devices()[:1],
    )
    samples = policy.rollout(policy.params, requests)
    measured.append(samples.mean_acceptance_length)
  assert measured[0] == measured[1] > 1
