"""Compiles a run's large programs for TPUs and GPUs that are not there, and reports.

    make aot    # or, where that has installed .venv-aot:
    .venv-aot/bin/python -m experiments.aot [--targets=h200,v6e] [--programs=plain,chain]

Compiles chunks (plain, verifying a chain, a tree, fused with training), prefill, fill and
the learner's update of Qwen2.5-7B's widths, each with kernels and without, in a process
of its own. It counts cache-sized copies, collectives, kernels per layer, launches, bytes
moved per step and memory per device, and writes MODEL.json and MODEL.md. What is
compiled already stays, in --workdir, until the code changes or with --again.
"""

import collections
from collections.abc import Iterable
import datetime
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from absl import flags

from experiments import aot_programs
from experiments import hlo_counts
from experiments import launch
from experiments import machine_code

_TARGETS = flags.DEFINE_list("targets", list(aot_programs.TARGETS), "Machines.")
_PROGRAMS = flags.DEFINE_list("programs", list(aot_programs.PROGRAMS), "Programs.")
_MODEL = flags.DEFINE_enum("model", "7b", list(aot_programs.MODELS), "Widths.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the target.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Compile what is there already, too.")
_REPORT = flags.DEFINE_bool("report", False, "Compile nothing; report what is there.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/aot", "Compiled programs, as text.")
_OUTPUT = flags.DEFINE_string("output", "experiments/results/aot", "The report.")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FILL = 0.5  # of the cache's slots that hold something
_LEAST = 2**20  # elements; no donated array but caches and features is as large


def source() -> str:
  """A hash of the code that is compiled."""
  files = sorted((_ROOT / "tlt_jax").rglob("*.py"))
  files.append(_ROOT / "experiments" / "aot_programs.py")
  whole = hashlib.sha256()
  for file in files:
    whole.update(file.read_bytes())
  return whole.hexdigest()[:12]


def cases(targets: Iterable[str], programs: Iterable[str]) -> list[tuple[str, str, str]]:
  """(target, program, kernels) of what is compiled.

  Raises:
    ValueError: there is no such target or program
  """
  for name, known in ((targets, aot_programs.TARGETS), (programs, aot_programs.PROGRAMS)):
    if unknown := [x for x in name if x not in known]:
      raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
  return [
    (target, program, kernels)
    for target in targets
    for program in programs
    if aot_programs.runs(target, program)
    for kernels in aot_programs.kernels_of(target, program)
  ]


def compile_case(model: str, case: tuple[str, str, str], layers: int, folder) -> None:
  """Compiles in a process of its own; what went wrong is in error.txt then."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  with tempfile.TemporaryDirectory() as dump:
    env = os.environ | aot_programs.environment(case[0], pathlib.Path(dump))
    command = [sys.executable, "-m", "experiments.aot_programs"]
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
  told = json.loads((folder / "compiled.json").read_text())
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  told |= {"source": source(), "date": today, "layers": layers}
  (folder / "compiled.json").write_text(json.dumps(told))


def counted(folder: pathlib.Path, program: str, layers: int) -> dict:
  """The figures of a compiled program."""
  told = json.loads((folder / "compiled.json").read_text())
  text = gzip.open(folder / "text.hlo.gz", "rt").read()
  caches = hlo_counts.donated(text, _LEAST)
  if program == "update":  # gradients are as large as parameters
    caches = set()
  found = told | {
    "copies": hlo_counts.copies_of(text, caches),
    "collectives": _collectives(text),
  }
  if program in aot_programs.CHUNKS:
    step = hlo_counts.Counter(text, caches, _FILL).step()
    found["step"] = _per_step(step, layers)
    drafting = max(step.inner, key=lambda s: s.num_bytes, default=None)
    if program != "plain" and drafting is not None:
      found["draft_step"] = _per_step(drafting, layers)
  if (folder / "thunks.txt").exists():
    found["launches"] = launches((folder / "thunks.txt").read_text())
  return found


def _per_step(step: hlo_counts.Step, layers: int) -> dict:
  """A step's figures, and its bytes with all layers of the target."""
  layer = step.layer_bytes / layers
  rest = step.num_bytes - step.layer_bytes
  return {
    "kernels_per_layer": step.layer_kernels / layers,
    "other_kernels": step.kernels - step.layer_kernels,
    "bytes": round(step.num_bytes),
    "bytes_per_layer": round(layer),
    "bytes_all_layers": round(rest + layer * aot_programs.MODEL.num_layers),
  }


def _collectives(text: str) -> dict[str, dict[str, int]]:
  """By kind: how many there are in loops, and the elements of the largest."""
  found = {}
  for i in hlo_counts.collectives(text):
    kind = found.setdefault(i.opcode.removesuffix("-start"), {"count": 0, "largest": 0})
    kind["count"] += 1
    kind["largest"] = max(kind["largest"], i.num_elements)
  return found


