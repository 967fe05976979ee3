"""A kernel that writes down the noise that the kernels of verify_sample draw with."""

import triton
import triton.language as tl

from tlt_jax.pallas_kernels.verify_sample import triton as kernels

high, mix, gumbel = kernels.high, kernels.mix, kernels.gumbel


@triton.jit
def noise_kernel(
  key_ptr,
  ids_ptr,
  upper_ptr,
  lower_ptr,
  noise_ptr,
  COUNT: tl.constexpr,
  LOW: tl.constexpr,
):
  """The two halves of the hash of each id, and its noise, in the row of a program."""
  row = tl.program_id(0)
  at = tl.arange(0, COUNT)
  k0, k1 = tl.load(key_ptr + row * 2), tl.load(key_ptr + row * 2 + 1)
  upper = high(k0, k1, tl.load(ids_ptr + at))
  lower = mix(upper ^ LOW)
  tl.store(upper_ptr + row * COUNT + at, upper)
  tl.store(lower_ptr + row * COUNT + at, lower)
  tl.store(noise_ptr + row * COUNT + at, gumbel(upper, lower))
