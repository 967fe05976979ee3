"""Hugging Face checkpoints: a folder of config.json and safetensors, in and out.

`load_hf` places tensor by tensor straight into the target sharding; `save_hf` writes what
transformers 4 and 5 load. What cannot be reproduced exactly is refused, never
approximated. The parts: `hf_folder` (the files), `hf_config` (config.json), `hf_tensors`
(names and layouts), and here what they make together.
"""

import contextlib
import itertools
import pathlib
import re

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tlt_jax import axes as axes_lib
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf_config
from tlt_jax.models import hf_folder
from tlt_jax.models import hf_tensors
from tlt_jax.models import target

CheckpointError = hf_folder.CheckpointError
MAX_FILE_BYTES = 4 * 10**9  # of safetensors, where there are several

_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # a buffer of old exports
_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _flat(params) -> dict:
  """Path -> leaf, without the boxes that carry axis names."""
  return traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")


def load_config(path: str | pathlib.Path) -> config_lib.ModelConfig:
  """Reads the model that a folder's config.json describes.

  Raises:
    CheckpointError: missing, damaged, or describing what we would compute
      differently
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise CheckpointError(
      f"{path}: no such folder; download the model first (hf download MODEL "
      f"--local-dir {path})"
    )
  if not (path / hf_folder.CONFIG).exists():
    raise CheckpointError(
      f"{path / hf_folder.CONFIG} is missing; give the folder that holds config.json and "
      "the safetensors files, and download it completely"
    )
  raw = hf_folder.read_json(path / hf_folder.CONFIG)
  try:
    return hf_config.parse(raw)
  except CheckpointError as e:
    raise CheckpointError(f"{path / hf_folder.CONFIG}: {e}") from e
  except ValueError as e:
    raise CheckpointError(
      f"{path / hf_folder.CONFIG} makes no model ({e}); restore the original"
    ) from e


def load_hf(
  path: str | pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  rules: axes_lib.Rules | None = None,
  dtype: str | None = None,
) -> tuple[config_lib.ModelConfig, dict]:
  """Reads a Hugging Face folder into the tree of `target.Target`.

  Every device reads only its part of a tensor, and no more than one tensor is on
  the host at a time.

  Args:
    path: folder with config.json and model.safetensors, or shards with an index
    mesh: (data, model) mesh; None places everything on the default device
    rules: logical axis -> mesh axis, `axes.ROLLOUT` by default
    dtype: of the parameters; as stored by default
  Returns:
    ModelConfig (its `dtype`, of the computation, is the one in config.json) and
    the nested dict of parameters
  Raises:
    CheckpointError: the folder is incomplete, damaged or not supported
  """
  path = pathlib.Path(path)
  config = load_config(path)
  with contextlib.ExitStack() as stack:
    stored = hf_folder.open_tensors(path, stack)
    if config.num_layers > len(stored.lazy):  # before as many are described
      raise CheckpointError(
        f"{path / hf_folder.CONFIG}: num_hidden_layers={config.num_layers}, but there are "
        f"{len(stored.lazy)} tensors; restore the original config.json"
      )
    abstract = target.abstract_params(config)
    shapes = {name: spec.shape for name, spec in _flat(abstract).items()}
    table = hf_tensors.layouts(config)
    layouts = {name: table[name] for name in shapes}
    _check_tensors(path, stored, layouts, shapes, config.tie_embeddings)
    shardings = dict.fromkeys(shapes)
    if mesh is not None:
      rules = axes_lib.ROLLOUT if rules is None else rules
      tree = axes_lib.shardings(mesh, rules, abstract)
      shardings = traverse_util.flatten_dict(tree, sep="/")
    dtypes = {
      name: dtype or _STORED_DTYPES[stored.lazy[layout.name].get_dtype()]
      for name, layout in layouts.items()
    }
    memory.announce(
      f"the weights of {path} ({', '.join(sorted(set(dtypes.values())))})",
      [jax.ShapeDtypeStruct(shapes[n], dtypes[n], sharding=shardings[n]) for n in shapes],
      smaller="policy, tensor_parallel",
    )
    params = {
      name: _place(stored.lazy[layout.name], layout, shapes[name], shardings[name], dtype)
      for name, layout in layouts.items()
    }
  return config, traverse_util.unflatten_dict(params, sep="/")


def _place(stored, layout: hf_tensors.Layout, shape, sharding, dtype) -> jax.Array:
  """Moves one tensor from the file to its devices.

  Args:
    stored: lazy, see `hf_folder.open_tensors`
    layout: of the tensor
    shape: of ours
    sharding: of ours; None: the default device
    dtype: of ours; None: as stored
  """
  blocks = {}  # replicas share one read

  def block(index):
    if str(index) not in blocks:
      x = layout.load(stored, shape, index)
      blocks[str(index)] = x if dtype is None else x.astype(jnp.dtype(dtype))
    return blocks[str(index)]

  if sharding is None:
    return jax.device_put(block((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, block)


def _check_tensors(path, stored, layouts, shapes, tied: bool) -> None:
  """Raises unless the files hold exactly the tensors of the model.

  Args:
    path: of the folder, for the error
    stored: `hf_folder.Tensors`
    layouts, shapes: of our tensors, by path in our tree
    tied: whether the head is the embedding
  """
  files = sorted(set(stored.file.values()))
  expected = {layout.name for layout in layouts.values()}
  missing = [name for name in sorted(expected) if name not in stored.lazy]
  if missing:
    raise CheckpointError(
      f"{files[0] if len(files) == 1 else path} lacks {_names(missing)}; download it "
      "completely, or correct config.json"
    )
  extra = [name for name in sorted(stored.lazy) if name not in expected]
  extra = [name for name in extra if not _HARMLESS.fullmatch(name)]
  if tied and "lm_head.weight" in extra:
    extra.remove("lm_head.weight")
  if extra:
    raise CheckpointError(
      f"{stored.file[extra[0]]} holds {_names(extra)}, which the model in config.json "
      "does not have; correct config.json, or use a supported model"
    )
  for name, layout in layouts.items():
    tensor, file = stored.lazy[layout.name], stored.file[layout.name]
    found, shape = tuple(tensor.get_shape()), layout.stored_shape(shapes[name])
    if found != shape:
      raise CheckpointError(
        f"{file}: tensor {layout.name} has shape {found!s:.100}, config.json implies "
        f"{shape}; the two do not belong together"
      )
    if tensor.get_dtype() not in hf_folder.FLOATS:
      raise CheckpointError(
        f"{file}: tensor {layout.name} is stored as {tensor.get_dtype()}, not as one "
        f"of {', '.join(hf_folder.FLOATS)}; use an unquantised checkpoint"
      )
  if tied and "lm_head.weight" in stored.lazy:
    _check_tied(stored)


def _check_tied(stored, rows: int = 4096) -> None:
  """Raises on a stored head that tying to the embedding would lose."""
  names = ("lm_head.weight", "model.embed_tokens.weight")
  head, embedding = (stored.lazy[name] for name in names)
  size = embedding.get_shape()[0]
  what = lambda tensor: (tensor.get_shape(), tensor.get_dtype())
  same = what(head) == what(embedding) and all(
    np.array_equal(head[i : min(i + rows, size)], embedding[i : min(i + rows, size)])
    for i in range(0, size, rows)
  )
  if not same:
    raise CheckpointError(
      f"{stored.file[names[0]]}: config.json ties the head to the embedding, but "
      f"{names[0]} differs from {names[1]}; set tie_word_embeddings to false"
    )


def _names(names: list[str], limit: int = 3) -> str:
  """Says 'tensor a', or 'tensors a, b, c and 7 more'."""
  rest = f" and {len(names) - limit} more" if len(names) > limit else ""
  listed = ", ".join(name[:80] for name in names[:limit])
  return f"tensor{'s' if names[1:] else ''} {listed}{rest}"


def save_hf(
  path: str | pathlib.Path,
  config: config_lib.ModelConfig,
  params: dict,
  max_file_bytes: int = MAX_FILE_BYTES,
  dtype: str | None = None,
) -> None:
  """Writes a folder that transformers and `load_hf` read.

  A save that is killed leaves the earlier checkpoint, or none. Tokenizer and
  generation_config.json are not written; other files stay.

  Args:
    path: folder, made if need be; a checkpoint in it is replaced
    config: the model; its `dtype` becomes config.json's
    params: nested dict as from `load_hf` or `target.init_params`, sharded over the
      devices of all processes or not; every process calls, the first one writes
    max_file_bytes: above it the tensors are spread over files with an index
    dtype: of the stored weights; None: each as it is
  Raises:
    CheckpointError: params or config do not fit the architecture
  """
  raw = hf_config.unparse(config)
  layouts, tensors = hf_tensors.layouts(config), _flat(params)
  _check_params(config, tensors)
  as_stored = lambda x: jnp.dtype(x.dtype if dtype is None else dtype)
  there = {name: tensors[name] for name in layouts if name in tensors}
  sizes = {name: x.size * as_stored(x).itemsize for name, x in there.items()}
  files = hf_folder.split(sizes, max_file_bytes)
  if not processes.is_first():  # has its part of what the first one writes
    for name in itertools.chain(*files.values()):
      processes.fetch(tensors[name])
    return
  with hf_folder.replacing(pathlib.Path(path)) as folder:
    for file, members in files.items():
      stored = {}
      for n in members:
        x = processes.fetch(tensors[n])
        stored[layouts[n].name] = layouts[n].store(x.astype(as_stored(x), copy=False))
      safetensors.numpy.save_file(stored, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
      holder = {layouts[n].name: file for file, members in files.items() for n in members}
      hf_folder.write_index(folder, holder, sum(sizes.values()))
    hf_folder.write_json(folder / hf_folder.CONFIG, raw)


def _check_params(config, tensors: dict) -> None:
  """Raises unless the parameters are those of the model."""
  shapes = {name: x.shape for name, x in _flat(target.abstract_params(config)).items()}
  for name in sorted(shapes.keys() | tensors.keys()):
    found = tensors[name].shape if name in tensors else "nothing"
    shape = shapes.get(name, "nothing")
    if found != shape:
      raise CheckpointError(
        f"parameter {name}: the config implies {shape}, found {found}; save the "
        "parameters with the config they were made with"
      )
