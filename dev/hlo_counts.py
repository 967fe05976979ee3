"""Statistics of a compiled program, from its text (HLO).

First the text as data; then copies, aliases and collectives; then the loop of a chunk:
its kernels, and the bytes that they move.
"""

import collections
from collections.abc import Iterator, Mapping
import math
import re
from typing import NamedTuple

import numpy as np

ENTRY = "ENTRY"

Size = tuple[str, int]  # kind of number, and how many


class Array(NamedTuple):
  kind: str  # "bf16"
  num_elements: int
  is_near: bool  # in another memory than the main one, such as a TPU's VMEM

  @property
  def size(self) -> Size:
    """The size, whatever the shape."""
    return self.kind, self.num_elements

  @property
  def num_bytes(self) -> int:
    """Without padding of the layout."""
    bits = re.search(r"\d+", self.kind)
    return self.num_elements * max(int(bits[0]) // 8, 1) if bits else self.num_elements


class Instruction(NamedTuple):
  """A line of a computation."""

  name: str
  type: str  # 'f32[4,2,256,16]{3,2,1,0}', or a tuple of such
  opcode: str
  root: bool
  rest: str  # operands and attributes

  @property
  def arrays(self) -> list[Array]:
    """Of the result; of an asynchronous copy or slice only the new array."""
    found = [
      Array(kind, math.prod(map(int, filter(None, shape.split(",")))), "S(" in layout)
      for kind, shape, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", self.type)
    ]
    made = {"copy-start": 0, "slice-start": 1}.get(self.opcode)
    return found if made is None else found[made : made + 1]

  @property
  def num_elements(self) -> int:
    """Of the largest array in the result."""
    return max((x.num_elements for x in self.arrays), default=0)

  @property
  def operands(self) -> list[str]:
    return re.findall(r"%([\w.\-]+)", self.rest[: self.rest.index(")")])

  @property
  def called(self) -> list[str]:
    """Names of loop bodies, branches, fusions and reducers."""
    one = r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)"
    many = r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
    listed = ",".join(re.findall(many, self.rest))
    return re.findall(one, self.rest) + re.findall(r"[\w.\-]+", listed)


def computations(text: str) -> dict[str, list[Instruction]]:
  """The instructions of each computation of an HLO module, its entry as `ENTRY`."""
  found, body = {}, None
  for line in text.splitlines():
    if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      body = found.setdefault(ENTRY if head[1] else head[2], [])
    elif body is not None and (
      m := re.match(
        r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)(\(.*)",
        re.sub(r"/\*.*?\*/", "", line),
      )
    ):
      body.append(Instruction(m[2], m[3], m[4], bool(m[1]), m[5]))
  return found


def inside_loops(module, through_fusions: bool) -> dict[str, list[Instruction]]:
  """The computations that run in a loop, at any depth.

  A fusion is one kernel: of the values inside it only the result is stored.
  """
  every = [i for body in module.values() for i in body]
  todo = [name for i in every if i.opcode == "while" for name in i.called]
  found = {}
  while todo:
    name = todo.pop()
    if name not in found:
      found[name] = module[name]
      for i in module[name]:
        if through_fusions or i.opcode in ("while", "conditional", "call"):
          todo += i.called
  return found


def writes_in_place(i: Instruction, module) -> bool:
  """Whether an instruction writes its result into an operand of the same size.

  True for a scatter or dynamic-update-slice, alone or at the root of a fusion, and for a
  kernel whose result aliases an operand.
  """
  if i.opcode == "fusion":
    return any(writes_in_place(j, module) for j in module[i.called[0]] if j.root)
  return i.opcode in ("scatter", "dynamic-update-slice") or "to_operand_aliasing" in i.rest


PASSED_ON = (
  "parameter",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "while",
  "conditional",
  "call",
  "copy-done",
  "slice-done",
)


def made(text: str, in_entry: bool = False) -> Iterator[tuple[str, Instruction]]:
  """Instructions in loops (and outside) that make arrays, with their computation's name.

  Without those that pass an array on or write into it: of the size of a cache remain only
  copies, transposes, slices of stacked layers, concatenations and gathers.
  """
  module = computations(text)
  where = inside_loops(module, through_fusions=False)
  if in_entry:
    where[ENTRY] = module[ENTRY]
  for name, body in where.items():
    for i in body:
      if i.opcode not in PASSED_ON and not writes_in_place(i, module):
        yield name, i


def large_copies(text: str, num_elements: int, in_entry: bool = False) -> list[str]:
  """Results of `made` of that size or larger."""
  return [
    f"{name}: {i.name} = {i.type} {i.opcode}"
    for name, i in made(text, in_entry)
    if i.num_elements >= num_elements
  ]


