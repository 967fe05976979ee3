"""What `make gpu` runs, as far as a machine without one can run it."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator_parts
from benchmarks import attention
from benchmarks import device_time
from benchmarks import program_counts
from benchmarks import shapes
from tests import commands
from tests import tpu_kernels
from tests import triton_kernels
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

accelerator = commands.module("benchmarks.accelerator")

# Modules that stand for commands.
WORKS = "import pathlib, sys; print('a table'); print('{\"found\": 1}')"
COUNTS = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').open('a').write('x')\n"
MODULES = {
  "works": COUNTS + WORKS,
  "fails": COUNTS + "raise SystemExit('error: a device\\'s memory is full')",
  "half": "print('a table'); print('failed: triton: no'); print('{\"found\": 2}'); 1 / 0",
  "hangs": "import time; time.sleep(600)",
  "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
  "silent": "print('no result')",
}


@pytest.fixture
def made(tmp_path):
  """A run whose parts are the modules above."""
  for name, text in MODULES.items():
    (tmp_path / f"{name}.py").write_text(text)
  env = os.environ | {"PYTHONPATH": str(tmp_path)}
  about = {"commit": "abc", "machine": {"devices": 1}}
  return accelerator.Run(tmp_path, tmp_path, about, env, dry_run=False)


def part(name, minutes=1.0, **options):
  return accelerator_parts.Part(name, [(name,)], [(name,)], minutes=minutes, **options)


def test_a_part_that_fails_leaves_the_others_alone(made, capsys):
  """However it fails; and only what failed is run again."""
  chosen = [
    *(part(name) for name in ("fails", "dies", "half", "silent", "works")),
    part("hangs", minutes=0.01),
  ]
  records = accelerator.run_all(made, chosen, again=False)
  assert records["works"]["result"] == {"found": 1} and "error" not in records["works"]
  assert records["fails"]["error"] == "exit status 1: error: a device's memory is full"
  assert "not done within 0.01 minutes" in records["hangs"]["error"]
  assert "SIGKILL" in records["dies"]["error"]
  assert "printed no result" in records["silent"]["error"]
  assert records["half"]["result"] == {"found": 2}
  assert records["half"]["error"] == "exit status 1: failed: triton: no"
  accelerator.report(made, chosen, records)
  printed = capsys.readouterr().out
  assert "a table\n" in printed and '"found"' not in printed
  assert "failed: dies: ended by signal 9" in printed and "failed: works" not in printed

  written = json.loads((made.folder / "works.json").read_text())
  assert {"date", "commit", "machine", "commands", "seconds"} <= set(written)
  assert accelerator.run_all(made, [part("works")], again=False)["works"] == written
  accelerator.run_all(made, [part("works")], again=True)
  accelerator.run_all(made, [part("fails")], again=False)
  ran = {name: (made.folder / f"{name}.ran").read_text() for name in ("works", "fails")}
  assert ran == {"works": "xx", "fails": "xx"}


def test_results_lie_by_device_and_commit(tmp_path):
  """Another commit's are left as they are."""
  first = accelerator.folder_for(tmp_path, "NVIDIA H100 80GB HBM3", "abc")
  assert first.name.startswith("nvidia-h100-80gb-hbm3-20")
  first.mkdir()
  (first / "about.json").write_text('{"commit": "abc"}')
  assert accelerator.folder_for(tmp_path, "NVIDIA H100 80GB HBM3", "abc") == first
  assert accelerator.folder_for(tmp_path, "NVIDIA H100 80GB HBM3", "d").name == (
    first.name + "-2"
  )


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_the_parts_take_less_than_50_minutes(kind):
  parts = accelerator_parts.parts(kind)
  assert len({part.name for part in parts}) == len(parts)
  assert sum(part.minutes for part in parts) <= 50
  if kind == "gpu":  # what a GPU is asked first
    assert sum(part.minutes for part in parts[:7]) < 12


def test_a_part_has_its_environment_and_what_it_needs(made, tmp_path):
  """Or is skipped."""
  (tmp_path / "asks.py").write_text("import os; print('{\"x\": %s}' % os.environ['X'])")
  assert made.do(part("asks", env={"X": "7"}))["result"] == {"x": 7}
  skipped = made.do(part("works", needs="runs/nothing"))["skipped"]
  assert skipped == "it needs runs/nothing, which is not there"


def test_without_an_accelerator_it_says_what_is_missing(tmp_path):
  message = commands.error(commands.run(tmp_path, "benchmarks.accelerator", "--kind=gpu"))
  assert message.startswith("this needs an NVIDIA GPU, and jax runs on cpu")
  with pytest.raises(ValueError, match="though driver 580 is there: rm -rf .venv"):
    accelerator.check("gpu", {"platform": "cpu", "driver": "580"})


def dry_run(tmp_path, *args):
  args = ("--dry_run", f"--output={tmp_path}", *args)
  done = commands.run(tmp_path, "benchmarks.accelerator", *args)
  assert done.returncode == 0, done.stdout + done.stderr
  found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")}
  return done.stdout, found


