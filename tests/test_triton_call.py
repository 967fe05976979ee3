"""Calls of Triton kernels, without a compiler."""

import functools
import threading
import time

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import triton_call


def test_threads_compile_a_kernel_once(monkeypatch):
  """Programs that are traced at a time share their kernels."""
  made = []

  @functools.cache
  def packed(kernel, *rest):
    made.append(kernel)
    time.sleep(0.1)
    return b""

  monkeypatch.setattr(triton_call, "_packed", packed)
  monkeypatch.setattr(triton_call, "_capability", 90)

  def call(kernel):
    shape = jax.ShapeDtypeStruct((16,), jnp.float32)
    options = dict(out_type=shape, grid=(1,), num_warps=4, num_stages=1)
    run = functools.partial(triton_call.triton_call, kernel=kernel, name=kernel, **options)
    assert jax.eval_shape(run, shape).shape == (16,)

  threads = [threading.Thread(target=call, args=(k,)) for k in ("a", "b") * 4]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(made) == ["a", "b"]
