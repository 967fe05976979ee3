"""Runs the tests and the benchmarks for a GPU or a TPU.

    make gpu                     (python -m benchmarks.accelerator --kind=gpu)
    make gpu ARGS="--minutes=12"
    make gpu ARGS=--set=one_gpu
    make tpu ARGS="--parts=tests,attention --again"

The most important parts come first; all end after `--minutes`. Each part is a separate
process with a time limit, so that the others run if one fails. Results go to `--output`, in
a folder per device and commit: the last line and the machine as `PART.json`, the tables as
`PART.txt`. The same command resumes: parts that succeeded run again only with `--again`. At
the end all tables and all errors are printed; with errors the exit status is 1. It takes
less than 50 minutes on one GPU. `--dry_run` runs every part in tiny sizes on the CPU.

`--set=one_gpu` is another set of parts, of 12 minutes: an RL run of `configs/one_gpu.py`,
which a second call continues from its checkpoint, and what is measured of such a run. It
needs `runs/smollm2_bfloat16`. `one_gpu.sh` installs and does all that without make and
without a network.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

from absl import flags

from benchmarks import accelerator_parts as parts_lib
from benchmarks import machine
from experiments import launch

RESULTS = parts_lib.ROOT / "experiments" / "results" / "accelerator"
_DRY_MINUTES = 10.0  # of a part: a CPU interprets kernels slowly
_STOP_S = 20.0  # before a part's end it is asked to stop, so that it can save
_NAMES = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the parts: its folders, and the environment of its processes."""

  folder: pathlib.Path
  logs: pathlib.Path
  about: Mapping[str, Any]  # of every result: date, commit, machine
  env: Mapping[str, str]
  dry_run: bool
  ends: float = math.inf  # of all parts, by the monotonic clock

  def path(self, part: parts_lib.Part, suffix: str) -> pathlib.Path:
    return self.folder / f"{part.name}{suffix}"

  @property
  def left(self) -> float:
    """Minutes until all parts end."""
    return (self.ends - time.monotonic()) / 60

  def minutes(self, part: parts_lib.Part) -> float:
    return min(_DRY_MINUTES if self.dry_run else part.minutes, self.left)

  def is_done(self, part: parts_lib.Part) -> bool:
    """Whether a part succeeded in an earlier call."""
    path = self.path(part, ".json")
    if not path.exists():
      return False
    record = json.loads(path.read_text())
    return "result" in record and "error" not in record

  def do(self, part: parts_lib.Part) -> dict:
    """Runs a part, and writes its record."""
    began = time.monotonic()
    asked = part.dry if self.dry_run else part.commands
    folder = str(self.folder)
    commands = [[x.replace(parts_lib.FOLDER, folder) for x in words] for words in asked]
    record = {"part": part.name, **self.about, "date": machine.today()}
    record["commands"] = [" ".join(["python", "-m", *command]) for command in commands]
    if missing := self._missing(part):
      record["skipped"] = missing
    else:
      record |= self._run(part, commands)
    record["seconds"] = round(time.monotonic() - began, 1)
    partial = self.path(part, ".partial")  # an interrupt leaves no partial record
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.rename(self.path(part, ".json"))
    return record

  def _missing(self, part: parts_lib.Part) -> str:
    """The unmet requirement of a part; "" if there is none."""
    if self.dry_run:
      return ""
    if part.devices > self.about["machine"]["devices"]:
      return f"it needs {part.devices} devices"
    needed = parts_lib.ROOT / part.needs.replace(parts_lib.FOLDER, str(self.folder))
    if part.needs and not needed.exists():
      return f"it needs {part.needs}, which is not there"
    return ""

  def _run(self, part: parts_lib.Part, commands: Sequence[Sequence[str]]) -> dict:
    """Runs the commands in order; returns the last one's result, or an error."""
    minutes, env = self.minutes(part), {**self.env, **part.env}
    ends = time.monotonic() + 60 * minutes
    for command in commands:
      out, log = self.path(part, ".txt"), self.logs / f"{part.name}.log"
      with out.open("w") as stdout, log.open("w") as stderr:
        left = ends - time.monotonic()
        status = run_process(command, env, stdout, stderr, left)
      *tables, last = out.read_text().splitlines() or [""]
      result = read_result(last)
      if result is not None:
        is_json = last.startswith("{")
        out.write_text("\n".join(tables if is_json else [*tables, last]) + "\n")
      if status != 0:
        error = _error(status, minutes, log, [*tables, last])
        return {"error": error} | ({"result": result} if result is not None else {})
    if result is None:
      return {"error": f"it printed no result, see {log}"}
    return {"result": result}