def aliased_parameters(text: str) -> set[int]:
  """The numbers of parameters whose buffers are reused for outputs."""
  header = text[: text.index("\n")]
  pairs = re.findall(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias", header)
  return {int(number) for number in pairs}


def parameters(text: str) -> Iterator[tuple[int, Instruction]]:
  """The parameters of the program, with their numbers."""
  for i in computations(text)[ENTRY]:
    if i.opcode == "parameter":
      yield int(i.rest[1 : i.rest.index(")")]), i


def donated(text: str, least: int) -> set[Size]:
  """The sizes of donated parameters of `least` elements or more."""
  aliased = aliased_parameters(text)
  sizes = {x.size for n, i in parameters(text) if n in aliased for x in i.arrays}
  return {size for size in sizes if size[1] >= least}


def copies_of(text: str, sizes: set[Size]) -> list[str]:
  """Instructions in loops that make an array of exactly one of these sizes."""
  return [
    f"{i.opcode} {i.type}" for _, i in made(text) if sizes & {x.size for x in i.arrays}
  ]


COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "all-to-all",
  "reduce-scatter",
  "collective-permute",
  "collective-broadcast",
  "ragged-all-to-all",
)


def is_collective(i: Instruction) -> bool:
  """Whether a collective begins here."""
  return i.opcode.removesuffix("-start") in COLLECTIVES


def collectives(text: str) -> list[Instruction]:
  """All collectives in loops."""
  return [
    i
    for body in inside_loops(computations(text), through_fusions=True).values()
    for i in body
    if is_collective(i)
  ]


# Without a kernel, or at no countable cost.
_NO_KERNEL = (
  *PASSED_ON,
  "constant",
  "after-all",
  "partition-id",
  "replica-id",
  "opt-barrier",
  "domain",
  "add-dependency",
  "iota",
  "broadcast",
  "slice-start",
  "copy-start",
)
# Operands of kernels that read only a row of them for each row of theirs.
BY_ROWS = {"enter": {"embedding_ptr": 1}, "qkv": {"cos_ptr": 10, "sin_ptr": 11}}


class Step(NamedTuple):
  """One iteration of a loop with its condition, or a program without loops, on one device.

  Of branches the cheapest counts: no request filters its tokens. Inner loops are separate.
  """

  kernels: int  # launches, without transfers between memories
  layer_kernels: int  # of them in layers, by the names that the layers give
  draft_kernels: int  # of them of the drafter, in front of its loop if it has one
  num_bytes: float  # read from and written to the main memory
  layer_bytes: float  # of them in layers
  draft_bytes: float  # of them of the drafter
  inner: tuple["Step", ...]  # of the loops inside
  scope: str = ""  # of the loop


