"""Drafters in the published layouts that SGLang and vLLM load: EAGLE-2 and EAGLE-3.

    layout   tensors                                 classes in SGLang; in vLLM
    EAGLE-2  fc, layers.0.*                          Qwen2ForCausalLMEagle,
                                                     LlamaForCausalLMEagle;
                                                     EagleLlamaForCausalLM
    EAGLE-3  fc, midlayer.*, norm, lm_head, d2t, t2d LlamaForCausalLMEagle3; the same

`load` reads either, also as training code leaves it (names that begin with "model.", an
embedding, no `fc.bias`); `save` writes what one of the servers reads in full. Neither the
embedding nor the target's head is stored: a server shares the target's. So config.json
never says that they are tied, even where the target's are: SGLang would drop one tensor
twice.

EAGLE-2 folders differ between the servers. SGLang's class leaves `fc.bias` random unless
the file has it, vLLM's has none, and takes the biases of q, k and v from `qkv_bias`. A
draft vocabulary (FR-Spec) is no part of the layout: SGLang takes it from a file of its own
and passes over d2t and t2d, which are there for `load`; vLLM has none, stops at these
tables, and drafts among all tokens without them.

Two spellings say which layers an EAGLE-3 drafter reads. In `eagle_config` (SGLang) i is the
output of layer i, from 0, as in `DrafterConfig.taps`; at the top level (vLLM) it is what
enters layer i. Taps (1, 13, 24) are [1, 13, 24] and [2, 14, 25].
"""

import contextlib
import dataclasses
import math
import pathlib
import re
from typing import Any, Literal

from flax import traverse_util
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tlt_jax import json_objects
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import drafter_tensors
from tlt_jax.models import drafters
from tlt_jax.models import hf_config
from tlt_jax.models import hf_folder
from tlt_jax.models import hf_tensors
from tlt_jax.models import json_fields
from tlt_jax.models import pickled_weights

SERVERS = ("sglang", "vllm")
_TENSORS = "model.safetensors"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PREFIX = {"eagle2": "layers.0.", "eagle3": "midlayer."}  # of the layer's tensors
# Name in the file, path in our tree, our axes, their axes; see `hf_tensors`.
_FC = (("fc.weight", "fc", "E D", "D E"), ("fc.bias", "fc_bias", "D", "D"))
_OF_EAGLE3 = (
  ("midlayer.input_layernorm.weight", "input_norm/scale", "D", "D"),
  ("midlayer.hidden_norm.weight", "hidden_norm/scale", "D", "D"),
  ("norm.weight", "norm/scale", "D", "D"),
  ("lm_head.weight", "head", "D U", "U D"),
)
# Keys of variants that compute something else, and the values that do not.
_NEUTRAL = {
  "add_para_norm": (False,),
  "fc_norm": (False,),
  "norm_before_fc": (False,),
  "norm_before_residual": (False,),
  "norm_output": (False,),
}


def is_published(path: pathlib.Path) -> bool:
  """Whether a folder's config.json is that of a published layout, not of this project."""
  try:
    raw = json_objects.parse((path / hf_folder.CONFIG).read_bytes())
  except (OSError, ValueError):
    return False  # `drafter_files` says what is wrong with it
  return "architectures" in raw and "kind" not in raw


# --- out


