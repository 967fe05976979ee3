"""Calls Triton kernels from jitted functions, by whichever jax_triton is installed.

From jax_triton 0.4 on, which needs jax 0.11 and Python 3.12, XLA puts the calls into CUDA
graphs with the kernels around them; before, each call cuts a graph in two.
"""

import inspect


def triton_call(*args, kernel, out_type, **options):
  """Is `jax_triton.triton_call`, with multiplications and additions fused.

  Args:
    args: arrays and scalars, in the order of the kernel's parameters
    kernel: a function of `triton.jit`
    out_type: shapes and dtypes of what it writes, whose parameters come after `args`
    options: grid, name, num_warps, num_stages, and the kernel's constants
  """
  import jax_triton  # fails to import where jax has no CUDA

  call = jax_triton.triton_call
  fused = {"enable_fp_fusion": True}
  if "backend_options" in inspect.signature(call).parameters:
    return call(
      *args, kernel=kernel, out_type=out_type, backend_options=fused, **options
    )
  return call(*args, kernel=kernel, out_shape=out_type, **fused, **options)