def launches(thunks: str) -> dict[str, int]:
  """What a GPU's host launches in an iteration of the longest loop, by kind.

  A command buffer is one launch: a CUDA graph. What is inside another loop or a branch
  counts with it.

  Args:
    thunks: the file "thunk_sequence_after_thunk_passes" of XLA's dump
  """
  loops, found, body = [], None, None
  for line in thunks.splitlines():
    indent = len(line) - len(line.lstrip())
    kind = re.match(r"\d+: (k\w+)", line.strip())
    if kind and indent == 0:
      found = None
      if kind[1] == "kWhile":
        found = collections.Counter()
        loops.append((found, [0]))
      body = False
    elif line.strip() == "body:" and indent == 2:
      body = True
    elif found is not None and body:
      loops[-1][1][0] += 1
      if kind and indent == 4:
        found[kind[1].removeprefix("k")] += 1
  return dict(max(loops, key=lambda loop: loop[1][0])[0]) if loops else {}


def instructions_per_logit() -> dict[str, float]:
  """Of `verify_sample`'s Triton kernel by GPU, where no token of a tile may win."""
  from tlt_jax.pallas_kernels.verify_sample import triton

  names = ("logits", "temperature", "cut", "best", "at", "top", "total", "kept")
  types = {f"{name}_ptr": "*fp32" for name in names}
  types |= dict.fromkeys(("key_ptr", "offset_ptr", "token_ptr"), "*i32")
  rows = aot_programs.ROWS * aot_programs.NODES
  sizes = dict(R=rows, V=aot_programs.MODEL.vocab_size)
  constants = dict(**sizes, TILE=triton.TILE, TILES=triton.TILES, **triton.CONSTANTS)
  how = (types, constants, triton.NUM_WARPS, triton.NUM_STAGES)
  per_thread = triton.TILE / (32 * triton.NUM_WARPS)
  count = lambda capability: machine_code.shortest_loop(
    machine_code.compiled(triton.verify_sample_kernel, capability, *how).machine_code
  )
  return {f"sm_{c}": round(count(c) / per_thread, 1) for c in (80, 90)}


_HEADER = (
  *("target", "program", "kernels", "cache-sized copies", "all-gathers (largest)"),
  *("all-reduces (largest)", "kernels per layer", "other kernels", "launches"),
  *("GB per step", "GB per drafting step", "temp GiB", "arguments GiB"),
)


def row(case: tuple[str, str, str], found: dict) -> list[str]:
  """A line of the table."""
  if "error" in found:
    return [*case, found["error"], *[""] * (len(_HEADER) - 4)]
  step, draft = found.get("step"), found.get("draft_step")

  def collective(kind):
    known = found["collectives"].get(kind)
    return f"{known['count']} ({known['largest']:,})" if known else "0"

  giga = lambda x: f"{x['bytes_all_layers'] / 1e9:.2f}" if x else ""
  kernels = lambda name: f"{step[name]:g}" if step else ""
  by_kind = ", ".join(f"{n} {kind}" for kind, n in found.get("launches", {}).items())
  gibi = lambda x: f"{x / 2**30:.2f}"
  return [
    *case,
    str(len(found["copies"])) if case[1] != "update" else "",
    *(collective("all-gather"), collective("all-reduce")),
    *(kernels("kernels_per_layer"), kernels("other_kernels"), by_kind),
    *(giga(step), giga(draft)),
    *(gibi(found["memory"]["temp"]), gibi(found["all_layers_argument"])),
  ]


def table(rows: Iterable[list[str]]) -> str:
  """Lines of Markdown."""
  lines = [_HEADER, ["---"] * len(_HEADER), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
  workdir, output = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value)
  chosen, layers, now = cases(_TARGETS.value, _PROGRAMS.value), _LAYERS.value, source()
  model = _MODEL.value
  platforms = {aot_programs.TARGETS[target].platform for target, _, _ in chosen}
  lacking = list(filter(None, map(aot_programs.missing, sorted(platforms))))
  if lacking and not _REPORT.value:
    raise ValueError(lacking[0])
  report = []
  for case in chosen:
    folder = (workdir / "-".join([model, *case, str(layers)])).resolve()
    file = folder / "compiled.json"
    known = json.loads(file.read_text()).get("source") if file.exists() else None
    if not _REPORT.value and (_AGAIN.value or known != now):
      print(f"{' '.join(case)}: compiling", flush=True)
      compile_case(model, case, layers, folder)
    if file.exists():
      report.append((case, counted(folder, case[1], layers)))
    elif (folder / "error.txt").exists():
      report.append((case, {"error": (folder / "error.txt").read_text().strip()}))
  rows = table(row(*line) for line in report)
  names = ("target", "program", "kernels")
  programs = [dict(zip(names, case, strict=True)) | found for case, found in report]
  per_logit = instructions_per_logit()
  output.mkdir(parents=True, exist_ok=True)
  told = {"instructions_per_logit": per_logit, "programs": programs}
  (output / f"{model}.json").write_text(json.dumps(told, indent=1) + "\n")
  sass = ", ".join(f"{n} on {name}" for name, n in per_logit.items())
  rows += f"\n\nInstructions per logit in `verify_sample` (Triton): {sass}."
  (output / f"{model}.md").write_text(rows + "\n")
  print(rows)


if __name__ == "__main__":
  launch.run(main)
