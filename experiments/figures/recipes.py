"""The commands of each figure, and the results kept of them."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import re
from typing import NamedTuple

from experiments.figures import kept

_TAIL = "--config=experiments/configs/tail.py"
_SMALL_RUN = "experiments/configs/countdown.py:small"
_DEFAULT_POLICY = "--config.policy=experiments/policies/countdown_9m"
_DEFAULT_DRAFTER = "experiments/drafters/countdown_9m"
_PLAIN = "--config.drafter= --config.strategies="
_WIDTHS = "6_1_7,6_2_16,6_4_16,6_8_16,6_12_16,6_16_16"
_GRID = "2_4_4,2_4_8,4_4_8,4_4_16,4_4_32,8_4_16,8_4_48,12_4_16,12_4_64"
_SHORT = (
  "--config.sampling.max_tokens=96 --config.rollout.chunk=16 "
  "'--config.rollout.buckets=((4,64),(4,128),(2,128))'"
)
# Slices and configs that simulations are compared on.
SIMULATED = (
  *itertools.product((1, 2), [f"tail.py:{slots}" for slots in (4, 8, 16, 32)]),
  *((slices, "tail.py:16 --trace") for slices in (1, 2)),
  (1, "countdown.py"),
)
TRAINED = {"eagle2": ("eagle2", 1), "hass": ("eagle2", 3), "eagle3": ("eagle3", 3)}


def commands(runs: str, full: bool) -> dict[str, str]:
  """Arguments of `python -m` by name of the command.

  Args:
    runs: folder of the commands' workdirs, each named like its command
    full: the size of a paper, instead of minutes on 2 cores
  """

  def size(cheap, whole):
    return whole if full else cheap

  quiet = "--config.evaluation.every=0"
  whole_run = f"--config={_SMALL_RUN}"
  train = f"experiments.train {size(f'{_TAIL} --config.steps=20 {quiet}', whole_run)}"
  rollout, step = (f"benchmarks.{name} {_TAIL}" for name in ("rollout", "step"))
  rules = f"{step} --warm_up=1 --steps={size(6, 20)} --sides=plain,frozen,3_1_4,8_1_9"
  case = (
    f"experiments.train {_TAIL}:64 --config.batch.prompts=16 --config.batch.responses=8 "
    f"{quiet} --config.steps={size(1, 8)} --config.learner.only=head "
    f"{_DEFAULT_POLICY}"
  )
  found = {
    "plain": f"{train} {_PLAIN}",
    "tlt": train,
    "sides": f"{rules},tlt,ngram",
    "bandit": f"{rules} --config.strategy_rule=epsilon_greedy",
    "grid": f"{rollout} --live={size(8, 32)} --repeats={size(1, 3)} --strategies={_GRID}",
    "by_batch": f"{rollout} --slices=1 --live={size('1,2,4,8', '1,2,4,8,16,32')} "
    f"--repeats={size(2, 5)} --strategies=3_1_4,2_4_8,4_8_16,8_8_48 "
    f"{_DEFAULT_POLICY} --drafter={_DEFAULT_DRAFTER}",
    "children": f"{rollout} --live={size(8, 32)} --repeats={size(1, 3)} "
    f"--strategies={_WIDTHS}",
    "following": f"experiments.figures.following {_TAIL} --steps={size(12, 32)} "
    f"--config.spot.after_rollout_share={size(0.5, 2)}",
    "pool": f"experiments.figures.pool {_TAIL}",
    "case_plain": f"{case} {_PLAIN}",
    "case_switched": f"{case} --config.drafter={_DEFAULT_DRAFTER} "
    "--config.spot.train=False '--config.strategies=up to 16 live: 3_1_4'",
    "switching": "experiments.figures.switching --requests=128 --at=32",
    "rules": "experiments.figures.rules --scenario=qwen2_5_7b --slices=8",
    "counted": f"experiments.figures.counted {_TAIL}:4 --config.batch.prompts="
    + size(f"64 --layers=1 {_SHORT}", "128"),
  }
  for name, (kind, unrolled) in TRAINED.items():
    found[f"train_{name}"] = (
      "experiments.train_drafter --config=experiments/configs/drafter.py:small "
      f"--run={_SMALL_RUN} --config.steps={size(60, 1200)} "
      f"--config.optimizer.total={size(60, 1200)} --config.drafter.kind={kind} "
      f"--config.loss.steps={unrolled} --config.responses.prompts={size(16, 256)} "
      "--config.checkpoint.every=20"
    )
  for slices, config in SIMULATED:
    job = "" if slices == 1 else f"experiments.launch --processes={slices} -- "
    found[_simulated(slices, config)] = (
      f"{job}experiments.figures.simulated --config=experiments/configs/{config} "
      f"--config.batch.prompts={2 * slices} --steps={size(10, 20)} --warm_up=1"
    )
  for name, slices in (
    ("7b", "8,16,32,64,128,256,512"),
    ("32b", "2,4,8,16,32,64,128"),
  ):
    found[f"scale_{name}"] = (
      f"experiments.simulate --scenario=qwen2_5_{name} --slices={slices} "
      f"--nosensitivity --out={runs}/scale_{name}"
    )
  own = {"train", "train_drafter", "step", "rollout"}
  return {
    name: f"{command} --workdir={runs}/{name}"
    if command.split()[0].rpartition(".")[2] in own
    else command
    for name, command in found.items()
  }


def _simulated(slices: int, config: str) -> str:
  return f"simulated_{slices}_" + re.sub(r"\W+", "_", config)


class Recipe(NamedTuple):
  """How to produce the data of a figure."""

  commands: Sequence[str]  # names, in order
  keep: Callable[[kept.Outputs], Mapping]  # the figure's `result`
  conditions: str


_SMALL = "small policy (1.5M parameters), {}; 2 CPU devices on 2 shared cores, float32"
RECIPES: dict[str, Recipe] = {
  "lengths": Recipe(("plain",), kept.lengths, _SMALL.format("32 responses a step, plain")),
  "reward": Recipe(("plain", "tlt"), kept.reward, _SMALL.format("32 responses a step")),
  "end_to_end": Recipe(
    ("sides",),
    kept.end_to_end,
    _SMALL.format("16 responses per slice"),
  ),
  "trees": Recipe(
    ("grid", "by_batch"),
    kept.trees,
    _SMALL.format("temperature 1, 192 tokens a request")
    + "; speed-ups: the default policy (8.8M parameters), one CPU device with both cores",
  ),
  "children": Recipe(
    ("children",), kept.children, _SMALL.format("temperature 1, 192 tokens a request")
  ),
  "following": Recipe(
    ("following",), kept.last("following"), _SMALL.format("32 responses a step")
  ),
  "kinds": Recipe(
    ("train_eagle2", "train_hass", "train_eagle3"),
    kept.kinds,
    _SMALL.format("drafters from random weights; 32 held-out prompts x 2"),
  ),
  "strategies": Recipe(
    ("sides", "bandit", "rules"),
    kept.strategies,
    _SMALL.format("16 responses per slice")
    + ". SIMULATED: scenarios/qwen2_5_7b.json, frozen drafter, the last of 6 rollouts",
  ),
  "pool": Recipe(("pool",), kept.last("pool"), _SMALL.format("buckets of configs/tail.py")),
  "case_128": Recipe(
    ("switching", "case_plain", "case_switched"),
    kept.case_128,
    "the default policy (8.8M parameters), 128 responses; 2 CPU devices on 2 shared cores,"
    " float32",
  ),
  "scale": Recipe(
    ("scale_7b", "scale_32b"),
    kept.scale,
    "SIMULATED, by a roofline of H100s: no such device was there; lengths and acceptance"
    " are assumed (experiments/scenarios)",
  ),
  "simulated": Recipe(
    (
      *(_simulated(*case) for case in SIMULATED),
      "counted",
    ),
    kept.simulated,
    "small policy (1.5M parameters), configs/tail.py; default: configs/countdown.py, 8.8M;"
    " one CPU device with two cores, or two processes with a core each; float32",
  ),
}
