"""The targets of benchmarks: a config's policy, or a larger one that computes the same."""

import hashlib
import pathlib
import shutil

from experiments.bench import widen
from tlt_jax.models import drafters


def weights_digest(folder: str | pathlib.Path) -> str:
  """A hash of a model folder's weights."""
  weights = hashlib.sha256()
  for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
    weights.update(file.read_bytes())
  return weights.hexdigest()


def wide(config: dict, workdir: str | pathlib.Path, folder: str = "") -> dict:
  """Returns the config with its policy, and drafter, embedded in larger ones.

  Args:
    config: of a run
    workdir: where they are made, unless they are there
    folder: that `widen` wrote; "": one in the workdir, named by the weights
  """
  drafter = config["drafter"]
  has_folder = bool(drafter) and not drafters.is_kind(drafter)
  made = pathlib.Path(folder)
  if not folder:
    name = "wide_" + weights_digest(config["policy"])[:8]
    name += "_" + weights_digest(drafter)[:8] if has_folder else ""
    made = pathlib.Path(workdir) / name
    if not made.exists():
      partial = made.with_suffix(".partial")
      shutil.rmtree(partial, ignore_errors=True)
      widen.widen(config["policy"], drafter if has_folder else None, partial)
      partial.rename(made)
  if has_folder:
    drafter = str(made / "drafter")
  return config | {"policy": str(made / "policy"), "drafter": drafter}
