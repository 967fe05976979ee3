"""What `make gpu` runs, as far as a machine without a GPU can run it."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator_parts
from benchmarks import attention
from benchmarks import device_time
from tests import commands
from tests import tpu_kernels
from tests import triton_kernels
from tlt_jax.models import config as config_lib

accelerator = commands.module("benchmarks.accelerator")


def part(name, minutes=1.0):
  return accelerator_parts.Part(name, [(name,)], [(name,)], minutes=minutes)


def test_a_part_that_fails_leaves_the_others_alone(tmp_path):
  """And only what failed is run again."""
  ran = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').open('a').write('x')\n"
  modules = {
    "works": ran + "print('{\"found\": 1}')",
    "fails": ran + "raise SystemExit('error: no memory')",
    "half": "print('{\"found\": 2}'); 1 / 0",
    "hangs": "import sys, time; print('99 tokens', file=sys.stderr); time.sleep(600)",
  }
  for name, text in modules.items():
    (tmp_path / f"{name}.py").write_text(text)
  env = os.environ | {"PYTHONPATH": str(tmp_path)}
  about = {"commit": "abc", "machine": {"devices": 1}}
  made = accelerator.Run(tmp_path, tmp_path, about, env, dry_run=False)
  chosen = [*map(part, ("fails", "half", "works")), part("hangs", minutes=0.05)]
  records = accelerator.run_all(made, chosen, again=False)
  assert {name: "error" in r for name, r in records.items()} == {
    "fails": True, "half": True, "works": False, "hangs": True
  }  # fmt: skip
  assert records["works"]["result"] == {"found": 1}
  assert records["half"]["result"] == {"found": 2}
  assert "99 tokens" in records["hangs"]["error"]
  accelerator.run_all(made, [part("works"), part("fails")], again=False)
  assert (tmp_path / "works.ran").read_text() == "x"
  assert (tmp_path / "fails.ran").read_text() == "xx"


def test_a_part_that_was_left_out_is_tried_again(tmp_path):
  """It needed what another part makes, in the folder of the results."""
  (tmp_path / "works.py").write_text("print('{\"found\": 1}')")
  env = os.environ | {"PYTHONPATH": str(tmp_path)}
  about = {"commit": "abc", "machine": {"devices": 1}}
  made = accelerator.Run(tmp_path, tmp_path, about, env, dry_run=False)
  needs = f"{accelerator_parts.FOLDER}/rl/drafter"
  chosen = [dataclasses.replace(part("works"), needs=needs)]
  record = accelerator.run_all(made, chosen, again=False)["works"]
  assert "rl/drafter" in record["skipped"] and "result" not in record
  (tmp_path / "rl" / "drafter").mkdir(parents=True)
  assert accelerator.run_all(made, chosen, again=False)["works"]["result"] == {"found": 1}


def test_a_part_is_asked_to_stop_before_it_is_killed(tmp_path):
  """So that it can save; what does not listen is killed."""
  text = (
    "import signal, sys, time\n"
    "def stop(*_):\n  print('{\"saved\": 1}'); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, stop)\ntime.sleep(600)"
  )
  (tmp_path / "listens.py").write_text(text)
  (tmp_path / "deaf.py").write_text(text.replace("stop)\n", "signal.SIG_IGN)\n"))
  env = os.environ | {"PYTHONPATH": str(tmp_path)}
  about = {"commit": "abc", "machine": {"devices": 1}}
  made = accelerator.Run(tmp_path, tmp_path, about, env, dry_run=False)
  chosen = [part("listens", minutes=0.05), part("deaf", minutes=0.05)]
  records = accelerator.run_all(made, chosen, again=False)
  assert all("not done within 0.05 minutes" in r["error"] for r in records.values())
  assert records["listens"]["result"] == {"saved": 1} and "result" not in records["deaf"]


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_the_parts_take_less_than_50_minutes(kind):
  minutes = {part.name: part.minutes for part in accelerator_parts.parts(kind)}
  assert sum(minutes.values()) <= 50
  if kind == "gpu":  # what `make gpu ARGS=--minutes=12` asks for
    first = list(minutes)[: list(minutes).index("compile")]
    assert sum(minutes[name] for name in first) <= 12


def test_one_gpu_takes_12_minutes_and_its_commands_can_be_read(tmp_path):
  """On the device, where it cannot be tried here."""
  parts = accelerator_parts.one_gpu("gpu")
  assert sum(part.minutes for part in parts) <= 12
  lines = [list(command) for part in parts for command in part.commands]
  lines = [[x.replace(accelerator_parts.FOLDER, "runs") for x in line] for line in lines]
  (tmp_path / "lines.json").write_text(json.dumps([[line] for line in lines]))
  done = commands.run_text(
    "import sys; from tests import parsed; parsed.main(sys.argv[1])",
    tmp_path / "lines.json",
  )
  assert json.loads(done.stdout.splitlines()[-1]) == [""] * len(lines), done.stderr


def dry_run(tmp_path, *args):
  args = ("--dry_run", f"--output={tmp_path}", *args)
  done = commands.run(tmp_path, "benchmarks.accelerator", *args)
  assert done.returncode == 0, done.stdout + done.stderr
  found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")}
  return done.stdout, found


def test_a_dry_run_measures_and_goes_on(tmp_path):
  """Bandwidth, and the search of the filters' cut."""
  _, found = dry_run(tmp_path, "--parts=drawing")
  result = found["drawing"]["result"]
  assert result["bandwidth"]["bytes_per_s"] > 0
  for name in ("cut", "write"):
    (cell,) = result[name]["cells"]
    for side in cell["sides"].values():
      assert side["max_error"] < 1e-5 and side["median_s"] > 0
  assert "drawing: done on" in dry_run(tmp_path, "--parts=drawing")[0]


