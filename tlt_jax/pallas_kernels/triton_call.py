"""Calls Triton kernels from jitted functions, by jaxlib's `triton_kernel_call_ffi`,
which XLA may put into CUDA graphs.

jax_triton's releases up to 0.3 split a graph at every kernel, and its 0.4.1 fails with jax
0.12 and with Triton 3.6.
"""

from collections.abc import Mapping, Sequence
import functools
import threading
import types
import zlib

import jax

_TYPES = {
  "bfloat16": "bf16",
  "float16": "fp16",
  "float32": "fp32",
  "int32": "i32",
  "uint32": "u32",
}
_ALIGNED = 16  # bytes, of every array; the compiler also uses multiples among integers

_capability: int | None = None  # None: the first device's
_making: dict[tuple, threading.Lock] = {}


def compile_for(capability: int | None) -> None:
  """Sets the compute capability (90: an H100) to compile for; None: the first device's."""
  global _capability
  _capability = capability


def is_available() -> bool:
  """Whether Triton and jax's plugin for CUDA are installed."""
  try:
    from jaxlib import gpu_triton
    import triton  # noqa: F401
  except ImportError:
    return False
  return hasattr(gpu_triton, "TritonKernel")


def triton_call(
  *args: jax.Array | int,
  kernel,
  out_type,
  grid: tuple[int, ...],
  name: str,
  num_warps: int,
  num_stages: int,
  fused: bool = True,
  aliases: Mapping[int, int] = types.MappingProxyType({}),
  **constants,
):
  """Calls a kernel.

  Args:
    out_type: of results, whose parameters come after `args`
    fused: whether products may be fused with sums (FMA), which rounds once less
    aliases: index of an argument -> index of the result that is written into it
  """
  several = isinstance(out_type, Sequence)
  results = list(out_type) if several else [out_type]
  numbers = [x if isinstance(x, int) else None for x in args] + [None] * len(results)
  arrays = [x for x in args if not isinstance(x, int)]
  dtypes = iter([x.dtype.name for x in (*arrays, *results)])
  kinds = [_TYPES[next(dtypes)] if n is None else "i32" for n in numbers]
  key = (
    kernel,
    tuple(zip(kinds, numbers, strict=True)),
    (*grid, 1, 1)[:3],
    tuple(sorted(constants.items())),
    _capability or _of_first_device(),
    fused,
    *(name, num_warps, num_stages),
  )
  with _making.setdefault(key, threading.Lock()):  # programs are traced by several threads
    opaque = _packed(*key)
  call = jax.ffi.ffi_call(
    "triton_kernel_call_ffi", results, input_output_aliases=dict(aliases)
  )
  with jax.named_scope(name):  # for profilers
    written = call(*arrays, opaque=opaque)
  return written if several else written[0]


@functools.cache
def _packed(
  kernel,
  parameters: tuple[tuple[str, int | None], ...],
  grid: tuple[int, int, int],
  constants: tuple,
  capability: int,
  fused: bool,
  name: str,
  num_warps: int,
  num_stages: int,
) -> bytes:
  """A serialized call for jaxlib's handler; `parameters`: types, and values of integers."""
  from jaxlib import gpu_triton

  constants = dict(constants)
  names = [n for n in kernel.arg_names if n not in constants]
  kinds, aligned = {}, []
  for n, (kind, number) in zip(names, parameters, strict=True):
    kinds[n] = f"*{kind}" if number is None else kind
    if number is None or number % _ALIGNED == 0:
      aligned.append(n)
  options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fused)
  compiled = compile_kernel(kernel, kinds, aligned, constants, capability, options)
  code = gpu_triton.TritonKernel(
    compiled.metadata.name,
    num_warps,
    1,  # programs of a cluster
    compiled.metadata.shared,
    compiled.asm["ptx"],
    compiled.asm["ttir"],
    capability,
  )
  packed = [
    gpu_triton.create_array_parameter(0, _ALIGNED)  # 0 bytes are zeroed before the call
    if number is None
    else gpu_triton.create_scalar_parameter(number, kind)
    for kind, number in parameters
  ]
  call = gpu_triton.TritonKernelCall(code, *grid, packed)
  return zlib.compress(call.to_proto(name, b""))


def compile_kernel(kernel, kinds, aligned, constants, capability, options):
  import triton
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource

  place = kernel.arg_names.index
  source = ASTSource(
    fn=kernel,
    signature={n: kinds.get(n, "constexpr") for n in kernel.arg_names},
    constexprs=constants,
    attrs={(place(n),): [["tt.divisibility", _ALIGNED]] for n in aligned},
  )
  return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _of_first_device() -> int:
  major, minor = jax.devices()[0].compute_capability.split(".")
  return 10 * int(major) + int(minor)
