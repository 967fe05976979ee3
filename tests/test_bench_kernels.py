"""What `make gpu` runs, as far as a machine without a GPU can run it."""

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


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_the_parts_take_less_than_50_minutes(kind):
  minutes = {part.name: part.minutes for part in accelerator_parts.parts(kind)}
  assert sum(minutes.values()) <= 50
  if kind == "gpu":  # what `make gpu ARGS=--minutes=12` asks for
    first = list(minutes)[: list(minutes).index("compile")]
    assert sum(minutes[name] for name in first) <= 12


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
