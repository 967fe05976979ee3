"""Implementations of operations.

    "ref"        plain jax.numpy
    "pallas"     Pallas for TPUs
    "interpret"  the same, interpreted: for tests, on any machine
    "triton"     Triton for NVIDIA GPUs
"""

import importlib
import types

import jax

from tlt_jax.pallas_kernels import triton_call

NAMES = ("ref", "pallas", "interpret", "triton")
_MODULES = {"interpret": "pallas"}
_OF_BACKEND = {"tpu": "pallas", "gpu": "triton"}


def load(package: str, impl: str) -> types.ModuleType:
  """A kernel's module for an implementation; the others need not be importable."""
  return importlib.import_module(f"{package}.{_MODULES.get(impl, impl)}")


def choose(impl: str | None) -> str:
  """The implementation to run; None: the default backend's, else "ref".

  Raises:
    ValueError: the implementation does not exist, or needs Triton where it is missing
  """
  if impl is None:
    impl = _OF_BACKEND.get(jax.default_backend(), "ref")
    return impl if impl != "triton" or triton_call.is_available() else "ref"
  if impl not in NAMES:
    raise ValueError(
      f"no implementation is called {impl!r}; choose one of {', '.join(NAMES)}, or None "
      "for the default"
    )
  if impl == "triton" and not triton_call.is_available():
    raise ValueError(
      'the implementation "triton" needs Triton, which comes with requirements.txt on '
      'x86-64 Linux, and jax for CUDA; install them or choose "ref"'
    )
  return impl
