"""The house: who may import whom, what nobody imports, and imports without effects."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted(
  path.relative_to(ROOT)
  for top in ("tlt_jax", "experiments", "benchmarks", "dev")
  for path in (ROOT / top).rglob("*.py")
)

# The longest matching prefix gives a module's layer; all else in tlt_jax is layer 0.
LAYERS = {
  "dev": 10,
  "benchmarks": 9,
  "experiments.figures": 8,
  "experiments": 7,
  "tlt_jax.api": 6,
  "tlt_jax.integrations": 6,
  "tlt_jax.rl": 6,
  "tlt_jax.simulate": 6,
  "tlt_jax.spec_decode.rollout": 5,
  "tlt_jax.spec_decode.spot": 4,
  "tlt_jax.spec_decode.speculation": 3,
  "tlt_jax.spec_decode.decoding": 2,
  "tlt_jax.spec_decode": 5,
  "tlt_jax.models": 1,
  "tlt_jax.pallas_kernels": 1,
  "tlt_jax.expert_products": 1,
  "tlt_jax": 0,
}
BANNED = (
  "jax._src",
  "jax.experimental.pjit",
  "jax.experimental.shard_map",
  "pickle",
  "torch",
)
# Run by another Python, in a process to compare with.
OTHERS_PROGRAMS = ("benchmarks/transformers_generate.py",)
# Settled at the door: the library sees neither a flag nor a ConfigDict.
BANNED_IN_LIBRARY = ("absl.flags", "ml_collections")


def _within(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(prefix + ".")


def _layer(name: str) -> int | None:
  """The layer of a dotted name of this project, None for anyone else's."""
  return next((layer for prefix, layer in LAYERS.items() if _within(name, prefix)), None)


def _module(path: pathlib.PurePath) -> str:
  parts = path.with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(source: str, path: pathlib.PurePath) -> set[str]:
  """The dotted names that a file imports or spells out, relative ones resolved."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = [node.module] if node.module else []
      if node.level:
        base = [*path.parts[: len(path.parts) - node.level], *base]
      names |= {".".join([*base, alias.name]) for alias in node.names}
    elif isinstance(node, ast.Attribute):
      names.add(ast.unparse(node))  # `jax._src.core.f`: a use needs no import of its own
  return names


def violations(source: str, path: pathlib.PurePath) -> list[str]:
  """What a file at `path` must not import, each with the reason."""
  own = _layer(_module(path))
  banned = BANNED if own >= LAYERS["experiments"] else BANNED + BANNED_IN_LIBRARY
  found = []
  for name in sorted(_names(source, path)):
    layer = _layer(name)
    if layer is not None and layer > own:
      found.append(f"{name}: layer {layer}, imported from layer {own}")
    found += [f"{name}: {ban} is banned" for ban in banned if _within(name, ban)]
  return found


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_only_from_its_own_layer_or_below(path):
  """And nothing private, deprecated or foreign to the project."""
  found = violations((ROOT / path).read_text(), path)
  if str(path) in OTHERS_PROGRAMS:
    found = [line for line in found if not line.endswith("torch is banned")]
  assert not found


@pytest.mark.parametrize(
  "path, source, count",
  [
    ("tlt_jax/models/target.py", "from tlt_jax.models import cache", 0),
    ("tlt_jax/models/target.py", "def f():\n  from tlt_jax.rl import reward", 1),
    ("tlt_jax/models/target.py", "from ..spec_decode import noise", 1),
    ("tlt_jax/spec_decode/spot/loss.py", "from ..decoding import decode", 0),
    ("tlt_jax/spec_decode/decoding/decode.py", "from ..spot import loss", 1),
    ("experiments/train.py", "from tlt_jax.rl import learner\nfrom absl import flags", 0),
    ("tlt_jax/rl/learner.py", "from absl import flags", 1),
    ("tlt_jax/rl/learner.py", "import jax\njax._src", 1),
    ("experiments/train.py", "from benchmarks import machine", 1),
    ("experiments/figures/following.py", "from benchmarks import step", 1),
    ("experiments/train.py", "from dev import size", 1),
    ("benchmarks/run.py", "from experiments import train\nfrom absl import flags", 0),
    ("experiments/train.py", "import torch.nn", 1),
    ("experiments/train.py", "import torchless", 0),
  ],
)
def test_the_rule_finds_what_it_is_for(path, source, count):
  """The check itself, on files that keep the rule and files that break it."""
  assert len(violations(source, pathlib.PurePath(path))) == count


def test_no_drawer_files():
  """A file is named for what is in it."""
  drawers = {"util", "utils", "common", "helper", "helpers", "misc"}
  assert not [str(path) for path in SOURCES if path.stem in drawers]


# Needs what none of us depends on, which it says (tests/test_tunix.py).
OF_OTHERS = "tlt_jax.integrations.tunix"

# No such platform exists, so the first device work of an import fails where it stands.
_IMPORT_ALL = """
import importlib, sys
from absl import flags
try:
  import triton
except ImportError:  # not on this platform
  triton = None
for name in sys.argv[1:]:
  if name.endswith(".triton") and triton is None:
    continue  # whatever else imports must not need it
  before = set(flags.FLAGS)
  importlib.import_module(name)
  for flag in set(flags.FLAGS) - before:  # two programs may both define --config
    delattr(flags.FLAGS, flag)
"""


def test_importing_a_module_touches_no_device():
  """Every module imports without a backend: no array, no device list, no jit call."""
  result = subprocess.run(
    [sys.executable, "-c", _IMPORT_ALL, *sorted({*map(_module, SOURCES)} - {OF_OTHERS})],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "untouchable"},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
