"""Counts kernels in the program of a decoding step, and calls of the driver in a trace.

The text of a program has the kernels before XLA combines some of them in graphs. A trace
has the calls of the driver.
"""

import collections
from collections.abc import Callable, Iterable
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import jax

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ONE = re.compile(r"(?:body|condition|to_apply|\w+_computation)=%?([\w.\-]+)")
_MANY = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_ENTERED = ("while", "conditional", "call")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")


def of_text(text: str) -> dict[str, int]:
  """Counts one iteration of the largest loop of a compiled program.

  Returns:
    kernels: instructions that compute, those of inner loops and branches once
    triton: calls of Triton kernels among them; each splits a CUDA graph
    host_reads: loops and branches, itself included, whose condition the host may read; an
      upper bound, as XLA keeps some of these on the device
  """
  bodies, body = collections.defaultdict(list), None
  for line in text.splitlines():
    line = re.sub(r"/\*.*?\*/", "", line)
    if head := _COMPUTATION.match(line):
      body = bodies[head[1]]
    elif body is not None and (found := _INSTRUCTION.match(line)):
      body.append((found[1], found[2]))
  loops = [
    _count(bodies, re.search(r"body=%?([\w.\-]+)", rest)[1])
    for body in list(bodies.values())
    for opcode, rest in body
    if opcode == "while"
  ]
  largest = max(loops, key=lambda c: c["kernels"], default=collections.Counter())
  return {name: largest[name] for name in ("kernels", "triton", "host_reads")}


def _count(bodies, name: str) -> collections.Counter:
  """The counts of a loop's body, with the computations that it calls."""
  total, todo, seen = collections.Counter(host_reads=1), [name], set()
  while todo:
    name = todo.pop()
    if name in seen:
      continue
    seen.add(name)
    for opcode, rest in bodies[name]:
      if opcode in _ENTERED:
        known = opcode == "call" or "known_trip_count" in rest
        total["host_reads"] += not known
        listed = ",".join(_MANY.findall(rest))
        todo += _ONE.findall(rest) + re.findall(r"[\w.\-]+", listed)
      elif opcode not in _FREE:
        total["kernels"] += 1
        total["triton"] += "triton_kernel_call" in rest
  return total


class Trace(NamedTuple):
  """Counts of a profile."""

  calls: dict[str, int]  # of CUDA's driver, by name, such as cuGraphLaunch; {} elsewhere
  device_s: dict[str, float]  # of the devices' streams, by kernel


def of_trace(run: Callable[[], object]) -> Trace:
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    files = map(str, pathlib.Path(folder).rglob("*.xplane.pb"))
    planes = [p for f in files for p in jax.profiler.ProfileData.from_file(f).planes]
    return of_planes(planes)


def of_planes(planes: Iterable[Any]) -> Trace:
  """Counts the events of a profile, `jax.profiler.ProfileData.planes`.

  Of a GPU only the lines of streams count; others repeat their events.
  """
  calls, device_s = collections.Counter(), collections.Counter()
  for plane in planes:
    for line in plane.lines:
      if not plane.name.startswith("/device:"):
        calls.update(event.name for event in line.events)
      elif line.name.startswith("Stream"):
        for event in line.events:
          device_s[event.name] += 1e-9 * event.duration_ns
  of_driver = {n: count for n, count in calls.items() if re.match(r"cu(da)?[A-Z]", n)}
  return Trace(of_driver, dict(device_s))