def run_process(
  command: Sequence[str], env: Mapping[str, str], stdout, stderr, seconds: float
) -> int | None:
  """Runs `python -m command`; returns the exit status, or None after a timeout.

  Shortly before, it is asked to stop (SIGTERM). All processes that it started end with it.
  """
  process = subprocess.Popen(
    [sys.executable, "-m", *command],
    cwd=parts_lib.ROOT,
    env=env,
    stdout=stdout,
    stderr=stderr,
    start_new_session=True,
  )
  stop_s = min(_STOP_S, seconds / 10)
  try:
    return process.wait(seconds - stop_s)
  except subprocess.TimeoutExpired:
    return None
  finally:
    if process.poll() is None:  # also after an interrupt
      os.killpg(process.pid, signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(stop_s)
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def read_result(line: str) -> dict | None:
  """The result in a command's last line: JSON, or pytest's counts."""
  try:
    found = json.loads(line)
    return found if isinstance(found, dict) else None
  except json.JSONDecodeError:
    counts = re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)", line)
    return {name: int(count) for count, name in counts} or None


def _error(
  status: int | None, minutes: float, log: pathlib.Path, printed: Sequence[str]
) -> str:
  """Why a command failed, in one line, and the last that it logged."""
  logged = [line for line in log.read_text().splitlines() if line.strip()][-1:]
  last = f"; see {log}; {''.join(logged)[:600]}"
  if status is None:
    return f"not done within {minutes:.3g} minutes{last}"
  if status < 0:
    return f"ended by signal {-status} ({signal.Signals(-status).name}){last}"
  named = [line for line in printed if line.startswith(("FAILED ", "failed: "))]
  return f"exit status {status}: {'; '.join(named or logged)[:600]}"


def probe(env: Mapping[str, str]) -> dict:
  """The machine as jax sees it, from another process, which frees the device's memory."""
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.machine"],
    cwd=parts_lib.ROOT,
    env={**env, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    capture_output=True,
    text=True,
  )
  lines = done.stdout.splitlines()
  if done.returncode or not lines:
    errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"platform": None, "error": errors[-1]}
  return json.loads(lines[-1])


def check(kind: str, found: Mapping[str, Any]) -> None:
  """Raises ValueError unless jax runs on such a device."""
  if found["platform"] == kind:
    return
  runs_on = found["platform"] or f"nothing: {found['error']}"
  missing = f"this needs {_NAMES[kind]}, and jax runs on {runs_on}"
  if kind == "gpu" and found.get("driver"):
    missing += f", though driver {found['driver']} is there: rm -rf .venv, then make again"
  raise ValueError(f"{missing}; ARGS=--dry_run tries every part on the CPU")


def folder_for(output: pathlib.Path, device: str, commit: str) -> pathlib.Path:
  """The folder of earlier results of this device and commit, or a new one."""
  name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
  for about in sorted(output.glob(f"{name}-*/about.json"), reverse=True):
    if json.loads(about.read_text())["commit"] == commit:
      return about.parent
  dated = f"{name}-{machine.today()}"
  taken = len(list(output.glob(f"{dated}*")))
  return output / (f"{dated}-{taken + 1}" if taken else dated)