@pytest.mark.slow
def test_a_dry_run_of_one_gpu_does_an_rl_run_and_uses_its_drafter(tmp_path):
  _, found = dry_run(tmp_path, "--set=one_gpu")
  run = found["rl"]["result"]
  assert run["steps"] == 3 and run["first_tokens_s"][0] > 0 and len(run["accuracy"]) == 2
  assert run["compared"]["plain"]["tokens"] > run["compared"]["plain"]["differing_tokens"]
  assert found["steps_on_and_off"]["result"]["identical"]
  sides = found["beside_transformers"]["result"]["live"]["1"]
  assert sides["plain"]["tokens_per_s"] > 0 and sides["3_1_4"]["mean_acceptance_length"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [part.name for part in accelerator_parts.parts("gpu")])
def test_a_dry_run_does_every_part(name, tmp_path):
  """In tiny sizes; the kernels of TPUs are interpreted."""
  result = dry_run(tmp_path, f"--parts={name}")[1][name]["result"]
  if name == "attention":
    for kind, most in (("attention", 1e-2), ("sample", 1e-5)):
      cells = result[kind]["cells"]
      assert all(s["max_error"] < most for cell in cells for s in cell["sides"].values())
  elif name.startswith("lossless"):
    assert result["total_tokens"] >= 100 and 0 <= result["identical"] <= 1


def looped(head_dim, impl):
  """Attention of a model with such heads, looped."""
  config = config_lib.ModelConfig(
    *("Qwen3ForCausalLM", 64, 32, 48, 2, 4, 2, head_dim), dtype="bfloat16"
  )
  arrays = attention.random_arrays(config, 2, 4, 128)
  start = jnp.array([60, 124], jnp.int32)
  return arrays, start, attention.sides(arrays, start, [impl])[impl]


def test_attention_is_compared_with_float64():
  arrays, start, side = looped(16, "ref")
  out = np.asarray(jax.jit(side.operation)(*side.args)[0, :, :2], np.float64)
  np.testing.assert_allclose(out, attention.exact(arrays, start), atol=2e-2)


def test_the_looped_kernels_lower_for_tpus():
  *_, side = looped(128, "pallas")
  program = device_time.looped(side, 3)
  assert "tree_attention" in tpu_kernels.lowered(program, tpu_kernels.KINDS[1], *side.args)


@triton_kernels.requires_triton
def test_the_looped_kernels_lower_for_gpus(monkeypatch):
  """Where jax's CUDA plugin is installed; no GPU is needed."""
  triton_kernels.lower_for(90, monkeypatch)
  *_, side = looped(128, "triton")
  traced = device_time.looped(side, 3).trace(*side.args)
  assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
