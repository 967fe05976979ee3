"""A drafter as a folder: `config.json` and `model.safetensors`.

Arrays carry their place in the parameter tree as name. Embedding and head are the
target's and are not in it; a folder says which shape of target it is for.
"""

import dataclasses
import json
import pathlib
import shutil

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter


def save(path, config: drafter.DrafterConfig, params) -> None:
  """Writes the folder, whole or not at all; see `convert.save_hf`."""
  path = pathlib.Path(path)
  partial = path / convert.PARTIAL
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  flat = traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")
  flat = {name: np.asarray(x) for name, x in flat.items()}
  safetensors.numpy.save_file(flat, partial / "model.safetensors")
  convert.write_json(partial / "config.json", dataclasses.asdict(config))
  convert.publish(path, partial)


def load(path, target_config: config_lib.ModelConfig, mesh=None, rules=axes.ROLLOUT):
  """Reads a folder.

  Args:
    target_config: of the target it is to draft for
    mesh, rules: where to; one device without a mesh
  Returns:
    DrafterConfig and parameters
  Raises:
    convert.CheckpointError: the folder is missing, damaged, or for another target
  """
  path = pathlib.Path(path)
  config = _load_config(path)
  for name in ("vocab_size", "width"):
    have, want = getattr(config.layer, name), getattr(target_config, name)
    if have != want:
      raise convert.CheckpointError(
        f"{path}: this drafter is for a target of {name} {have}, not {want}; train one "
        "with experiments.train_drafter"
      )
  if config.taps and max(config.taps) >= target_config.num_layers:
    raise convert.CheckpointError(
      f"{path}: this drafter reads layer {max(config.taps)} of the target, which has "
      f"{target_config.num_layers} layers"
    )
  abstract = drafter.abstract_params(config)
  flat = traverse_util.flatten_dict(nn.meta.unbox(abstract), sep="/")
  try:
    stored = safetensors.numpy.load_file(path / "model.safetensors")
  except (OSError, safetensors.SafetensorError) as e:
    raise convert.CheckpointError(f"{path}: model.safetensors cannot be read: {e}") from e
  shapes = {name: tuple(x.shape) for name, x in flat.items()}
  found = {name: tuple(x.shape) for name, x in stored.items()}
  if shapes != found:
    wrong = sorted(n for n in shapes | found if shapes.get(n) != found.get(n))[0]
    raise convert.CheckpointError(
      f"{path}: {wrong} has shape {found.get(wrong)}, config.json says "
      f"{shapes.get(wrong)}"
    )
  params = traverse_util.unflatten_dict(
    {name: jnp.asarray(x) for name, x in stored.items()}, sep="/"
  )
  if mesh is not None:
    params = jax.device_put(params, axes.shardings(mesh, rules, abstract))
  return config, params


def _load_config(path: pathlib.Path) -> drafter.DrafterConfig:
  try:
    raw = json.loads((path / "config.json").read_text())
    layer = dict(raw.pop("layer"))
    if layer.get("rope_scaling") is not None:
      layer["rope_scaling"] = config_lib.RopeScaling(**layer["rope_scaling"])
    raw["taps"] = tuple(raw["taps"])
    return drafter.DrafterConfig(layer=config_lib.ModelConfig(**layer), **raw)
  except OSError as e:
    raise convert.CheckpointError(f"{path}: no drafter there: {e}") from e
  except (ValueError, KeyError, TypeError) as e:
    raise convert.CheckpointError(f"{path}: config.json is not a drafter's: {e}") from e
