"""Checks that a run that is killed repeatedly ends with the same result as one that is not.

    python -m experiments.check_resume --kills=40 --steps=8

The first run is not interrupted. Others follow its `--schedule` and are killed (SIGKILL) at
random times, uniform over the wall time of a run: while it starts, compiles, trains, writes
a checkpoint or exports. After each kill the same command resumes. After `--kills_per_run`
kills a run may finish. It is compared with the first one bit for bit: policy, drafter,
metrics (except memory, seconds and gains), responses, and the drafter's micro-batches. The
drafter must train in idle slices. The last line is JSON; the exit status is 1 if anything
differs.

With `--processes=N` a run is a job of `experiments.launch`: one of its processes, chosen at
random, gets the signal; the others must end within a minute, with one line that names the
cause. With `--signal=SIGTERM` runs are not killed but stop, within 30 s.
"""

import collections
from collections.abc import Sequence
import json
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from absl import flags

from experiments import config as config_lib
from experiments import launch
from experiments import logs
from experiments import outcomes
from experiments import trees

_KILLS = flags.DEFINE_integer("kills", 40, "In all.", lower_bound=1)
_PER_RUN = flags.DEFINE_integer("kills_per_run", 5, "Before it may end.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 8, "Of each run.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the times of the kills.", lower_bound=0)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Of a run.", lower_bound=1)
_LIMITS_S = {"SIGKILL": 60, "SIGTERM": 30}  # by which all processes must have ended
_SIGNAL = flags.DEFINE_enum("signal", "SIGKILL", list(_LIMITS_S), "What runs get.")
_WORKDIR = flags.DEFINE_string("workdir", "", "For the runs; default: a temporary one.")


class ResumeError(ValueError):
  """A run that does not end, or in which no drafter trains."""


class Stopped(NamedTuple):
  """How a run ended that got the signal."""

  seconds: float  # from the signal to the end of all its processes
  lines: list[str]  # of stderr, on the cause


def train(
  args: Sequence[str], seconds: float | None = None, which: int = 0
) -> Stopped | None:
  """Runs the training command.

  Args:
    seconds: after which process `which` gets the signal; None: none does
  Returns:
    how it ended then; None: it had finished before
  Raises:
    ResumeError: it failed
  """
  count, command = _PROCESSES.value, ["experiments.train", *args]
  if count > 1:
    command = ["experiments.launch", f"--processes={count}", "--", *command]
  with subprocess.Popen(
    [sys.executable, "-m", *command],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      try:
        _, stderr = process.communicate(timeout=seconds)
      except subprocess.TimeoutExpired:
        if pids := processes_of(process):
          return stop(process, pids[which])
        _, stderr = process.communicate()
    except BaseException:
      process.terminate()
      raise
  if process.returncode:
    raise ResumeError(f"a run ended with status {process.returncode}: {last_words(stderr)}")
  return None


def last_words(stderr: str) -> str:
  """The error of a process that failed, without the stacks that follow an abort."""
  fault = re.search(r"^(error|F\d{4} |Fatal|Traceback)", stderr, re.MULTILINE)
  return stderr[fault.start() :][:1500] if fault else stderr[-500:]


def processes_of(run: subprocess.Popen) -> list[int]:
  """The ids of a run's processes, once all have started; none if it has finished."""
  if _PROCESSES.value == 1:
    return [run.pid]
  children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
  while run.poll() is None:
    pids = [int(pid) for pid in children.read_text().split()]
    if len(pids) == _PROCESSES.value:
      return pids
    time.sleep(0.01)
  return []


def stop(run: subprocess.Popen, pid: int) -> Stopped:
  """Sends the signal to one process of a run, and waits for the end of all.

  Raises:
    ResumeError: they do not end in time, or do not print one line on the cause
  """
  limit_s, began = _LIMITS_S[_SIGNAL.value], time.perf_counter()
  os.kill(pid, signal.Signals[_SIGNAL.value])
  try:
    _, stderr = run.communicate(timeout=limit_s)
  except subprocess.TimeoutExpired as e:
    raise ResumeError(f"{limit_s} s after {_SIGNAL.value} a run still runs") from e
  seconds = time.perf_counter() - began
  lines = [x for x in stderr.splitlines() if x.startswith("error") or "stopped by" in x]
  if _PROCESSES.value > 1 and len(lines) != 1:
    raise ResumeError(f"a job ended with {len(lines)} lines, not 1: {stderr[-500:]}")
  return Stopped(seconds, lines)


def main(config: config_lib.RunConfig):
  logs.start()
  if not config.drafter or not config.spot.train:
    raise ResumeError("no drafter trains: set --config.drafter and --config.spot.train")
  if not all(arg.startswith("-") for arg in sys.argv[1:]):
    raise ResumeError("flags are given as --name=value here")
  folder = pathlib.Path(_WORKDIR.value or tempfile.mkdtemp()).absolute()
  if folder.exists() and any(folder.iterdir()):
    raise ResumeError(
      f"{folder} is not empty: a run that has finished there could only be killed while "
      "it starts; take another --workdir"
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
  found |= {"longest_end_s": 0.0, "lines": collections.Counter()}
  while found["kills"] < _KILLS.value:
    workdir, kills = folder / f"killed_{found['runs']}", 0
    args = [*given, f"--workdir={workdir}", f"--schedule={first / 'rollouts.jsonl'}"]
    while kills < min(_PER_RUN.value, _KILLS.value - found["kills"]):
      began = time.perf_counter()
      stopped = train(args, dice.uniform(0, whole_s), dice.randrange(_PROCESSES.value))
      if stopped is None:
        found["finished_before_the_kill"] += 1
        if not kills:  # a whole run, whose programs were compiled before
          whole_s = min(whole_s, time.perf_counter() - began)
        break
      kills += 1
      found["longest_end_s"] = max(found["longest_end_s"], stopped.seconds)
      found["lines"].update(stopped.lines)
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
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, config=read)
