"""What a run has trained, as folders that other tools open."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import commands
from tlt_jax import checkpoint
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files

home = commands.home
MODEL = commands.COUNTDOWN


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
    for i, name in enumerate(("params", "average", "published"))
  }
  published = made["published"]
  state = {k: made[k] for k in ("params", "average")} | {"step": jnp.int32(1)}
  trained = {"state": state, "published": published, "features": jnp.zeros(5)}
  spot = {"every": 1, "held_out_rows": 0, "average": 0.0}
  config = {"policy": str(home / "policy"), "drafter": "eagle2", "spot": spot}
  run = workdir_of(tmp_path, config, state_of(drafter=trained))
  told = export.export(run, tmp_path / "out", "sglang")
  assert "no released server" in told  # norms of q and k
  model, policy = convert.load_hf(tmp_path / "out" / "policy")
  assert model == MODEL
  assert_equal(policy, init())
  assert (tmp_path / "out" / "policy" / "tokenizer.json").is_file()
  assert_equal(drafter_files.load(tmp_path / "out" / "drafter", MODEL), (drafter, params))
  checkpoints = checkpoint.Checkpoints(run / "checkpoints")
  for name, changes in (("average", {"average": 0.9}), ("published", {"held_out_rows": 2})):
    other = config | {"spot": spot | changes}
    found = export.drafter_of_run(other, MODEL, checkpoints)
    assert_equal(found, (drafter, made[name]))


def test_a_frozen_drafter_and_one_trained_offline_are_exported(home, tmp_path):
  """For another server, which has no such class, nothing is written."""
  export = commands.module("export")
  drafter = drafter_lib.of_target(MODEL, qk_norm=False, architecture="LlamaForCausalLM")
  params = drafter_lib.init_params(drafter, jax.random.key(1))
  drafter_files.save(tmp_path / "offline" / "drafter", drafter, params)
  run = {"policy": str(home / "policy"), "spot": {"every": 0}}
  run["drafter"] = str(tmp_path / "offline" / "drafter")
  (tmp_path / "rl").mkdir()
  workdir_of(tmp_path / "rl", run, state_of())
  (tmp_path / "offline" / "config.json").write_text(json.dumps({"run": run}))
  for name in ("rl", "offline"):
    told = export.export(tmp_path / name, tmp_path / "out" / name, "vllm")
    assert told.startswith("vllm serve") and '"method": "eagle"' in told
    found = drafter_files.load(tmp_path / "out" / name / "drafter", MODEL)
    assert_equal(found, (drafter, params))
    assert (tmp_path / "out" / name / "policy").exists() == (name == "rl")
  with pytest.raises(ValueError, match="has the policy that the run began with"):
    export.export(tmp_path / "rl", home, "vllm")
  drafter_files.save(run["drafter"], *of_qwen3())
  with pytest.raises(ValueError, match="no EAGLE-2 drafter with norms"):
    export.export(tmp_path / "rl", tmp_path / "refused", "vllm")
  assert not (tmp_path / "refused").exists()


def of_qwen3():
  drafter = drafter_lib.of_target(MODEL)
  return drafter, drafter_lib.init_params(drafter, jax.random.key(1))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
  export = commands.module("export")
  with pytest.raises(ValueError, match="give the folder of a run"):
    export.export(tmp_path, tmp_path / "out", "sglang")
