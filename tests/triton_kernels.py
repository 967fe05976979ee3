"""Triton kernels without a GPU: interpreted on numpy arrays, and compiled for GPUs.

`interpreted` runs what is written for CUDA as it would run there, in JAX:

    with triton_kernels.interpreted():
      out = tree_attention.tree_attention(q, k, v, seen, impl="triton")

Triton's interpreter must be chosen before Triton is imported (`tl.max` is a kernel, too),
so the kernels run in a process of their own, one for all the tests of a worker. What it
cannot do is arithmetic in bfloat16, which it does on the bits: a kernel widens what it
loads, and for `tl.dot` asks `triton.knobs.runtime.interpret`.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import importlib.util
import multiprocessing
import os
import pathlib
import types
from unittest import mock

import jax
import numpy as np
import pytest

from tlt_jax.pallas_kernels import triton_call

requires_triton = pytest.mark.skipif(
  importlib.util.find_spec("triton") is None,
  reason="needs triton, which requirements.txt installs on x86-64 Linux only",
)


_NOT_INTERPRETED = {n: getattr(triton_call, n) for n in ("triton_call", "is_available")}


@contextlib.contextmanager
def interpreted():
  """Within it, kernels are interpreted.

  Outputs hold NaN, or the smallest integer, wherever a kernel has not written.
  """
  replace = functools.partial(mock.patch.object, triton_call)
  with replace("triton_call", _triton_call), replace("is_available", lambda: True):
    yield


def _triton_call(
  *args,
  kernel,
  out_type,
  grid,
  name,
  num_warps,
  num_stages,
  fused=True,
  aliases=types.MappingProxyType({}),
  **constants,
):
  """Has the signature of `triton_call.triton_call`."""
  del name, num_warps, num_stages, fused  # for compilers
  scalars = {i: x for i, x in enumerate(args) if isinstance(x, int | float)}
  arrays = [x for i, x in enumerate(args) if i not in scalars]

  def run(*arrays):
    arrays = iter(np.asarray(x) for x in arrays)
    inputs = [scalars[i] if i in scalars else next(arrays) for i in range(len(args))]
    outputs = [_unwritten(s) for s in jax.tree.leaves(out_type)]
    for argument, result in aliases.items():
      outputs[result] = np.array(inputs[argument])
    source = kernel.fn.__code__.co_filename, kernel.fn.__name__
    call = _process().submit(_interpret, *source, grid, inputs, outputs, constants)
    return jax.tree.unflatten(jax.tree.structure(out_type), call.result())

  return jax.pure_callback(run, out_type, *arrays)


def _unwritten(shape: jax.ShapeDtypeStruct) -> np.ndarray:
  integer = np.issubdtype(shape.dtype, np.integer)
  return np.full(shape.shape, np.iinfo(shape.dtype).min if integer else np.nan, shape.dtype)


@functools.cache
def _process() -> concurrent.futures.Executor:
  """The process that interprets; it ends with this one."""
  process = concurrent.futures.ProcessPoolExecutor(
    1, multiprocessing.get_context("spawn"), initializer=_choose_interpreter
  )
  atexit.register(process.shutdown)
  return process


def _choose_interpreter() -> None:
  """Its `tl.dot` sums in float64, exactly for bfloat16.

  numpy's sums in float32 depend on shapes on some CPUs; those of tensor cores do not.
  """
  os.environ["TRITON_INTERPRET"] = "1"
  from triton.runtime import interpreter

  def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

  interpreter.InterpreterBuilder.create_dot = dot


def _interpret(file: str, kernel: str, grid, inputs, outputs, constants) -> list:
  """Runs a kernel in the process of `_process`: its outputs."""
  kernel = getattr(_load(file), kernel)

  def wrap(x):
    return _Tensor(x) if isinstance(x, np.ndarray) else x

  grid = grid if isinstance(grid, tuple) else (grid,)
  arrays = [x for x in inputs if isinstance(x, np.ndarray)]
  before = [x.tobytes() for x in arrays]
  with np.errstate(all="ignore"):
    kernel[grid](*map(wrap, [*inputs, *outputs]), **constants)
  if [x.tobytes() for x in arrays] != before:
    # On a GPU its next reader finds the change, such as counts that are not zeros again.
    raise AssertionError(f"{kernel.fn.__name__} leaves an argument changed")
  return outputs


@functools.cache
def _load(file: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem + "_kernels", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class _Tensor:
  """A numpy array, with what Triton's interpreter asks of torch's tensors."""

  def __init__(self, array: np.ndarray):
    self.array = array
    self.dtype = array.dtype.name

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  cpu = untyped_storage

  def new_empty(self, *args, **kwargs):
    return _Tensor(self.array)

  def set_(self, *args, **kwargs):  # the interpreter's copy to and from the host
    return self

  copy_ = set_

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return tuple(step // self.array.itemsize for step in self.array.strides)

  def element_size(self):
    return self.array.itemsize

  def numel(self):
    return self.array.size


def lower_for(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Has kernels compiled for a GPU that is not there; skips where that cannot be.

  Args:
    capability: of the GPU; 80 for an A100, 90 for an H100 or H200
    monkeypatch: takes it back
  """
  for name, own in _NOT_INTERPRETED.items():
    monkeypatch.setattr(triton_call, name, own)
  if not triton_call.is_available():
    pytest.skip("needs jax's CUDA plugin, which packs the calls of kernels")
  monkeypatch.setattr(triton_call, "_capability", capability)
