"""Statistics of compiled programs, and the table of `make aot`."""

import collections
from collections.abc import Iterable
import gzip
import json
import pathlib
import re

import numpy as np

from dev import aot_machines
from dev import aot_programs
from dev import hlo_counts

_FILL = 0.5  # share of the cache that is filled
_DEPTHS = (3, 5, 8)  # of the drafts that are counted
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


def counted(
  folder: pathlib.Path, name: str, case: tuple[str, str, str], layers: int
) -> dict:
  """Statistics of a compiled program, from its folder.

  Args:
    name: of `aot_programs.MODELS`
    case: target, program, kernels
    layers: of the target, as compiled
  """
  target, program, _ = case
  found = json.loads((folder / "compiled.json").read_text())
  text = gzip.open(folder / "text.hlo.gz", "rt").read()
  caches = hlo_counts.donated(text, _LEAST)
  if program == "update":  # gradients are as large as parameters
    caches = set()
  found["copies"] = hlo_counts.copies_of(text, caches)
  found["collectives"] = _collectives(text)
  if program in aot_programs.CHUNKS:
    model = aot_programs.MODELS[name]
    if program == "one":  # activations of more rows are as large
      weights = model.width * model.num_kv_heads * model.head_dim  # of the smallest matrix
      large = hlo_counts.large_copies(text, weights)
      # A kernel's scratch may be as large, but is no copy.
      found["as_large_as_weights"] = [x for x in large if not x.endswith("custom-call")]
    shards = aot_machines.TARGETS[target].model
    slots = aot_programs.rows_of(program) * aot_programs.SLOTS * _FILL
    per_slot = model.num_kv_heads * model.head_dim // shards
    shares = {size: min(slots * per_slot / size[1], 1.0) for size in caches}
    step = hlo_counts.Counter(text, shares, _FILL).step()
    kv = 2 * slots * per_slot * model.num_layers * 2  # bytes, in bfloat16
    found["step"] = _per_step(step, layers, model.num_layers)
    found["step"]["least_bytes"] = aot_programs.weight_bytes(model) // shards + round(kv)
    drafting = next((x for x in step.inner if x.scope.endswith("/draft/while")), None)
    if drafting is not None:
      found["draft_step"] = _per_step(drafting, layers, model.num_layers)
    found["drafts"] = _drafts(step, drafting)
  if (folder / "thunks.txt").exists():
    found["launches"] = launches((folder / "thunks.txt").read_text())
    found["nodes"] = nodes((folder / "thunks.txt").read_text())
  return found


def _drafts(step: hlo_counts.Step, later: hlo_counts.Step | None) -> dict[str, dict]:
  """Kernels and bytes of the drafts of a step, by depth; without loops of attention.

  Args:
    later: of each guess but the first; None: all come from one pass
  """
  if not step.draft_kernels:
    return {}
  of_loop = np.array([later.kernels, later.num_bytes] if later else [0, 0])
  found = {}
  for depth in _DEPTHS:
    kernels, moved = [step.draft_kernels, step.draft_bytes] + (depth - 1) * of_loop
    found[str(depth)] = {"kernels": int(kernels), "bytes": round(moved)}
  return found


