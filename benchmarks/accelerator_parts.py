"""The parts of `benchmarks.accelerator`: commands, time limits, requirements."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKDIR = ROOT / "runs" / "bench_accelerator"
_KERNELS, _STEPS, _STEP, _FEW_ROWS = (
  f"benchmarks.{name}" for name in ("kernels", "decode_steps", "step", "few_rows")
)
_LLM = "runs/smollm2"  # of `import_gguf`
_TINY = ("--dry_run", "--repeats=2")


@dataclasses.dataclass(frozen=True)
class Part:
  """Commands of which the last prints the result."""

  name: str
  commands: Sequence[Sequence[str]]  # arguments of `python -m`
  dry: Sequence[Sequence[str]]  # the same at tiny sizes
  minutes: float  # time limit
  devices: int = 1  # required
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in addition
  needs: str = ""  # a folder of the checkout, which is not in the repo


def parts(kind: str) -> tuple[Part, ...]:
  """The parts, the most important first; their limits add up to 50 minutes."""
  pytest = ("pytest", "-q", "-p", "no:cacheprovider", "-m", kind)
  # Most of the time is compilation; a TPU can have one process only.
  at_once = ("-n12", "--dist=load") if kind == "gpu" else ("-n0",)
  three = "--strategies=off,ngram_3,3_1_4"
  return (
    *(_first() if kind == "gpu" else ()),
    Part(
      "tests",
      [(*pytest, *at_once, f"--{kind}", "tests")],
      dry=[(*pytest, "-n0", "tests/test_on_gpu.py")],
      minutes=4,
    ),
    Part(
      "drawing",
      [(_KERNELS, "--only=bandwidth,sample,cut,write", "--minutes=3")],
      dry=[(_KERNELS, "--only=bandwidth,cut,write", *_TINY)],
      minutes=4,
    ),
    Part(
      "attention",
      [(_KERNELS, "--only=attention", "--minutes=5")],
      dry=[(_KERNELS, "--only=attention,sample", *_TINY)],
      minutes=6,
    ),
    Part(
      "steps_7b",
      [(_STEPS, "--model=qwen2.5-7b", "--minutes=4")],
      dry=[(_STEPS, "--model=qwen2.5-7b", three, *_TINY)],
      minutes=8,
    ),
    Part(
      "steps_0.6b",
      [(_STEPS, "--model=qwen3-0.6b", "--minutes=3")],
      dry=[(_STEPS, "--model=qwen3-0.6b", three, *_TINY)],
      minutes=6,
    ),
    _step(),
  )


def _first() -> tuple[Part, ...]:
  """The first parts on a GPU: bits and time of few rows, launches, compilation."""
  steps = (_STEPS, "--model=qwen3-0.6b", "--repeats=3", "--training=false")
  plain = (*steps, "--live=4", "--strategies=off", "--kernels=triton")
  dry = [(*steps, "--strategies=off", "--dry_run")]
  uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
  untuned = uncached | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
  graph = uncached | {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}
  lossless = "experiments.check_lossless --dtype=bfloat16"
  smollm2 = (
    f"{lossless} --config=experiments/configs/smollm2.py --batch=32 "
    "--strategies=ngram_3,3_1_4 --tokens=20000"
  )
  countdown = (
    f"{lossless} --config=experiments/configs/tail.py:smoke --batch=8 "
    "--config.policy=experiments/policies/countdown --strategies=ngram_3 --tokens=100"
  )
  return (
    Part("few_rows", [(_FEW_ROWS,)], dry=[(_FEW_ROWS, *_TINY)], minutes=2.5),
    Part(
      "first_steps",
      [(*steps, "--live=1,4", "--strategies=off,3_1_4")],
      dry=dry,
      minutes=3,
    ),
    Part("by_jax_triton", [(*plain, "--route=jax_triton")], dry=dry, minutes=1),
    Part("compile", [plain], dry=dry, minutes=1, env=uncached),
    Part("compile_untuned", [plain], dry=dry, minutes=1, env=untuned),
    # On a CPU XLA knows the flags, too.
    Part("one_graph", [plain], dry=dry, minutes=1, env=graph),
    Part(
      "lossless",
      [smollm2.split()],
      dry=[countdown.split()],
      minutes=1.5,
      needs=_LLM,
    ),
  )


def _step() -> Part:
  """Whole RL steps, with and without speculation."""
  work = WORKDIR.relative_to(ROOT)  # commands run in ROOT
  step = f"{_STEP} --sides=plain,frozen --warm_up=1 --config=experiments/configs/tail.py"
  whole = f"{step}:32 --config.batch.responses=8 --steps=4 --workdir={work / 'step'}"
  dry = (
    f"{step}:smoke --config.policy=experiments/policies/countdown --steps=1 "
    f"--workdir={work / 'step_dry'}"
  )
  return Part("step", [whole.split()], dry=[dry.split()], minutes=4)