def save(
  path: str | pathlib.Path,
  config: drafter.DrafterConfig,
  params: dict,
  server: Literal[SERVERS] = "sglang",
  dtype: str | None = None,
) -> None:
  """Writes the folder that a server loads as its drafter, whole or not at all.

  Args:
    path: folder, made if need be; a drafter in it is replaced
    config, params: the drafter
    server: an EAGLE-3 drafter is the same for both; of an EAGLE-2 one vLLM gets no
      vocabulary of its own
    dtype: of the stored weights; None: each as it is
  Raises:
    CheckpointError: the server's classes do not compute what this drafter does
  """
  if server not in SERVERS:
    raise ValueError(f"server is one of {', '.join(SERVERS)}, not {server!r}")
  flat = traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")
  flat = {name: np.asarray(x) for name, x in flat.items()}
  has_bias = "fc_bias" in flat and bool(np.any(flat["fc_bias"]))
  raw = _config_json(config, server, has_bias)
  if not has_bias:
    flat.pop("fc_bias", None)
  if config.kind == "eagle2" and server == "sglang":
    flat.setdefault("fc_bias", np.zeros(config.layer.width, flat["fc"].dtype))
  if config.kind == "eagle2" and server == "vllm":
    config = dataclasses.replace(config, vocab=())
  kept = lambda x: x if dtype is None else x.astype(jnp.dtype(dtype))
  table = _layouts(config.kind)
  stored = {table[name].name: table[name].store(kept(x)) for name, x in flat.items()}
  raw["torch_dtype"] = str(stored["fc.weight"].dtype)
  stored |= drafter_tensors.vocab_tables(config)
  with hf_folder.replacing(pathlib.Path(path)) as folder:
    safetensors.numpy.save_file(stored, folder / _TENSORS, metadata={"format": "pt"})
    hf_folder.write_json(folder / hf_folder.CONFIG, raw)


def has_server(config: drafter.DrafterConfig) -> bool:
  """Whether a class of a released server computes what `save` writes of a drafter.

  There is none for EAGLE-2 drafters with norms of q and k, such as those of Qwen3: the
  name that config.json gives, Qwen3ForCausalLMEagle, follows the others.
  """
  return not config.layer.qk_norm


def _config_json(
  config: drafter.DrafterConfig, server: str, has_fc_bias: bool
) -> dict[str, Any]:
  """The config.json of a drafter; raises where the server would compute another one."""
  layer = config.layer
  if config.kind not in _PREFIX or layer.architecture not in config_lib.ARCHITECTURES:
    raise hf_folder.CheckpointError(
      f"a drafter of kind {config.kind} with a layer of {layer.architecture} has no "
      f"published layout; {' and '.join(_PREFIX)} have, of Qwen2, Qwen3 and Llama"
    )
  if has_fc_bias and (config.kind == "eagle3" or server == "vllm"):
    raise hf_folder.CheckpointError(
      "this drafter's fc has a bias, which only SGLang's EAGLE-2 drafters have; train one "
      "without (fc_bias)"
    )
  raw = hf_config.unparse(layer) | {"tie_word_embeddings": False}
  if config.kind == "eagle3":
    return raw | _as_eagle3(config)
  if server == "sglang":
    name = layer.architecture.removesuffix("ForCausalLM")
    return raw | {"architectures": [f"{name}ForCausalLMEagle"]}
  if layer.qk_norm:
    raise hf_folder.CheckpointError(
      "vLLM has no EAGLE-2 drafter with norms of q and k; train one with "
      "--config.drafter.architecture=LlamaForCausalLM"
    )
  return raw | {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "qkv_bias": layer.qkv_bias,
  }


def _as_eagle3(config: drafter.DrafterConfig) -> dict[str, Any]:
  """What differs in the config.json of an EAGLE-3 drafter: both servers have one class."""
  if config.layer.qkv_bias or config.layer.qk_norm:
    raise hf_folder.CheckpointError(
      "SGLang and vLLM have one class for EAGLE-3 drafters, whose attention has neither "
      "biases nor norms of q and k; this drafter has: train one with "
      "--config.drafter.architecture=LlamaForCausalLM"
    )
  if len(config.taps) != 3:
    raise hf_folder.CheckpointError(
      f"SGLang and vLLM feed EAGLE-3 drafters from three layers; this one reads "
      f"{len(config.taps)}"
    )
  return {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": len(config.vocab) or None,  # null: the target's head
    "eagle_config": {"use_aux_hidden_state": True, _LAYER_IDS: list(config.taps)},
    _LAYER_IDS: [tap + 1 for tap in config.taps],
  }


# --- in


