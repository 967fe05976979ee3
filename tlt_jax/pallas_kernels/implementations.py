"""Which implementation of an operation runs.

Their names:

    "ref"        plain jax.numpy
    "pallas"     Pallas for TPUs
    "interpret"  the same, interpreted: for tests, on any machine
    "triton"     Triton for NVIDIA GPUs
"""

import importlib.util

import jax

_OF_BACKEND = {"tpu": "pallas", "gpu": "triton"}


def choose(impl: str | None, known: tuple[str, ...]) -> str:
  """Returns the implementation to run.

  Args:
    impl: its name; None for that of jax's default backend, or "ref" where the backend
      has none or Triton is not installed
    known: those that the operation has, "ref" among them

  Raises:
    ValueError: the operation has no such implementation
  """
  if impl is None:
    impl = _OF_BACKEND.get(jax.default_backend(), "ref")
    installed = impl != "triton" or importlib.util.find_spec("jax_triton") is not None
    return impl if impl in known and installed else "ref"
  if impl not in known:
    raise ValueError(
      f"no implementation is called {impl!r}; choose one of {', '.join(known)}, or None "
      "for that of this machine"
    )
  return impl
