"""Compiles a run's large programs for TPUs and GPUs of other machines, and reports.

    make aot    # or, where that has installed .venv-aot:
    .venv-aot/bin/python -m dev.aot [--targets=h200,v6e] [--programs=plain,chain]

Compiles chunks (plain, verifying a chain, a tree, fused with training), prefill, fill and
the learner's update of Qwen2.5-7B's widths, with and without kernels, each in a separate
process. It counts cache-sized copies, collectives, kernels per layer, launches, bytes moved
per step and memory per device, and writes MODEL.json and MODEL.md. It fails if a step of
one request writes an array as large as weights, or if a plain step on one GPU, by kernels
for few rows, has more than one CUDA graph, 6 kernels per layer and 10 others, or moves more
than 1.1 times weights and KV.
Compiled programs are kept in --workdir until the code changes, or --again is given.
"""

import datetime
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl import flags

from dev import aot_machines
from dev import aot_programs
from dev import aot_report
from experiments import launch

_TARGETS = flags.DEFINE_list("targets", list(aot_machines.TARGETS), "Machines.")
_PROGRAMS = flags.DEFINE_list("programs", list(aot_programs.PROGRAMS), "Programs.")
_MODEL = flags.DEFINE_enum("model", "7b", list(aot_programs.MODELS), "Widths.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the target.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Compile existing programs, too.")
_REPORT = flags.DEFINE_bool("report", False, "Compile nothing; report --workdir.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/aot", "Compiled programs, as text.")
_OUTPUT = flags.DEFINE_string("output", "experiments/results/aot", "The report.")

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def source() -> str:
  """A hash of the code that is compiled."""
  files = sorted((_ROOT / "tlt_jax").rglob("*.py"))
  own = ("aot_machines.py", "aot_programs.py")
  files += (_ROOT / "dev" / name for name in own)
  whole = hashlib.sha256()
  for file in files:
    whole.update(file.read_bytes())
  return whole.hexdigest()[:12]


def compile_case(model: str, case: tuple[str, str, str], layers: int, folder) -> None:
  """Compiles in a separate process; an error goes to error.txt."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  with tempfile.TemporaryDirectory() as dump:
    platform = aot_machines.TARGETS[case[0]].platform
    env = os.environ | aot_machines.environment(platform, pathlib.Path(dump))
    command = [sys.executable, "-m", "dev.aot_programs"]
    command += [model, *case, str(layers), str(folder)]
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True)
    thunks = sorted(
      pathlib.Path(dump).glob("*thunk_sequence_after_thunk_passes.txt"),
      key=lambda file: file.stat().st_size,
    )
    if thunks:
      shutil.copy(thunks[-1], folder / "thunks.txt")
  if done.returncode:
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    (folder / "error.txt").write_text(lines[-1][:300] + "\n")
    return
  record = json.loads((folder / "compiled.json").read_text())
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  record |= {"source": source(), "date": today, "layers": layers}
  (folder / "compiled.json").write_text(json.dumps(record))


def main():
  workdir, output = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value)
  chosen = aot_report.cases(_TARGETS.value, _PROGRAMS.value)
  model, layers, now = _MODEL.value, _LAYERS.value, source()
  platforms = {aot_machines.TARGETS[target].platform for target, _, _ in chosen}
  missing = list(filter(None, map(aot_machines.missing, sorted(platforms))))
  if missing and not _REPORT.value:
    raise ValueError(missing[0])
  report = []
  for case in chosen:
    folder = (workdir / "-".join([model, *case, str(layers)])).resolve()
    file = folder / "compiled.json"
    known = json.loads(file.read_text()).get("source") if file.exists() else None
    if not _REPORT.value and (_AGAIN.value or known != now):
      print(f"{' '.join(case)}: compiling", flush=True)
      compile_case(model, case, layers, folder)
    if file.exists():
      report.append((case, aot_report.counted(folder, model, case, layers)))
    elif (folder / "error.txt").exists():
      report.append((case, {"error": (folder / "error.txt").read_text().strip()}))
  rows = aot_report.table(aot_report.row(*line) for line in report)
  names = ("target", "program", "kernels")
  programs = [dict(zip(names, case, strict=True)) | found for case, found in report]
  output.mkdir(parents=True, exist_ok=True)
  summary = {"programs": programs}
  (output / f"{model}.json").write_text(json.dumps(summary, indent=1) + "\n")
  (output / f"{model}.md").write_text(rows + "\n")
  print(rows)
  failures = [line for case in report for line in aot_report.broken(*case)]
  for line in failures:
    print(f"failed: {line}")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  launch.run(main)
