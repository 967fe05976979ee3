"""What `benchmarks.accelerator` runs: commands, limits, what they need."""

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
  """A command, or several of which the last tells the result."""

  name: str
  commands: Sequence[Sequence[str]]  # arguments of `python -m`
  dry: Sequence[Sequence[str]]  # the same at tiny sizes
  minutes: float  # after which it is ended
  devices: int = 1  # that it needs
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beside that of all
  needs: str = ""  # a folder of the checkout, which is not in the repo


def parts(kind: str) -> tuple[Part, ...]:
  """The parts, what one wants to know most first. Their limits add up to 50 minutes."""
  pytest = ("pytest", "-q", "-p", "no:cacheprovider", "-m", kind)
  # What compiles takes longer than what runs; and a TPU has room for one process.
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
  """What a GPU is asked first: bits and time of few rows, launches, compilation."""
  steps = (_STEPS, "--model=qwen3-0.6b", "--repeats=3", "--training=false")
  plain = (*steps, "--live=4", "--strategies=off", "--kernels=triton")
  dry = [(*steps, "--strategies=off", "--dry_run")]
  uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
  xla = lambda flags: uncached | {"XLA_FLAGS": flags}
  graph = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
  lossless = ("experiments.check_lossless", "--dtype=bfloat16")
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
    Part(
      "compile_untuned", [plain], dry=dry, minutes=1, env=xla("--xla_gpu_autotune_level=0")
    ),
    # On a CPU XLA knows the flags, too.
    Part("one_graph", [plain], dry=dry, minutes=1, env=xla(graph)),
    Part(
      "lossless",
      [
        (
          *(*lossless, "--config=experiments/configs/smollm2.py", "--batch=32"),
          *("--strategies=ngram_3,3_1_4", "--tokens=20000"),
        )
      ],
      dry=[
        (
          *(*lossless, "--config=experiments/configs/tail.py:smoke"),
          *("--config.policy=experiments/policies/countdown", "--strategies=ngram_3"),
          *("--tokens=100", "--batch=8"),
        )
      ],
      minutes=1.5,
      needs=_LLM,
    ),
  )


def _step() -> Part:
  """Whole RL steps, with and without speculation."""
  tail = "--config=experiments/configs/tail.py"
  work = WORKDIR.relative_to(ROOT)  # where commands run
  sides = ("--sides=plain,frozen", "--warm_up=1")
  return Part(
    "step",
    [
      (
        *(_STEP, f"{tail}:32", "--config.batch.responses=8", *sides, "--steps=4"),
        f"--workdir={work / 'step'}",
      )
    ],
    dry=[
      (
        *(_STEP, f"{tail}:smoke", "--config.policy=experiments/policies/countdown"),
        *(*sides, "--steps=1", f"--workdir={work / 'step_dry'}"),
      )
    ],
    minutes=4,
  )