def _per_step(step: hlo_counts.Step, layers: int, all_layers: int) -> dict:
  """Kernels and bytes of a step, also with all layers of the target."""
  layer = step.layer_bytes / layers
  rest = step.num_bytes - step.layer_bytes
  return {
    "kernels": step.kernels,
    "kernels_per_layer": step.layer_kernels / layers,
    "other_kernels": step.kernels - step.layer_kernels,
    "bytes": round(step.num_bytes),
    "bytes_per_layer": round(layer),
    "bytes_all_layers": round(rest + layer * all_layers),
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


def nodes(thunks: str) -> int:
  """Nodes of CUDA graphs in an iteration of the longest loop, its condition included.

  Kernels, memory copies and zeroings; see `launches`.
  """
  counts = [0]
  for line in thunks.splitlines():
    kind = re.match(r"( *)\d+: k(\w+)", line)
    if kind and not kind[1]:
      counts.append(0)
    elif kind and kind[2] not in ("CommandBuffer", "While", "Conditional", "Sequential"):
      counts[-1] += 1
  return max(counts)


# Limits of a step on one GPU by kernels for few rows: CUDA graphs, and branches that the
# host decides.
_LAUNCHES = {"one": (1, 0), "plain": (1, 0), "chain": (2, 0), "tree": (2, 0)}
_KERNELS = 6  # of a layer
_OTHER_KERNELS = 10  # of a plain step, with the condition of its loop
_BYTES = 1.1  # times weights and KV, of a plain step


def broken(case: tuple[str, str, str], found: dict) -> list[str]:
  """The errors of a program, each with the name of the case."""
  target, program, kernels = case
  machine, errors = aot_machines.TARGETS[target], []
  one_gpu = machine.platform == "cuda" and machine.devices == 1
  if "error" in found:
    errors.append(found["error"])
  elif one_gpu and kernels == "triton" and program in _LAUNCHES:
    kinds = "CommandBuffer", "Conditional", "CustomCall"
    counts = [found["launches"].get(kind, 0) for kind in kinds]
    if any(n > most for n, most in zip(counts, (*_LAUNCHES[program], 0), strict=True)):
      errors.append(f"launches {dict(zip(kinds, counts, strict=True))}")
    errors += _broken_step(program, found["step"], found["nodes"])
  if found.get("as_large_as_weights"):
    errors.append(f"writes arrays as large as weights: {found['as_large_as_weights'][0]}")
  return [f"{' '.join(case)}: {line}" for line in errors]


def _broken_step(program: str, step: dict, nodes: int) -> list[str]:
  errors, layer, other = [], step["kernels_per_layer"], step["other_kernels"]
  if layer > _KERNELS:
    errors.append(f"{layer:g} kernels per layer")
  if program in ("one", "plain"):
    if other > _OTHER_KERNELS:
      errors.append(f"{other} kernels outside of the layers")
    if step["bytes_all_layers"] > _BYTES * step["least_bytes"]:
      errors.append(f"moves {step['bytes_all_layers'] / 1e9:.2f} GB")
    if step["kernels"] != nodes:
      errors.append(f"{step['kernels']} kernels in the text, {nodes} nodes of graphs")
  return errors


_depths = ", ".join(map(str, _DEPTHS))
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
  "weights and KV, GB",
  "GB per drafting step",
  f"kernels of {_depths} guesses",
  f"GB of {_depths} guesses",
  "temp GiB",
  "arguments GiB",
  "lowering, compilation s",
)


def row(case: tuple[str, str, str], found: dict) -> list[str]:
  """A line of the table."""
  if "error" in found:
    return [*case, found["error"], *[""] * (len(_HEADER) - 4)]
  step, draft = found.get("step"), found.get("draft_step")
  drafts = found.get("drafts", {}).values()

  def collective(kind):
    known = found["collectives"].get(kind)
    return f"{known['count']} ({known['largest']:,})" if known else "0"

  def kernels(name):
    return f"{step[name]:g}" if step else ""

  def giga(x):
    return f"{x / 1e9:.2f}" if x else ""

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
    giga(step and step["bytes_all_layers"]),
    giga(step and step["least_bytes"]),
    giga(draft and draft["bytes_all_layers"]),
    ", ".join(str(x["kernels"]) for x in drafts),
    ", ".join(giga(x["bytes"]) for x in drafts),
    gibi(found["memory"]["temp"]),
    gibi(found["all_layers_argument"]),
    f"{found['lower_s']}, {found['compile_s']}",
  ]


def table(rows: Iterable[list[str]]) -> str:
  """Lines of Markdown."""
  lines = [_HEADER, ["---"] * len(_HEADER), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