class Counter:
  """Counts the kernels of a program's text, and the bytes that they move.

  A kernel is a fusion, a custom call, or a copy: what is a node of a CUDA graph. It reads
  each operand and writes its result once; only the main memory counts. If a fusion reads
  slices or rows of an operand, or writes into parts of a result, only these count.

  Of a custom call's results those without a user are scratch, which it writes and reads;
  results that alias an operand are written in part, as much as its other results are
  large, or without any what it reads. Kernels that read caches read the share of each that
  is given in `caches`, and use the share `fill` of their scratch.
  """

  def __init__(self, text: str, caches: Mapping[Size, float], fill: float):
    self._module = computations(text)
    self._caches, self._fill = caches, fill
    self._by_name = {i.name: i for body in self._module.values() for i in body}
    self._users = collections.defaultdict(list)
    for i in self._by_name.values():
      for name in i.operands:
        self._users[name].append(i)

  def step(self) -> Step:
    """The iteration of the loop with the caches; without one, the whole program."""
    for i in self._module[ENTRY]:
      if i.opcode == "while" and self._caches.keys() & {x.size for x in i.arrays}:
        return self._count_loop(i)
    return self._count(ENTRY)

  def reads(self, num_elements: int) -> dict[str, float]:
    """Bytes read of arrays of so many elements, by the computation with the kernels.

    Outside of loops (`ENTRY`), and by each iteration of any.
    """
    found = collections.Counter()
    within = inside_loops(self._module, through_fusions=False)
    for name, body in (within | {ENTRY: self._module[ENTRY]}).items():
      for i in filter(self._is_kernel, body):
        for n, operand in enumerate(i.operands):
          array = self._array(operand)
          if array is not None and array.num_elements == num_elements:
            found[name] += self._read(i, n, operand)
    return {name: size for name, size in found.items() if size}

  def _count_loop(self, i: Instruction) -> Step:
    parts = [self._count(name) for name in i.called]  # body and condition
    return Step(
      *(sum(values) for values in zip(*(part[:6] for part in parts), strict=True)),
      sum((part.inner for part in parts), ()),
      "".join(re.findall(r'op_name="([^"]*)"', i.rest)[:1]),
    )

  def _count(self, name: str) -> Step:
    total, inner = np.zeros(6), []
    for i in self._module[name]:
      if i.opcode == "while":
        inner.append(self._count_loop(i))
      elif i.opcode == "conditional":
        branches = [self._count(n) for n in i.called]
        cheapest = min(branches, key=lambda step: (step.num_bytes, step.kernels))
        total += cheapest[:6]
        inner += cheapest.inner
      elif i.opcode == "call":
        called = self._count(i.called[0])
        total += called[:6]
        inner += called.inner
      else:
        is_kernel, moved = self._is_kernel(i), self._moved(i)
        is_of = [True, self._is_in(i, r"/(layer_\d+)/"), self._is_in(i, "/(draft)/")]
        total += [is_kernel and x for x in is_of] + [moved * x for x in is_of]
    return Step(*map(int, total[:3]), *total[3:], tuple(inner))

  def _is_kernel(self, i: Instruction) -> bool:
    has_none = i.opcode in _NO_KERNEL or i.opcode.endswith("-done")
    return not has_none and "ConcatBitcast" not in i.rest

  def _is_in(self, i: Instruction, scope: str) -> bool:
    """Whether an instruction is in a scope, one of those that a pattern matches."""
    return len(found := self._scopes(i, scope)) == 1 and "" not in found

  def _scopes(self, i: Instruction, scope: str, further: int = 4) -> set[str]:
    """The scope in its name, or without a name those of its users; "": in none."""
    if "op_name=" in i.rest or not further:
      found = re.search(scope, i.rest)
      return {found[1] if found else ""}
    users = self._users[i.name]
    return set().union(*(self._scopes(j, scope, further - 1) for j in users))

  def _moved(self, i: Instruction) -> float:
    """Bytes that an instruction reads from and writes to the main memory."""
    if i.opcode in ("copy-start", "slice-start"):
      made = i.arrays[0]
      source = self._array(i.operands[0])
      sides = (not made.is_near) + (source is not None and not source.is_near)
      return made.num_bytes * sides
    if not self._is_kernel(i):
      return 0.0
    if i.opcode == "custom-call":
      return self._moved_by_custom_call(i)
    read = [self._read(i, n, name) for n, name in enumerate(i.operands)]
    if writes_in_place(i, self._module):
      largest = max(x.num_bytes for x in i.arrays)
      others = [x for x in read if x < largest / 2]
      return 2.0 * sum(others)
    return sum(read) + sum(x.num_bytes for x in i.arrays if not x.is_near)

  def _moved_by_custom_call(self, i: Instruction) -> float:
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", i.rest)  # result, operand
    aliased = {int(result or 0) for result, _ in pairs}
    into = {i.operands[int(operand)] for _, operand in pairs}
    users = self._users[i.name]
    used = {int(n) for user in users for n in re.findall(r" ?index=(\d+)", user.rest)}
    made = {n: x.num_bytes for n, x in enumerate(i.arrays) if not x.is_near}
    is_tuple = i.type.startswith("(")
    scratch = sum(made[n] for n in made.keys() - used - aliased) if is_tuple else 0
    results = [made[n] for n in made.keys() - aliased if n in used or not is_tuple]
    kernel = re.search(r"/(\w+)/ffi_call", i.rest)
    by_rows = BY_ROWS.get(kernel[1], {}).values() if kernel else ()
    read, share = 0.0, 1.0
    for name in dict.fromkeys(i.operands):
      array = self._array(name)
      if array is None or array.is_near or name in into:
        continue
      part = array.num_bytes
      if array.size in self._caches:
        part, share = part * self._caches[array.size], self._fill
      elif i.operands.index(name) in by_rows:
        part = min(part, max(results))
      read += part
    written = max(results, default=read) * sum(n in made for n in aliased)
    return read + sum(results) + written + 2 * share * scratch

  def _array(self, name: str) -> Array | None:
    """An operand that is one array."""
    i = self._by_name.get(name)
    return i.arrays[0] if i is not None and len(i.arrays) == 1 else None

  def _read(self, i: Instruction, n: int, name: str) -> float:
    """Bytes of its n-th operand that an instruction reads from the main memory."""
    array = self._array(name)
    if array is None or array.is_near:
      return 0.0
    if i.opcode in ("gather", "dynamic-slice") and n == 0:
      return sum(x.num_bytes for x in i.arrays)
    if i.opcode == "fusion":
      share = self._read_inside(i.called[0], n) / max(array.num_elements, 1)
      return array.num_bytes * min(share, 1.0)
    return array.num_bytes

  def _read_inside(self, name: str, n: int) -> float:
    """Elements of slices that a fusion reads of its n-th parameter; infinite if all."""
    body = self._module[name]
    names = {i.name for i in body if i.opcode == "parameter" and f"({n})" in i.rest[:6]}
    taken = 0.0
    while names:
      users = [i for i in body if names & set(i.operands)]
      names = set()
      for user in users:
        if user.opcode in ("gather", "dynamic-slice", "slice"):
          taken += sum(x.num_elements for x in user.arrays)
        elif user.opcode in ("bitcast", "convert"):
          names.add(user.name)
        elif user.opcode not in ("dynamic-update-slice", "scatter"):
          return math.inf
    return taken
