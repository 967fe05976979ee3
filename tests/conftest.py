"""The whole suite on a CPU that shows 8 devices; `--gpu` runs the rest on a GPU.

The environment is set before any test module imports jax, and in the environment,
so that the commands that tests start see the same devices and the same cache of
compiled programs.
"""

import importlib.metadata
import os

import pytest

_NUM_DEVICES = 8


def pytest_addoption(parser):
  parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, only")
  parser.addoption("--all", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config):
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.rootpath / ".jax_cache")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  if config.getoption("gpu"):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    if jax.default_backend() != "gpu":
      raise pytest.UsageError(f"--gpu, but jax runs on the {jax.default_backend()}")
  else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # With programs queued ahead, devices that outnumber the cores can deadlock.
    os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "0"
    flags = [
      f"--xla_force_host_platform_device_count={_NUM_DEVICES}",
      # What runs for seconds compiles for longer, with all that makes it fast.
      "--xla_backend_optimization_level=0",
      "--xla_llvm_disable_expensive_passes=true",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones refuse it
      flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def pytest_collection_modifyitems(config, items):
  if not config.getoption("all"):
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
  gpu = config.getoption("gpu")
  skip = pytest.mark.skip(reason="needs no GPU" if gpu else "needs a GPU: pytest --gpu")
  for item in items:
    if (item.get_closest_marker("gpu") is not None) != gpu:
      item.add_marker(skip)
