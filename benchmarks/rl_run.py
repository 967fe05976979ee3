"""An RL run with what it took and gained as JSON; takes the flags of `experiments.train`.

    python -m benchmarks.rl_run --config=one_gpu --workdir=DIR

The same command resumes. Asked to stop (SIGTERM), it saves a checkpoint, and sums up what
is done. The last line is JSON; `first_tokens_s` in it are seconds from each start of the
run to the first tokens.
"""

from collections.abc import Sequence
import json
import pathlib
import re
import signal
import subprocess
import sys

from absl import flags

from experiments import config as config_lib
from experiments import launch
from experiments import plot
from experiments import summary
from experiments import train  # noqa: F401  its flags
from experiments import trees
from tlt_jax import metrics
from tlt_jax import processes

_STARTS = "first_tokens.txt"  # in the workdir
_FIRST_TOKENS = re.compile(r"the first tokens came ([\d.]+) s after the start")
_SECONDS = {
  "steps": "step/seconds_s",
  "rollouts": "rollout/seconds_s",
  "rewards": "reward/seconds_s",
  "updates": "policy/seconds_s",
  "weight_sync": "weight_sync/seconds_s",
  "drafter_after_rollouts": "drafter/training_s",
  "evaluations": "eval/seconds_s",
  "repeated_plainly": "plain/seconds_s",
  "repeated_frozen": "frozen/seconds_s",
  "compiling": "compile/seconds_s",
}
_ENDS = 5  # steps at either end whose mean reward is reported
_COMPARED = ("tokens", "differing_tokens", "near_ties")


def run(workdir: pathlib.Path) -> int:
  """Runs it in a process, whose log it passes on; returns the exit status."""
  command = [sys.executable, "-m", "experiments.train", *sys.argv[1:]]
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    for line in process.stderr:
      sys.stderr.write(line)
      if took := _FIRST_TOKENS.search(line):
        with (workdir / _STARTS).open("a") as starts:
          print(took[1], file=starts)
  return process.returncode


def result(workdir: pathlib.Path) -> dict:
  """The figures of a run, or of what is done of it."""
  records = metrics.read(workdir / "metrics.jsonl")
  steps = metrics.steps(records)

  def total(key: str) -> float:
    return sum(r.get(key, 0.0) for r in records)

  def reward(some: Sequence[dict]) -> float:
    return sum(r["reward/mean"] for r in some) / max(len(some), 1)

  found = {
    "steps": len(steps),
    "first_tokens_s": [float(s) for s in (workdir / _STARTS).read_text().split()],
    "seconds": {name: total(key) for name, key in _SECONDS.items()},
    "update_share": total("policy/seconds_s") / max(total("step/seconds_s"), 1e-9),
    "reward": {"first": reward(steps[:_ENDS]), "last": reward(steps[-_ENDS:])},
    "accuracy": [[r["step"], r["eval/accuracy"]] for r in records if "eval/accuracy" in r],
    "compared": {},
  }
  for side in summary.SIDES:
    compared = [r for r in steps if f"{side}/seconds_s" in r]
    if compared:
      counts = {key: sum(r[f"{side}/{key}"] for r in compared) for key in _COMPARED}
      ratios = {of: summary.gain(compared, side, of) for of in ("rollout", "step")}
      found["compared"][side] = counts | ratios
  return found


def main(config: config_lib.RunConfig):
  del config  # read to be checked; the other process reads it again
  workdir = pathlib.Path(flags.FLAGS.workdir)
  with processes.saving():  # a signal is for the other process, which saves and ends
    status = run(workdir)
    if (workdir / _STARTS).exists():
      if status:  # a run that ends by itself has drawn and printed these
        plot.plot_all(workdir)
        print(summary.text(metrics.read(workdir / "metrics.jsonl")))
      print(json.dumps(result(workdir)))
  sys.exit(status)


if __name__ == "__main__":
  read = trees.from_flags("one_gpu", config_lib.RunConfig)
  launch.run(main, config=read)