def load(
  path: pathlib.Path, target_config: config_lib.ModelConfig
) -> tuple[drafter.DrafterConfig, dict]:
  """Reads a folder: DrafterConfig and parameters, as they are stored.

  Args:
    path: the folder
    target_config: of the target it is to draft for, whose length, number format and tying
      of the head it has
  Raises:
    CheckpointError: the folder is damaged, or computes what we would compute differently
  """
  with contextlib.ExitStack() as stack:
    config, stored = _open(path, target_config, stack)
    drafter_tensors.check_target(path, config, target_config)
    table = _layouts(config.kind)
    abstract = nn.meta.unbox(drafter.abstract_params(config))
    shapes = {k: x.shape for k, x in traverse_util.flatten_dict(abstract, sep="/").items()}
    expected = {table[k].name: table[k].stored_shape(shape) for k, shape in shapes.items()}
    try:
      for name in sorted(expected.keys() | stored.keys()):
        tensor, shape = stored.get(name), expected.get(name)
        drafter_tensors.check(name, tensor, shape, hf_folder.FLOATS)
    except ValueError as e:
      raise hf_folder.CheckpointError(f"{path / _TENSORS}: {e}") from e
    params = {
      k: jnp.asarray(
        table[k].load(stored[table[k].name], shape, (slice(None),) * len(shape))
      )
      for k, shape in shapes.items()
    }
  return config, traverse_util.unflatten_dict(params, sep="/")


def load_shape(
  path: pathlib.Path, target_config: config_lib.ModelConfig
) -> drafter.DrafterConfig:
  """The drafter of a folder, without its weights; arguments and errors as of `load`."""
  with contextlib.ExitStack() as stack:
    return _open(path, target_config, stack)[0]


def _layouts(kind: str) -> dict[str, hf_tensors.Layout]:
  """Where each tensor of a drafter is stored, by its path in our tree."""
  rows = [*_FC, *(_OF_EAGLE3 if kind == "eagle3" else ())]
  rows += [
    (_PREFIX[kind] + name, *row)
    for name, *row in hf_tensors.LAYER_TENSORS
    if name != "input_layernorm.weight"  # EAGLE-2 has none, EAGLE-3 one of its own
  ]
  return {
    path: hf_tensors.Layout(name, tuple(ours.split()), tuple(theirs.split()))
    for name, path, ours, theirs in rows
  }


def _open(
  path: pathlib.Path, target_config: config_lib.ModelConfig, stack: contextlib.ExitStack
) -> tuple[drafter.DrafterConfig, dict[str, Any]]:
  """Reads what a folder says of its drafter, and opens its tensors.

  Returns:
    the drafter, and its tensors: lazy, by the names of `_layouts`
  """
  pickled_weights.refuse(path)
  raw = hf_folder.read_json(path / hf_folder.CONFIG)
  opened = hf_folder.open_tensors(path, stack).lazy
  try:
    kind, stored = _named(opened)
    layer = _layer(raw, stored, kind, target_config)
    taps = _taps(raw, target_config) if kind == "eagle3" else ()
  except ValueError as e:
    raise hf_folder.CheckpointError(f"{path / hf_folder.CONFIG}: {e!s:.350}") from e
  try:
    vocab = _take_vocab(raw, stored, kind, layer.vocab_size)
    _drop_shared(stored, kind, layer)
    fc_bias = _has_fc_bias(stored, layer.width)
    config = drafter.DrafterConfig(kind, layer, taps, fc_bias, vocab)
  except ValueError as e:
    raise hf_folder.CheckpointError(f"{path / _TENSORS}: {e!s:.350}") from e
  return config, stored


def _named(opened: dict[str, Any]) -> tuple[str, dict[str, Any]]:
  """The kind of drafter, and its tensors by their names in `_layouts`."""
  is_eagle3 = re.compile(r"(model\.)?midlayer\..*|.*hidden_norm\.weight").fullmatch
  kind = "eagle3" if any(map(is_eagle3, opened)) else "eagle2"
  stored = {}
  for name, tensor in opened.items():
    short = name.removeprefix("model.")
    if kind == "eagle3":
      short = re.sub(r"^layers\.0\.", _PREFIX[kind], short)
    if short.endswith("rotary_emb.inv_freq"):
      continue
    if short in stored:
      raise ValueError(f"tensor {short:.60} is there twice, with and without a prefix")
    stored[short] = tensor
  return kind, stored