def prepare(kind: str, output: pathlib.Path, dry_run: bool, minutes: float) -> Run:
  """Makes the folder, and starts the time limit; raises ValueError without the device."""
  ends = time.monotonic() + 60 * minutes
  env = dict(os.environ, PYTHONUNBUFFERED="1")
  # A part has the device alone, and measures what fits.
  env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
  if dry_run:
    env["JAX_PLATFORMS"] = "cpu"
  found = probe(env)
  if not dry_run:
    check(kind, found)
  elif found["platform"] is None:
    raise ValueError(f"jax cannot run here: {found['error']}")
  about = {"commit": machine.commit(), "machine": found}
  folder = folder_for(output, found["device"], about["commit"])
  folder.mkdir(parents=True, exist_ok=True)
  parts_lib.WORKDIR.mkdir(parents=True, exist_ok=True)
  (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
  return Run(folder.resolve(), parts_lib.WORKDIR, about, env, dry_run, ends)


def run_all(run: Run, chosen: Sequence[parts_lib.Part], again: bool) -> dict[str, dict]:
  """Runs the parts that are not done; prints the state of each, returns the records."""
  records = {}
  for part in chosen:
    if run.is_done(part) and not again:
      records[part.name] = json.loads(run.path(part, ".json").read_text())
      print(f"{part.name}: done on {records[part.name]['date']}", flush=True)
      continue
    if run.left <= 0:
      print(f"{part.name}: no time left", flush=True)
      continue
    print(f"{part.name}: at most {run.minutes(part):.3g} minutes ...", flush=True)
    record = records[part.name] = run.do(part)
    state = record.get("error") or record.get("skipped") or "done"
    print(f"{part.name}: {state}, {record['seconds']:.0f} s", flush=True)
  return records


def report(run: Run, chosen: Sequence[parts_lib.Part], records: Mapping[str, dict]) -> None:
  """Prints the tables of all parts, and the errors."""
  for part in chosen:
    tables = run.path(part, ".txt")
    if tables.exists():
      print(f"\n{part.name}\n{tables.read_text()}")
  print(f"results: {run.folder}")
  for name, record in records.items():
    if "error" in record:
      print(f"failed: {name}: {record['error']}")


def main(
  kind: str,
  chosen_set: str,
  names: Sequence[str],
  output: str,
  again: bool,
  dry_run: bool,
  minutes: float,
):
  known = {part.name: part for part in parts_lib.SETS[chosen_set](kind)}
  if unknown := set(names) - set(known):
    raise ValueError(f"no part {min(unknown)!r}; there are {', '.join(known)}")
  default = parts_lib.WORKDIR / "dry_run" if dry_run else RESULTS
  run = prepare(kind, pathlib.Path(output) if output else default, dry_run, minutes)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part as well
  chosen = [known[name] for name in known if name in (names or known)]
  records = run_all(run, chosen, again)
  report(run, chosen, records)
  sys.exit(1 if any("error" in record for record in records.values()) else 0)


if __name__ == "__main__":
  kind = flags.DEFINE_enum("kind", "gpu", list(_NAMES), "Of device.")
  chosen_set = flags.DEFINE_enum("set", "all", list(parts_lib.SETS), "Of parts.")
  names = flags.DEFINE_list("parts", [], "To run; default: all.")
  output = flags.DEFINE_string("output", "", f"Folder; default: {RESULTS}.")
  again = flags.DEFINE_bool("again", False, "Run parts that are done, too.")
  dry_run = flags.DEFINE_bool("dry_run", False, "Every part in tiny sizes, on the CPU.")
  minutes = flags.DEFINE_float(
    "minutes", math.inf, "After which no part goes on.", lower_bound=0.0
  )
  given = (kind, chosen_set, names, output, again, dry_run, minutes)
  launch.run(lambda: main(*(flag.value for flag in given)))
