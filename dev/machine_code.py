"""Registers and instructions of a Triton kernel, compiled without a GPU."""

from collections.abc import Callable
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple


class Machine(NamedTuple):
  """A kernel's machine code for one GPU."""

  ptx_version: tuple[int, int]
  stack: int  # bytes per thread; registers that spill need some
  registers: int  # per thread
  shared: int  # bytes of shared memory per program
  instructions: Callable[[str], int]  # how often one occurs, e.g. "HGMMA"
  machine_code: str  # disassembled
  ptx: str
  layouts: str  # Triton's own text for GPUs, with the layout of every array over threads


def compiled(
  kernel,
  capability: int,
  types: dict[str, str],
  constants: dict,
  warps: int,
  stages: int,
  fused: bool = True,
) -> Machine:
  """Compiles a kernel to machine code, without a GPU.

  Args:
    kernel: made by `triton.jit`
    capability: of the GPU; 80 for an A100, 90 for an H100 or H200
    types: of the arguments that are not constant, e.g. {"x_ptr": "*fp32", "size": "i32"};
      all are taken to be multiples of 16, as jax's arrays and most sizes are
    constants: the other arguments
    fused: whether products may be fused with sums
  """
  import triton
  from triton.backends import compiler as backends

  names = kernel.arg_names
  source = triton.compiler.ASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs={name: constants[name] for name in names if name not in types},
    attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types},
  )
  program = triton.compile(
    source,
    target=backends.GPUTarget("cuda", capability, 32),
    options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused},
  )
  usage = _dump(program.asm["cubin"], "-res-usage")
  machine_code = _dump(program.asm["cubin"], "-sass")
  stack, registers = (int(re.search(x, usage)[1]) for x in (r"STACK:(\d+)", r"REG:(\d+)"))
  major, minor = re.search(r"\.version (\d+)\.(\d+)", program.asm["ptx"]).groups()
  return Machine(
    ptx_version=(int(major), int(minor)),
    stack=stack,
    registers=registers,
    shared=program.metadata.shared,
    instructions=lambda name: len(re.findall(rf"\b{name}\b", machine_code)),
    machine_code=machine_code,
    ptx=program.asm["ptx"],
    layouts=program.asm["ttgir"],
  )


def _dump(cubin: bytes, option: str) -> str:
  import triton

  tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
  with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(cubin)
    file.flush()
    done = subprocess.run([tool, option, file.name], capture_output=True, text=True)
  if done.returncode:
    raise ValueError(f"{tool}: {done.stderr.strip()}")
  return done.stdout


def shortest_loop(machine_code: str) -> int:
  """Instructions of the shortest path through the outermost loop."""
  found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;", machine_code)
  place = {int(address, 16): i for i, (address, _) in enumerate(found)}
  following = []
  for i, (_, text) in enumerate(found):
    jump = re.match(r"(@\S+ )?BRA (!?U?P\d, )?(0x[0-9a-f]+)", text)
    ends = re.match(r"EXIT|RET", text) or (jump and not (jump[1] or jump[2]))
    following.append([place[int(jump[3], 16)]] if jump else [])
    if not ends and i + 1 < len(found):
      following[i].append(i + 1)
  start = min(j for i, after in enumerate(following) for j in after if j < i)
  steps, reached, seen = 0, {start}, set()
  while True:  # breadth first
    steps += 1
    reached = {j for i in reached for j in following[i]}
    if start in reached:
      return steps
    if not reached - seen:
      raise ValueError("the machine code has no loop")
    reached, seen = reached - seen, seen | reached