def test_a_dry_run_measures_and_goes_on(tmp_path):
  """A part of it: bandwidth, and the search of the filters' cut."""
  printed, found = dry_run(tmp_path, "--parts=drawing")
  assert "cut: microseconds" in printed
  result = found["drawing"]["result"]
  assert result["bandwidth"]["bytes_per_s"] > 0
  ((cut,), (write,)) = (result[name]["cells"] for name in ("cut", "write"))
  for side in (*cut["sides"].values(), *write["sides"].values()):
    assert side["max_error"] < 1e-5 and side["median_s"] > 0
  assert "drawing: done on" in dry_run(tmp_path, "--parts=drawing")[0]


def check_result(name, result):
  """That a part of a dry run found what it is for."""
  if name == "attention":
    cells = result["attention"]["cells"]
    assert all(side["max_error"] < 1e-2 for c in cells for side in c["sides"].values())
    (cell,) = result["sample"]["cells"]
    assert all(side["max_error"] < 1e-5 for side in cell["sides"].values())
    assert cell["sides"]["interpret"]["tokens_unlike_ref"] == 0
  elif name.startswith("steps"):
    found = {(c["kernels"], c["strategy"]) for c in result["cells"]}
    arms = ("off", "ngram_3", "3_1_4")
    assert found == {(kernels, arm) for kernels in ("ref", "interpret") for arm in arms}
    costs = costs_lib.Measured(table=result, micro_batch=result["micro_batch"])
    plain, drafted = (costs.step_s(1, strategy_lib.parse(a), 0) for a in arms[::2])
    assert 0 < plain < drafted and costs.fill_s(64) > 0 < costs.micro_batch
  elif name == "few_rows":
    assert set(result["bits"]) == {"16", "32", "64"}
    sides = [side for cell in result["cells"] for side in cell["sides"].values()]
    assert all(side["median_s"] > 0 for side in (*sides, *result["by_xla"].values()))
  elif name == "lossless":
    assert result["total_tokens"] >= 100 and 0 <= result["identical"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [part.name for part in accelerator_parts.parts("gpu")])
def test_a_dry_run_does_every_part(name, tmp_path):
  """In tiny sizes; the kernels of TPUs are interpreted."""
  _, found = dry_run(tmp_path, f"--parts={name}")
  check_result(name, found[name]["result"])


def test_a_program_makes_as_many_calls_as_it_says():
  """Each on what the one before gave."""
  double = device_time.Side(lambda x: 2 * x, (1.0,), feed=lambda result, x: result)
  assert device_time.looped(double, 5)(*double.args) == 32
  found = device_time.Timing(repeats=2, most_calls=2).measure(
    {"double": double, "broken": double._replace(operation=lambda x: x.nothing)}, 1e-3
  )
  assert found["double"]["median_s"] > 0
  assert "no attribute nothing" in found["broken"]["error"]
  assert device_time.errors([{"sides": found}]) == ["broken: " + found["broken"]["error"]]


def attention_of(head_dim):
  """Attention of a model with such heads, looped."""
  config = config_lib.ModelConfig(
    *("Qwen3ForCausalLM", 64, 32, 48, 2, 4, 2, head_dim), dtype="bfloat16"
  )
  arrays = attention.random_arrays(config, 2, 4, 128)
  return arrays, jnp.array([60, 124], jnp.int32)


def test_attention_is_held_against_float64():
  """What the reference computes."""
  arrays, start = attention_of(16)
  side = attention.sides(arrays, start, ["ref"])["ref"]
  out = np.asarray(jax.jit(side.operation)(*side.args)[0, :, :2], np.float64)
  np.testing.assert_allclose(out, attention.exact(arrays, start), atol=2e-2)


def test_the_looped_kernels_lower_for_tpus():
  arrays, start = attention_of(128)
  side = attention.sides(arrays, start, ["pallas"])["pallas"]
  program = device_time.looped(side, 3)
  assert "tree_attention" in tpu_kernels.lowered(program, tpu_kernels.KINDS[1], *side.args)


@triton_kernels.requires_triton
def test_the_looped_kernels_lower_for_gpus(monkeypatch):
  """Where jax's CUDA plugin is installed; no GPU is needed."""
  triton_kernels.lower_for(90, triton_call.ROUTES[0], monkeypatch)
  arrays, start = attention_of(128)
  side = attention.sides(arrays, start, ["triton"])["triton"]
  traced = device_time.looped(side, 3).trace(*side.args)
  assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_a_step_asks_of_the_host_is_counted():
  """A loop that ends when the data says so, with a branch in it; and one that counts."""

  def step(x):
    x = jax.lax.cond(x.sum() > 3, jnp.sin, jnp.cos, x)
    return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)

  loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, step, x))
  found = program_counts.of_text(loop.lower(jnp.ones((8, 8))).compile().as_text())
  assert found["host_reads"] in (2, 3)  # whether the inner loop's count is known
  assert found["kernels"] >= 3 and found["triton"] == 0


def test_shapes_are_those_of_the_models():
  """By the numbers of parameters that their makers tell, in billions."""
  billions = {n: shapes.params_bytes(c) / 2e9 for n, c in shapes.MODELS.items()}
  assert billions == pytest.approx({"qwen2.5-7b": 7.62, "qwen3-0.6b": 0.60}, abs=0.01)
  seven = shapes.MODELS["qwen2.5-7b"]
  assert shapes.step_bytes(seven) == shapes.params_bytes(seven) - 2 * 152_064 * 3584
