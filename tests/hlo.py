"""What tests ask of a compiled program's text, beside what `dev.hlo_counts` counts."""

import math
import re

import numpy as np

from dev import hlo_counts


def unaliased(text: str, num_elements: int) -> list[str]:
  """Parameters of that size or larger whose buffer no output reuses."""
  aliased = hlo_counts.aliased_parameters(text)
  return [
    i.name
    for number, i in hlo_counts.parameters(text)
    if i.num_elements >= num_elements and number not in aliased
  ]


def device_groups(i: hlo_counts.Instruction) -> list[list[int]]:
  """Which devices talk to each other, in any of the compiler's notations.

  {{0,2},{1,3}} is a list. [2,2]<=[2,2]T(1,0) counts up, shapes, transposes, and
  regroups. mesh['a'=2,'b'=2] {'a'} counts up (or reads `device_ids`), shapes, and
  groups along the named axes.
  """

  def numbers(s):
    return [int(n) for n in re.findall(r"\d+", s or "")]


  def counted(dims, order):
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids

  iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
  if m := re.search(r"replica_groups=\[([\d,]+)\]<=" + iota, i.rest):
    shape, *ids = map(numbers, m.groups())
    return counted(*ids).reshape(shape).tolist()
  mesh = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(" + iota + r"\))? \{([^}:]*)\}"
  if m := re.search(mesh, i.rest):
    sizes = {name: int(n) for name, n in re.findall(r"('\w+')=(\d+)", m[1])}
    ids = counted(numbers(m[2]) or list(sizes.values()), numbers(m[3]))
    ids = ids.reshape(list(sizes.values()))
    named = [list(sizes).index(name) for name in m[4].split(",")]
    size = math.prod(ids.shape[axis] for axis in named)
    return np.moveaxis(ids, named, range(-len(named), 0)).reshape(-1, size).tolist()
  listed = r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}"
  if m := re.search(listed, i.rest):
    return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", m[1])]
  raise ValueError(f"unknown notation: {i.rest}")
