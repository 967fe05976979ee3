"""A plan of memory: the arrays of each phase, the free memory, and a remedy."""

from collections.abc import Mapping
import dataclasses
import re
from typing import NamedTuple

from experiments import tables
from tlt_jax import memory

SMALLER_POLICY = "policy"  # the option of parts that only a smaller policy makes smaller
# Share of a device's memory; the rest is the runtime's. Of a GPU's memory JAX uses at most
# XLA_PYTHON_CLIENT_MEM_FRACTION.
_USABLE = 0.9


class Machine(NamedTuple):
  """Devices of another machine, to plan for."""

  devices: int
  room: memory.Room  # of each

  @classmethod
  def parse(cls, text: str) -> "Machine | None":
    """Parses "64x80", 64 devices of 80 GB with 90% free; "" is None; else ValueError."""
    if not text:
      return None
    match = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)", text)
    if match is None:
      raise ValueError(f"a machine reads DEVICESxGIGABYTES, such as 64x80, not {text!r}")
    total = int(float(match[2]) * 1e9)
    return cls(int(match[1]), memory.Room(int(_USABLE * total), total))


class Part(NamedTuple):
  """Arrays that belong together."""

  name: str
  size: int  # bytes, of all devices that share memory, or of the fullest
  option: str  # the entry of the config that makes it smaller


@dataclasses.dataclass(frozen=True)
class Plan:
  """The parts of each phase, and the memory."""

  phases: Mapping[str, tuple[Part, ...]]
  room: memory.Room
  where: str  # whose memory it is

  def needed(self, phase: str) -> int:
    """Bytes of a phase."""
    return sum(part.size for part in self.phases[phase])

  @property
  def fullest(self) -> str:
    return max(self.phases, key=self.needed)


def remedy(parts: tuple[Part, ...], free: int) -> str:
  """A message: what to change so that a phase fits."""
  by_option: dict[str, int] = {}
  for part in parts:
    by_option[part.option] = by_option.get(part.option, 0) + part.size
  fixed = by_option.pop(SMALLER_POLICY, 0)
  if fixed > free or not by_option:
    return (
      f"{memory.text(fixed)} of it follow from the policy's size: take a smaller policy, "
      "or a machine with more memory"
    )
  option = max(by_option, key=by_option.get)
  return (
    f"what helps most is less of {option}, which takes {memory.text(by_option[option])}"
  )


def _gib(size: int | None) -> str:
  return "" if size is None else f"{size / 2**30:.2f}"


def show(plan: Plan) -> None:
  """Prints the GiB of each part and phase, and those left for programs."""
  sizes = {phase: {p.name: p.size for p in ps} for phase, ps in plan.phases.items()}
  names = dict.fromkeys(name for parts in sizes.values() for name in parts)
  rows = [[name, *(_gib(parts.get(name)) for parts in sizes.values())] for name in names]
  needed = [plan.needed(phase) for phase in plan.phases]
  rows.append(["all arrays", *map(_gib, needed)])
  rows.append(["free", *[_gib(plan.room.free)] * len(needed)])
  rows.append(["left for programs", *(_gib(plan.room.free - size) for size in needed)])
  tables.show(f"GiB of {plan.where}", ["", *plan.phases], rows)
