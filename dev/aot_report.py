"""Statistics of compiled programs, and the table of `make aot`."""

import collections
from collections.abc import Iterable
import gzip
import json
import pathlib
import re

from dev import aot_machines
from dev import aot_programs
from dev import hlo_counts

_FILL = 0.5  # share of the cache that is filled
_LEAST = 2**20  # elements; no donated array but caches and features is as large


def cases(targets: Iterable[str], programs: Iterable[str]) -> list[tuple[str, str, str]]:
  """(target, program, kernels) of each case; raises ValueError for an unknown name."""
  for name, known in ((targets, aot_machines.TARGETS), (programs, aot_programs.PROGRAMS)):
    if unknown := [x for x in name if x not in known]:
      raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
  return [
    (target, program, kernels)
    for target in targets
    for program in programs
    if aot_programs.runs(target, program)
    for kernels in aot_programs.kernels_of(target, program)
  ]


def counted(folder: pathlib.Path, name: str, program: str, layers: int) -> dict:
  """Statistics of a compiled program, from its folder.

  Args:
    name: of `aot_programs.MODELS`
    program: of `aot_programs.PROGRAMS`
    layers: of the target, as compiled
  """
  found = json.loads((folder / "compiled.json").read_text())
  text = gzip.open(folder / "text.hlo.gz", "rt").read()
  caches = hlo_counts.donated(text, _LEAST)
  if program == "update":  # gradients are as large as parameters
    caches = set()
  found["copies"] = hlo_counts.copies_of(text, caches)
  found["collectives"] = _collectives(text)
  if program in aot_programs.CHUNKS:
    if program == "one":  # activations of more rows are as large
      model = aot_programs.MODELS[name]
      weights = model.width * model.num_kv_heads * model.head_dim  # of the smallest matrix
      large = hlo_counts.large_copies(text, weights)
      # A kernel's scratch may be as large, but is no copy.
      found["as_large_as_weights"] = [x for x in large if not x.endswith("custom-call")]
    step = hlo_counts.Counter(text, caches, _FILL).step()
    found["step"] = _per_step(step, layers)
    drafting = max(step.inner, key=lambda s: s.num_bytes, default=None)
    if program != "plain" and drafting is not None:
      found["draft_step"] = _per_step(drafting, layers)
  if (folder / "thunks.txt").exists():
    found["launches"] = launches((folder / "thunks.txt").read_text())
  return found


def _per_step(step: hlo_counts.Step, layers: int) -> dict:
  """Kernels and bytes of a step, also with all layers of the target."""
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
  """By kind: their number in loops, and the elements of the largest."""
  found = {}
  for i in hlo_counts.collectives(text):
    kind = found.setdefault(i.opcode.removesuffix("-start"), {"count": 0, "largest": 0})
    kind["count"] += 1
    kind["largest"] = max(kind["largest"], i.num_elements)
  return found


def launches(thunks: str) -> dict[str, int]:
  """Launches of a GPU's host in an iteration of the longest loop, by kind.

  A command buffer (a CUDA graph) is one launch, and so are an inner loop and a branch.

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


# Limits of a step on one GPU: CUDA graphs, and branches that the host decides.
_LAUNCHES = {"one": (2, 1), "plain": (2, 1), "chain": (4, 2)}
# Of a layer, with kernels for few rows: five, and what two layers share.
_KERNELS = 7


def broken(case: tuple[str, str, str], found: dict) -> list[str]:
  """The errors of a program, each with the name of the case."""
  target, program, _ = case
  machine, errors = aot_machines.TARGETS[target], []
  if "error" in found:
    errors.append(found["error"])
  elif machine.platform == "cuda" and machine.devices == 1 and program in _LAUNCHES:
    kinds = "CommandBuffer", "Conditional", "CustomCall"
    counts = [found["launches"].get(kind, 0) for kind in kinds]
    if any(n > most for n, most in zip(counts, (*_LAUNCHES[program], 0), strict=True)):
      errors.append(f"launches {dict(zip(kinds, counts, strict=True))}")
    layer = found.get("step", {}).get("kernels_per_layer", 0)
    if case[2] == "triton" and layer > _KERNELS:
      errors.append(f"{layer:g} kernels per layer")
  if found.get("as_large_as_weights"):
    errors.append(f"writes arrays as large as weights: {found['as_large_as_weights'][0]}")
  return [f"{' '.join(case)}: {line}" for line in errors]


_HEADER = (
  "target",
  "program",
  "kernels",
  "cache-sized copies",
  "as large as weights",
  "all-gathers (largest)",
  "all-reduces (largest)",
  "kernels per layer",
  "other kernels",
  "launches",
  "GB per step",
  "GB per drafting step",
  "temp GiB",
  "arguments GiB",
)


def row(case: tuple[str, str, str], found: dict) -> list[str]:
  """A line of the table."""
  if "error" in found:
    return [*case, found["error"], *[""] * (len(_HEADER) - 4)]
  step, draft = found.get("step"), found.get("draft_step")

  def collective(kind):
    known = found["collectives"].get(kind)
    return f"{known['count']} ({known['largest']:,})" if known else "0"

  def kernels(name):
    return f"{step[name]:g}" if step else ""

  def giga(x):
    return f"{x['bytes_all_layers'] / 1e9:.2f}" if x else ""

  def gibi(x):
    return f"{x / 2**30:.2f}"

  by_kind = ", ".join(f"{n} {kind}" for kind, n in found.get("launches", {}).items())
  return [
    *case,
    str(len(found["copies"])) if case[1] != "update" else "",
    str(len(found["as_large_as_weights"])) if case[1] == "one" else "",
    collective("all-gather"),
    collective("all-reduce"),
    kernels("kernels_per_layer"),
    kernels("other_kernels"),
    by_kind,
    giga(step),
    giga(draft),
    gibi(found["memory"]["temp"]),
    gibi(found["all_layers_argument"]),
  ]


def table(rows: Iterable[list[str]]) -> str:
  """Lines of Markdown."""
  lines = [_HEADER, ["---"] * len(_HEADER), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
