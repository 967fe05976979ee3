"""The folder of a checkpoint: config.json and safetensors files, in and out.

Opening reads headers only; a tensor is read when it is sliced. Writing happens aside, in
a folder that then takes the checkpoint's place, config.json last: a save that is killed
leaves the earlier checkpoint, or none, but never a mixture that loads.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import numpy as np
import safetensors

from tlt_jax import json_objects
from tlt_jax import writing

CONFIG = "config.json"
FLOATS = ("F32", "F16", "BF16")  # what weights may be stored as
_SINGLE, _SHARD = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors"
_INDEX = "model.safetensors.index.json"
_SAFETENSORS = re.compile(r"[^/\0]{1,200}\.safetensors")
PARTIAL = ".partial"  # folder of a save that is not complete yet


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or written; names the cause and the remedy."""


def read_json(file: pathlib.Path) -> dict:
  """Reads a JSON object; an error names the file."""
  content = file.read_bytes()
  try:
    return json_objects.parse(content)
  except ValueError as e:
    raise CheckpointError(f"{file} {e}; download it again") from e


class Tensors(NamedTuple):
  """What the safetensors files of a folder hold, by name."""

  lazy: dict[str, Any]  # tensors, read when they are sliced
  file: dict[str, pathlib.Path]  # that holds them


def open_tensors(path: pathlib.Path, stack: contextlib.ExitStack) -> Tensors:
  """Opens all files of a checkpoint; `stack` closes them."""
  if (path / _SINGLE).exists():
    promised = {path / _SINGLE: ()}
  elif (path / _INDEX).exists():
    promised = _read_index(path)
  else:
    pickled = sorted(file.name for file in path.glob("*.bin"))
    raise CheckpointError(
      f"{path} holds {pickled[0]} but no safetensors, and pickles are never loaded; "
      "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
      if pickled
      else f"{path} holds neither {_SINGLE} nor {_INDEX}; download it completely"
    )
  tensors = Tensors({}, {})
  for file, names in promised.items():
    opened = _open_file(file, stack)
    found = {name: opened.get_slice(name) for name in opened.keys()}
    if not found:
      raise CheckpointError(f"{file} holds no tensors; download it again")
    tensors.lazy.update(found)
    tensors.file.update(dict.fromkeys(found, file))
    for name in names:
      if name not in found:
        raise CheckpointError(
          f"{file} lacks tensor {name:.100}, which {_INDEX} promises; download both again"
        )
  return tensors


def _read_index(path: pathlib.Path) -> dict[pathlib.Path, list[str]]:
  """The files that an index names, and the tensors that it promises in each."""
  index = path / _INDEX
  holders = read_json(index).get("weight_map")
  if not isinstance(holders, dict) or not holders:
    raise CheckpointError(f"{index} has no weight_map; download it again")
  promised = {}
  for name, file in holders.items():
    if not isinstance(file, str) or not _SAFETENSORS.fullmatch(file):
      raise CheckpointError(
        f"{index}: weight_map names {file!r:.60}, which is no safetensors file of that "
        "folder; download it again"
      )
    promised.setdefault(path / file, []).append(name)
  return dict(sorted(promised.items()))


def _open_file(file: pathlib.Path, stack: contextlib.ExitStack):
  """A safetensors file whose header fits its length."""
  if not file.exists():
    raise CheckpointError(f"{file}, named in {_INDEX}, is missing; download it")
  try:
    return stack.enter_context(safetensors.safe_open(file, framework="numpy"))
  except (safetensors.SafetensorError, OSError) as e:
    raise CheckpointError(
      f"{file} is damaged or truncated ({e!s:.200}); download it again (a git-lfs pointer "
      "is not the file itself)"
    ) from e


def split(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
  """File -> tensors in it: in order, as many as fit, at least one.

  Args:
    sizes: bytes of each tensor
    max_bytes: of a file
  """
  files, room = [[]], max_bytes
  for name, size in sizes.items():
    if files[-1] and size > room:
      files.append([])
      room = max_bytes
    files[-1].append(name)
    room -= size
  if len(files) == 1:
    return {_SINGLE: files[0]}
  return {_SHARD.format(i, len(files)): names for i, names in enumerate(files, 1)}


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives an empty folder to write to; it replaces the checkpoint, if nothing is raised.

  Other files in `path` stay. If something is raised, what was written is removed: it may
  have filled the disk.
  """
  partial = path / PARTIAL
  shutil.rmtree(partial, ignore_errors=True)
  with writing.to(path):
    partial.mkdir(parents=True)
    try:
      yield partial
    except BaseException:
      shutil.rmtree(partial, ignore_errors=True)
      raise
    _publish(path, partial)


def _publish(path: pathlib.Path, partial: pathlib.Path) -> None:
  """Replaces a checkpoint by the complete one in `partial`.

  Without config.json nothing loads, so it goes first and comes back last.
  """
  (path / CONFIG).unlink(missing_ok=True)
  for stale in (path / _SINGLE, path / _INDEX, *path.glob("model-*-of-*.safetensors")):
    stale.unlink(missing_ok=True)
  files = [file for file in partial.iterdir() if file.name != CONFIG]
  for file in (*files, partial / CONFIG):
    shutil.copymode(partial / CONFIG, file)  # safetensors makes files private
    os.replace(file, path / file.name)
  partial.rmdir()


def write_json(file: pathlib.Path, raw: dict) -> None:
  """Writes a JSON object, indented."""
  file.write_text(json.dumps(raw, indent=2) + "\n")


def write_float32(
  folder: pathlib.Path,
  shapes: Mapping[str, tuple[int, ...]],
  tensors: Iterable[np.ndarray],
) -> None:
  """Writes model.safetensors with one tensor in memory at a time.

  The library takes all tensors at once. The format is a header, after its length, and
  the tensors one after another: https://github.com/huggingface/safetensors#format

  Args:
    folder: where to
    shapes: by name
    tensors: f32 each, in the order of `shapes`
  """
  header, end = {"__metadata__": {"format": "pt"}}, 0
  for name, shape in shapes.items():
    start, end = end, end + 4 * math.prod(shape)
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
  with open(folder / _SINGLE, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
      file.write(np.ascontiguousarray(tensor, "<f4"))


def write_index(folder: pathlib.Path, weight_map: dict[str, str], size: int) -> None:
  """Writes which file holds which tensor, where there are several.

  Args:
    folder: where to
    weight_map: tensor -> file
    size: bytes of all tensors
  """
  metadata = {"total_size": size}
  write_json(folder / _INDEX, {"metadata": metadata, "weight_map": weight_map})
