"""The whole suite on a CPU that shows 8 devices; `--gpu` or `--tpu` run the rest there.

The environment is set before any test module imports jax, and in the environment,
so that the commands that tests start see the same devices and the same cache of
compiled programs.
"""

import gc
import importlib.metadata
import os

import hypothesis
import pytest

_NUM_DEVICES = 8
_ACCELERATORS = ("gpu", "tpu")
# Files that take minutes come first: one that began last would keep a single worker busy.
_LONGEST = ("test_commands.py", "test_spot.py", "test_speculation.py", "test_benchmarks.py")


def pytest_addoption(parser):
  for kind in _ACCELERATORS:
    told = f"run the tests marked {kind}, only"
    parser.addoption(f"--{kind}", action="store_true", help=told)
  parser.addoption("--all", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config):
  # Programs are traced into many objects that live on: looking through them often is a
  # tenth of the time, and where they come from is read by nobody.
  gc.set_threshold(100_000, 50, 50)
  os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
  os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.rootpath / ".jax_cache")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  # Of tests that do not say how many: each example compiles programs.
  examples = 24 if config.getoption("all") else 4
  hypothesis.settings.register_profile("ours", max_examples=examples, deadline=None)
  hypothesis.settings.load_profile("ours")
  if kind := _accelerator(config):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    if jax.default_backend() != kind:
      raise pytest.UsageError(f"--{kind}, but jax runs on the {jax.default_backend()}")
  else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # With programs queued ahead, devices that outnumber the cores can deadlock.
    os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "0"
    flags = [
      f"--xla_force_host_platform_device_count={_NUM_DEVICES}",
      # What runs for seconds compiles for longer, with all that makes it fast.
      "--xla_backend_optimization_level=0",
      "--xla_llvm_disable_expensive_passes=true",
      "--xla_cpu_parallel_codegen_split_count=1",  # parts of small programs cost more
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones refuse it
      flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def pytest_collection_modifyitems(config, items):
  if not config.getoption("all"):
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
  items.sort(key=lambda item: item.path.name not in _LONGEST)
  asked = _accelerator(config)
  for item in items:
    needs = next((k for k in _ACCELERATORS if item.get_closest_marker(k)), None)
    if needs and needs != asked:
      item.add_marker(pytest.mark.skip(reason=f"needs a {needs.upper()}: pytest --{needs}"))
    elif needs != asked:
      item.add_marker(pytest.mark.skip(reason=f"needs no {asked.upper()}"))


def _accelerator(config) -> str | None:
  """The kind of device whose tests are asked for; None: those of the CPU."""
  return next((kind for kind in _ACCELERATORS if config.getoption(kind)), None)
