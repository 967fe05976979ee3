"""Checks that a run that is killed again and again ends as if nothing had happened.

    python -m experiments.check_resume --kills=40 --steps=8

One run goes straight through. Others follow its `--schedule` and are killed (SIGKILL)
at random moments, uniform over the wall time of a run: while it starts, compiles, trains,
writes a checkpoint or exports. After each kill the same command resumes. After
`--kills_per_run` kills a run may finish, and is compared with the first one, bit for
bit: policy, drafter, metrics (less seconds and memory), responses, and the drafter's
micro-batches. The drafter must train in idle slices. The last line is JSON; the exit
status is 1 if anything differs.
"""

from collections.abc import Sequence
import json
import logging
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

from absl import flags

from experiments import keys
from experiments import launch
from experiments import logs
from experiments import outcomes

_KILLS = flags.DEFINE_integer("kills", 40, "In all.", lower_bound=1)
_PER_RUN = flags.DEFINE_integer("kills_per_run", 5, "Before it may end.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 8, "Of each run.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments of the kills.", lower_bound=0)
_WORKDIR = flags.DEFINE_string("workdir", "", "For the runs; default: a temporary one.")


class ResumeError(ValueError):
  """A run that does not end, or in which no drafter trains."""


def train(args: Sequence[str], seconds: float | None = None) -> bool:
  """Runs the training command; kills it after so many seconds.

  Returns:
    whether it was killed; a run that is over by then was not
  Raises:
    ResumeError: it failed
  """
  command = [sys.executable, "-m", "experiments.train", *args]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    try:
      _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      process.kill()
      process.communicate()
      return True
    except BaseException:
      process.kill()
      raise
  if process.returncode:
    raise ResumeError(f"a run ended with status {process.returncode}: {stderr[-500:]}")
  return False


def main(config):
  logs.start()
  if not config["drafter"] or not config["spot"]["every"]:
    raise ResumeError("no drafter trains: set --config.drafter and --config.spot.every")
  if not all(arg.startswith("-") for arg in sys.argv[1:]):
    raise ResumeError("flags are given as --name=value here")
  folder = pathlib.Path(_WORKDIR.value or tempfile.mkdtemp()).absolute()
  if folder.exists() and any(folder.iterdir()):
    raise ResumeError(
      f"{folder} is not empty: a run that is over in there could only be killed while it "
      "starts; take another --workdir"
    )
  logging.info("the runs are in %s", folder)
  given = [arg for arg in sys.argv[1:] if re.match(r"--?(no)?config\b", arg)]
  given.append(f"--config.steps={_STEPS.value}")
  first = folder / "first"
  began = time.perf_counter()
  train([*given, f"--workdir={first}"])
  whole_s = time.perf_counter() - began
  expected, dice = outcomes.of(first), random.Random(_SEED.value)
  found = {"kills": 0, "runs": 0, "finished_before_the_kill": 0}
  found |= {"updates": [outcomes.updates(first)], "differing": []}
  while found["kills"] < _KILLS.value:
    workdir, kills = folder / f"killed_{found['runs']}", 0
    args = [*given, f"--workdir={workdir}", f"--schedule={first / 'rollouts.jsonl'}"]
    while kills < min(_PER_RUN.value, _KILLS.value - found["kills"]):
      began = time.perf_counter()
      if not train(args, dice.uniform(0, whole_s)):
        found["finished_before_the_kill"] += 1
        if not kills:  # a whole run, whose programs were compiled before
          whole_s = min(whole_s, time.perf_counter() - began)
        break
      kills += 1
    else:
      train(args)
    found["kills"] += kills
    found["runs"] += 1
    found["updates"].append(outcomes.updates(workdir))
    ended = outcomes.of(workdir)
    different = [name for name in expected if ended[name] != expected[name]]
    found["differing"] += [f"{workdir.name}/{name}" for name in different]
    logging.info("%d of %d kills, %s", found["kills"], _KILLS.value, different or "equal")
  print(json.dumps(found))
  if found["differing"] or not all(found["updates"]):
    sys.exit(1)


if __name__ == "__main__":
  launch.run(main, config=("countdown", keys.RUN))