def _layer(
  raw: dict, stored: dict, kind: str, target_config: config_lib.ModelConfig
) -> config_lib.ModelConfig:
  """The drafter's layer: what the file holds says which family it is of."""
  attention = f"{_PREFIX[kind]}self_attn."
  biases, norms = (attention + n in stored for n in ("q_proj.bias", "q_norm.weight"))
  family = "Qwen3" if norms else "Qwen2" if biases else "Llama"
  for key, harmless in _NEUTRAL.items():
    if raw.get(key) is not None and raw[key] not in harmless:
      raise ValueError(
        f"{key}={raw[key]!s:.60} is not supported and would change the drafts; use a "
        "drafter without it"
      )
  width = raw.get("target_hidden_size")
  if width is not None and width != target_config.width:
    raise ValueError(
      f"target_hidden_size={width!s:.60}, but the target's width is {target_config.width}; "
      "use a drafter of this target"
    )
  layer = hf_config.parse(raw | {"architectures": [f"{family}ForCausalLM"]})
  if layer.num_layers != 1:
    raise ValueError(
      f"num_hidden_layers={layer.num_layers}; drafters of one layer are supported"
    )
  of_target = ("max_position", "tie_embeddings", "dtype")
  return dataclasses.replace(layer, **{k: getattr(target_config, k) for k in of_target})


def _taps(raw: dict, target_config: config_lib.ModelConfig) -> tuple[int, ...]:
  """The target's layers that an EAGLE-3 drafter reads; see the top of this file."""
  eagle = json_fields.check("eagle_config", raw.get("eagle_config") or {}, dict)
  if eagle.get("use_aux_hidden_state", True) is not True:
    raise ValueError("use_aux_hidden_state=false: such drafters are not supported")
  if eagle.get(_LAYER_IDS) is not None:
    ids, offset = eagle[_LAYER_IDS], 0
  elif raw.get(_LAYER_IDS) is not None:
    ids, offset = raw[_LAYER_IDS], 1
  else:
    return drafters.find("eagle3").customary_taps(target_config.num_layers)
  in_order = isinstance(ids, list) and all(type(i) is int for i in ids)
  if not in_order or not ids or sorted(set(ids)) != ids or ids[0] < offset:
    raise ValueError(f"{_LAYER_IDS}={ids!s:.60} are not increasing layers of the target")
  return tuple(i - offset for i in ids)


def _take_vocab(raw: dict, stored: dict, kind: str, target_size: int) -> tuple[int, ...]:
  """Takes the drafter's own vocabulary out of its tables; () if it has none."""
  size = raw.get("draft_vocab_size")
  if size is not None:
    json_fields.check("draft_vocab_size", size, int)
  if "d2t" in stored:
    if size is None:  # only EAGLE-3 folders must say it
      size = math.prod(stored["d2t"].get_shape()) if kind == "eagle2" else target_size
    return drafter_tensors.take_vocab(stored, size, target_size, needs_t2d=False)
  stored.pop("t2d", None)
  if size not in (None, target_size):
    raise ValueError(f"d2t is missing, but draft_vocab_size={size} in config.json")
  if kind == "eagle3" and "lm_head.weight" in stored:  # of its own, for all tokens
    drafter_tensors.check(
      "lm_head.weight",
      stored["lm_head.weight"],
      (target_size, stored["lm_head.weight"].get_shape()[-1]),
      hf_folder.FLOATS,
    )
    return tuple(range(target_size))
  return ()


def _drop_shared(stored: dict, kind: str, layer: config_lib.ModelConfig) -> None:
  """Drops copies of what is the target's: the embedding and, of EAGLE-2, the head."""
  for name in ("embed_tokens.weight", *(["lm_head.weight"] if kind == "eagle2" else [])):
    if name in stored:
      shape = (layer.vocab_size, layer.width)
      drafter_tensors.check(name, stored.pop(name), shape, hf_folder.FLOATS)


def _has_fc_bias(stored: dict, width: int) -> bool:
  """Whether there is a bias of fc; one of zeros, which servers may need, is dropped."""
  if "fc.bias" not in stored:
    return False
  drafter_tensors.check("fc.bias", stored["fc.bias"], (width,), hf_folder.FLOATS)
  if np.any(stored["fc.bias"][:]):
    return True
  del stored["fc.bias"]
  return False
