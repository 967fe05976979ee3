"""Tells whether two revisions compile the plain rollout programs to the same thing.

    python -m experiments.compare_programs --base=632d119 [--head=HEAD]

Compiles what a rollout without a drafter runs (prefill, admit, decode chunk, resize),
for a small model on two CPU slices, in both revisions, and compares the optimised HLO
but for names and source locations. Without --head: this folder as it is. Exit status
1 if anything differs. The last line is JSON.

First the normal form of a program's text, then what a revision compiles, then the
comparison.
"""

from collections.abc import Sequence
import difflib
import inspect
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

from absl import flags

from experiments import launch

_BASE = flags.DEFINE_string("base", None, "Revision to compare with.", required=True)
_HEAD = flags.DEFINE_string("head", None, "Revision; default: the files as they are.")
_ONLY = flags.DEFINE_list("only", [], "Programs, such as prefill or chunk; default: all.")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SHOWN = 8  # lines of a difference

_QUOTED = r'"(?:\\.|[^"\\])*"'
_FLAT = rf'\{{(?:[^{{}}"]|{_QUOTED})*\}}'
_BRACES = rf'\{{(?:[^{{}}"]|{_QUOTED}|{_FLAT})*\}}'
_NO_MEANING = (
  (rf", (?:metadata|frontend_attributes)={_BRACES}", ""),
  (r"^HloModule [^\s,]+", "HloModule"),
  # Tables that stack frames in metadata refer to.
  (r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n*", ""),
)
_NAME = r"%[\w.\-]+"


def normalised(text: str) -> str:
  """HLO text without metadata, and with names and ids in order of appearance.

  Equal for two programs just if they run the same instructions in the same order on
  the same operands.

  Raises:
    ValueError: the text leaves out a constant's values
  """
  if "constant({...})" in text:
    raise ValueError("a constant is so large that the program's text leaves it out")
  for pattern, replacement in _NO_MEANING:
    text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
  # What a computation calls its parameters is said again where they are defined.
  signature = lambda line: re.sub(r"[\w.\-]+: ", "", line[0])
  text = re.sub(r"^(?:ENTRY )?%.*\{$", signature, text, flags=re.MULTILINE)
  for pattern, prefix in ((_NAME, "%"), (r"\bchannel_id=\d+", "channel_id=")):
    ids = {}
    number = lambda found, p=prefix, ids=ids: p + str(ids.setdefault(found[0], len(ids)))
    text = re.sub(pattern, number, text)
  return text


def difference(base: str, head: str) -> list[str]:
  """Lines removed (-) and added (+) between two normal forms.

  Without the numbers in names, that all change behind an instruction more or less,
  unless these are all that differs.
  """
  if base == head:
    return []
  bare = lambda text: re.sub(_NAME, "%", text)
  if bare(base) != bare(head):
    base, head = bare(base), bare(head)
  lines = difflib.unified_diff(base.splitlines(), head.splitlines(), n=0, lineterm="")
  return [line for line in itertools.islice(lines, 2, None) if line[0] in "+-"]


def write_programs(folder: str, *only: str) -> None:
  """Compiles the plain programs of the code on the path, and writes their texts.

  Its source runs by itself, in a process that sees one revision and not this one.

  Args:
    folder: where to
    only: names of programs; all without one
  """
  import pathlib

  from flax import linen as nn
  import jax

  from tlt_jax import axes
  from tlt_jax.models import config
  from tlt_jax.models import target
  from tlt_jax.spec_decode import rollout

  tree = pathlib.Path.cwd()
  if not pathlib.Path(axes.__file__).resolve().is_relative_to(tree):
    raise ImportError(f"tlt_jax was imported from {axes.__file__}, not from {tree}")
  jax.config.update("jax_num_cpu_devices", 2)
  jax.config.update("jax_enable_compilation_cache", False)
  mesh = axes.make_mesh(1, jax.devices()[:2])
  model = config.ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    width=32,
    mlp_width=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=True,
  )
  abstract = target.abstract_params(model)
  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    nn.meta.unbox(abstract),
    axes.shardings(mesh, axes.ROLLOUT, abstract),
  )

  def compile_all(kind, **more):
    sizes = dict(max_length=64, max_prompt=16, slots=8, chunk=8, prefill_rows=2)
    buckets = ((2, 32), (2, 64), (8, 32))
    run = rollout.make(model, mesh, rollout.Options(**sizes, buckets=buckets, **more))
    get = run.pool.get

    def get_and_write(name, key, *args, **static):
      if only and name not in only:
        return None  # nobody runs it
      compiled = get(name, key, *args, **static)
      # Some revisions end the bucket with the number of stop tokens.
      bucket = [str(size) for size in key[: len(key) // 2 * 2]]
      file = "-".join([kind, name, *bucket]) + ".txt"
      (pathlib.Path(folder) / file).write_text(compiled.as_text())
      return compiled

    run.pool.get = get_and_write
    run.compile(params, stop_tokens=2)

  compile_all("plain")
  compile_all("features", features=True, rebalance=True)


def compiled_by(tree: pathlib.Path, only: Sequence[str] = ()) -> dict[str, str]:
  """The normal form of each plain program of the code in a folder.

  Args:
    tree: the folder
    only: names of programs; all without one
  Raises:
    ValueError: the code there cannot make them
  """
  source = f"{inspect.getsource(write_programs)}\nimport sys\nwrite_programs(*sys.argv[1:])"
  env = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-c", source, folder, *only]
    result = subprocess.run(command, cwd=tree, env=env, stderr=subprocess.PIPE, text=True)
    if result.returncode:
      lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
      raise ValueError(f"its plain programs cannot be compiled: {lines[-1]}")
    files = sorted(pathlib.Path(folder).iterdir())
    return {file.stem: normalised(file.read_text()) for file in files}


def compiled_at(revision: str, only: Sequence[str] = ()) -> dict[str, str]:
  """As `compiled_by`, for a revision of this repository."""
  archive = ["git", "-C", str(_ROOT), "archive", f"{revision}^{{commit}}", "tlt_jax"]
  result = subprocess.run(archive, capture_output=True)
  if result.returncode:
    raise ValueError(f"{revision}: {result.stderr.decode().strip()}")
  with tempfile.TemporaryDirectory() as folder:
    tarfile.open(fileobj=io.BytesIO(result.stdout)).extractall(folder, filter="data")
    try:
      return compiled_by(pathlib.Path(folder).resolve(), only)
    except ValueError as e:
      raise ValueError(f"{revision}: {e}") from e


def compare(base: dict[str, str], head: dict[str, str]) -> dict[str, list[str]]:
  """What differs in each program, by name; a program of one side differs whole."""
  names = sorted(base | head)
  return {name: difference(base.get(name, ""), head.get(name, "")) for name in names}


def main():
  only = _ONLY.value
  base = compiled_at(_BASE.value, only)
  head = compiled_at(_HEAD.value, only) if _HEAD.value else compiled_by(_ROOT, only)
  found = compare(base, head)
  if not found:
    raise ValueError(f"there is no plain program called {' or '.join(only)}")
  for name, lines in found.items():
    verdict = f"differs in {len(lines)} lines" if lines else "identical"
    print(f"{name:<36}{len(head.get(name, '').splitlines()):>6} lines  {verdict}")
    for line in lines[:_SHOWN]:
      print(f"    {line[:160]}")
  differing = {name: len(lines) for name, lines in found.items() if lines}
  result = {
    "base": _BASE.value,
    "head": _HEAD.value or "working tree",
    "programs": len(found),
    "identical": len(found) - len(differing),
    "differing_lines": differing,
  }
  print(json.dumps(result))
  sys.exit(1 if differing else 0)


if __name__ == "__main__":
  launch.run(main)
