"""Drafters in the published layouts that SGLang and vLLM load: EAGLE-2 and EAGLE-3.

    layout   tensors                                 classes in SGLang; in vLLM
    EAGLE-2  fc, layers.0.*                          Qwen2ForCausalLMEagle,
                                                     LlamaForCausalLMEagle;
                                                     EagleLlamaForCausalLM
    EAGLE-3  fc, midlayer.*, norm, lm_head, d2t, t2d LlamaForCausalLMEagle3; the same

`read` takes either, also as training code leaves it (names that begin with "model.", an
embedding, no `fc.bias`); `save` writes the layout of one server. Neither the embedding nor
the target's head is stored: servers share the target's. config.json never ties them, even
if the target does: SGLang would delete one tensor twice.

EAGLE-2 folders differ between the servers. SGLang's class initializes `fc.bias` randomly
unless the file has it; vLLM's has none, and takes the biases of q, k and v from `qkv_bias`.
A draft vocabulary (FR-Spec) is not part of the layout: SGLang takes it from a separate file
and ignores d2t and t2d, which are there for `read`; vLLM does not support it and fails on
these tables.

Two keys list the layers that an EAGLE-3 drafter reads. In `eagle_config` (SGLang) i is the
output of layer i, from 0, as in `DrafterConfig.taps`; at the top level (vLLM) it is the
input of layer i. Taps (1, 13, 24) are [1, 13, 24] and [2, 14, 25].
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
import pathlib
import re
import types
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import drafters
from tlt_jax.models import hf

SERVERS = ("sglang", "vllm")
_FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SUPPORTED = (
  "EAGLE-2, EAGLE-3, DFlash and DSpark in the layout of their authors, SpecForge or SGLang "
  "are"
)
_PREFIX = {"eagle2": "layers.0.", "eagle3": "midlayer."}  # of the layer's tensors
# Name in the file, path in our tree.
_FC = (("fc.weight", "fc"), ("fc.bias", "fc_bias"))
_OF_EAGLE3 = (
  ("midlayer.input_layernorm.weight", "input_norm/scale"),
  ("midlayer.hidden_norm.weight", "hidden_norm/scale"),
  ("norm.weight", "norm/scale"),
  ("lm_head.weight", "head"),
)
# Keys of unsupported variants, unless they are false.
_VARIANTS = (
  "add_para_norm",
  "fc_norm",
  "norm_before_fc",
  "norm_before_residual",
  "norm_output",
)


def _names(kind: str) -> dict[str, str]:
  rows = [*_FC, *(_OF_EAGLE3 if kind == "eagle3" else ())]
  rows += [(_PREFIX[kind] + theirs, ours) for theirs, ours in hf.LAYER_TENSORS[1:]]
  return {ours: theirs for theirs, ours in rows}


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
    server: matters for EAGLE-2 drafters; vLLM's have no vocabulary
  Raises:
    CheckpointError: the server's classes do not compute what this drafter does
  """
  tensors = {name: np.asarray(x) for name, x in hf.flatten(params).items()}
  has_bias = "fc_bias" in tensors and bool(np.any(tensors["fc_bias"]))
  raw = _config_json(config, server, has_bias)
  if not has_bias:
    tensors.pop("fc_bias", None)
  if config.kind == "eagle2" and server == "sglang":
    tensors.setdefault("fc_bias", np.zeros(config.layer.width, tensors["fc"].dtype))
  if config.kind == "eagle2" and server == "vllm":
    config = dataclasses.replace(config, vocab=())
  names, dtype = _names(config.kind), jnp.dtype(dtype or tensors["fc"].dtype)
  stored = {names[name]: x for name, x in tensors.items()}
  write(path, raw, stored, dtype, vocab_tables(config))


def write(
  path: str | pathlib.Path,
  raw: dict,
  stored: dict[str, np.ndarray],
  dtype: jnp.dtype,
  tables: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> None:
  """Writes a folder whose weights are of `dtype`; `tables` keep their own."""
  stored = {name: x.astype(dtype) for name, x in stored.items()}
  with hf.replacing(pathlib.Path(path)) as folder:
    hf.write_tensors(folder / hf.SINGLE, stored | tables)
    hf.write_json(folder / hf.CONFIG, raw | {"torch_dtype": str(dtype)})


def has_server(config: drafter.DrafterConfig) -> bool:
  """Whether a released server has a class for a drafter.

  Not for EAGLE-2 drafters with norms of q and k: Qwen3ForCausalLMEagle does not exist.
  """
  return not config.layer.qk_norm


def _config_json(
  config: drafter.DrafterConfig, server: str, has_fc_bias: bool
) -> dict[str, Any]:
  """The config.json of a drafter; raises if the server would compute something else."""
  layer, remedy = config.layer, "--config.drafter.architecture=LlamaForCausalLM"
  if config.kind not in _PREFIX or layer.architecture not in _FAMILIES:
    raise hf.CheckpointError(
      f"a drafter of kind {config.kind} with a layer of {layer.architecture} has no "
      f"published layout; train {' or '.join(_PREFIX)} for Qwen2, Qwen3 or Llama"
    )
  if has_fc_bias and (config.kind == "eagle3" or server == "vllm"):
    raise hf.CheckpointError(
      "this drafter's fc has a bias, which only SGLang's EAGLE-2 drafters have; train one "
      "without (fc_bias)"
    )
  raw = hf.unparse_config(layer) | {"tie_word_embeddings": False}
  if config.kind == "eagle3":
    if layer.qkv_bias or layer.qk_norm:
      raise hf.CheckpointError(
        "SGLang and vLLM have one class for EAGLE-3 drafters, whose attention has neither "
        f"biases nor norms of q and k; this drafter has: train one with {remedy}"
      )
    if len(config.taps) != 3:
      raise hf.CheckpointError(
        f"SGLang and vLLM feed EAGLE-3 drafters from three layers; this one reads "
        f"{len(config.taps)}"
      )
    return raw | {
      "architectures": ["LlamaForCausalLMEagle3"],
      "model_type": "llama",
      "draft_vocab_size": len(config.vocab) or None,  # null: the target's head
      "eagle_config": {"use_aux_hidden_state": True, _LAYER_IDS: list(config.taps)},
      _LAYER_IDS: [tap + 1 for tap in config.taps],
    }
  if server == "sglang":
    return raw | {"architectures": [f"{layer.architecture}Eagle"]}
  if layer.qk_norm:
    raise hf.CheckpointError(
      f"vLLM has no EAGLE-2 drafter with norms of q and k; train one with {remedy}"
    )
  return raw | {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "qkv_bias": layer.qkv_bias,
  }


def vocab_tables(config: drafter.DrafterConfig) -> dict[str, np.ndarray]:
  """Token i of the drafter is i + d2t[i] of the target, i64[U]; t2d bool[V] marks these."""
  if not config.vocab:
    return {}
  vocab = np.array(config.vocab, np.int64)
  t2d = np.zeros(config.layer.vocab_size, bool)
  t2d[vocab] = True
  return {"d2t": vocab - np.arange(len(vocab)), "t2d": t2d}


# --- in


def read(
  file: pathlib.Path, raw: dict, stored: hf.Tensors, target_config: config_lib.ModelConfig
) -> tuple[drafter.DrafterConfig, hf.Tensors, dict[str, str]]:
  """Reads a published layout: the drafter, its tensors, and path in our tree -> name.

  `raw` is the content of config.json, `file`.
  """
  try:
    _refuse_other_layouts(raw, stored)
    kind, stored = _renamed(stored)
    layer = _layer(raw, stored, kind, target_config)
    taps = _taps(raw, target_config) if kind == "eagle3" else ()
    shared = ("embed_tokens.weight", "lm_head.weight")[: 2 if kind == "eagle2" else 1]
    drop_copies(stored, shared, layer)
    if "fc.bias" in stored.lazy:
      stored.check("fc.bias", (layer.width,))
      if not np.any(stored.lazy["fc.bias"][:]):  # written for SGLang
        del stored.lazy["fc.bias"]
    vocab = _take_vocab(raw, stored, kind, layer.vocab_size)
    config = drafter.DrafterConfig(kind, layer, taps, "fc.bias" in stored.lazy, vocab)
  except hf.CheckpointError:
    raise
  except ValueError as e:
    raise hf.CheckpointError(f"{file}: {e!s:.350}; use another drafter") from e
  return config, stored, _names(kind)


def refuse_speculators(raw: dict) -> None:
  if "speculators_config" in raw or "speculators_model_type" in raw:
    raise ValueError(
      f"this is {_class(raw)} in the layout of vLLM's speculators, which is not supported; "
      f"{_SUPPORTED}"
    )


def _class(raw: dict) -> str:
  names = raw.get("architectures")
  name = names[0] if isinstance(names, list) and names else "a class without a name"
  return f"{name!s:.60}"


def _refuse_other_layouts(raw: dict, stored: hf.Tensors) -> None:
  refuse_speculators(raw)
  if not any(re.fullmatch(r"(model\.)?fc\.weight", n) for n in stored.lazy):
    raise ValueError(
      f"this is {_class(raw)} without fc.weight, which is not supported; {_SUPPORTED}"
    )
  layer = re.compile(r"(?:model\.)?(midlayer|layers\.\d+)\.")
  layers = {m[1] for n in stored.lazy if (m := layer.match(n))}
  if len(layers) > 1:
    raise ValueError(f"it has {len(layers)} layers; drafters of one are supported")


def _renamed(stored: hf.Tensors) -> tuple[str, hf.Tensors]:
  is_eagle3 = re.compile(r"(model\.)?midlayer\..*|.*hidden_norm\.weight").fullmatch
  kind = "eagle3" if any(map(is_eagle3, stored.lazy)) else "eagle2"
  return kind, unprefixed(stored, _PREFIX[kind])


def unprefixed(stored: hf.Tensors, first_layer: str = "layers.0.") -> hf.Tensors:
  """Takes "model." off the names, and leaves out buffers that old exports have."""
  found = hf.Tensors({}, {})
  for name, tensor in stored.lazy.items():
    short = re.sub(r"^layers\.0\.", first_layer, name.removeprefix("model."))
    if short.endswith("rotary_emb.inv_freq"):
      continue
    if short in found.lazy:
      raise ValueError(f"tensor {short:.60} exists twice, with and without a prefix")
    found.lazy[short], found.file[short] = tensor, stored.file[name]
  return found


def drop_copies(
  stored: hf.Tensors, names: Iterable[str], layer: config_lib.ModelConfig
) -> None:
  """Removes copies of the target's embedding and head, f[V D]."""
  for name in names:
    if name in stored.lazy:
      stored.check(name, (layer.vocab_size, layer.width))
      del stored.lazy[name]


def _layer(
  raw: dict, stored: hf.Tensors, kind: str, target_config: config_lib.ModelConfig
) -> config_lib.ModelConfig:
  attention = f"{_PREFIX[kind]}self_attn."
  biases, norms = (attention + n in stored.lazy for n in ("q_proj.bias", "q_norm.weight"))
  family = "Qwen3" if norms else "Qwen2" if biases else "Llama"
  # Training code often keeps what it copied from the target's config.json.
  known = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 1}
  for name in ("t2d", "embed_tokens.weight"):
    if name in stored.lazy:
      known["vocab_size"] = stored.lazy[name].get_shape()[0]
  raw = {key: x for key, x in raw.items() if key != "layer_types"}
  return layer_config(raw | known, target_config)


def layer_config(
  raw: dict, target_config: config_lib.ModelConfig
) -> config_lib.ModelConfig:
  """Parses the keys that a drafter's config.json has like a model's."""
  for key in _VARIANTS:
    if raw.get(key):
      raise ValueError(
        f"{key}={raw[key]!s:.60} is not supported and would change the drafts"
      )
  width = raw.get("target_hidden_size")
  if width not in (None, target_config.width):
    raise ValueError(
      f"target_hidden_size={width!s:.60}, but the target's width is {target_config.width}"
    )
  layer = hf.parse_config(raw)
  of_target = ("max_position", "tie_embeddings", "dtype", "unused_rows")
  return dataclasses.replace(layer, **{k: getattr(target_config, k) for k in of_target})


def _taps(raw: dict, target_config: config_lib.ModelConfig) -> tuple[int, ...]:
  eagle = raw.get("eagle_config") or {}
  if not isinstance(eagle, dict) or eagle.get("use_aux_hidden_state", True) is not True:
    raise ValueError(
      f"eagle_config={eagle!r:.60}: only use_aux_hidden_state=true is supported"
    )
  ids, offset = eagle.get(_LAYER_IDS), 0
  if ids is None:
    ids, offset = raw.get(_LAYER_IDS), 1
  if ids is None:
    return drafters.find("eagle3").customary_taps(target_config.num_layers)
  return layer_ids(ids, _LAYER_IDS, offset)


def layer_ids(ids: Any, key: str, offset: int = 0) -> tuple[int, ...]:
  """Layers of the target, as `DrafterConfig.taps`; `key` has `offset` for the first."""
  in_order = isinstance(ids, list) and all(type(i) is int for i in ids)
  if not in_order or not ids or sorted(set(ids)) != ids or ids[0] < offset:
    raise ValueError(f"{key}={ids!s:.60} are not increasing layers of the target")
  return tuple(i - offset for i in ids)


def _take_vocab(
  raw: dict, stored: hf.Tensors, kind: str, target_size: int
) -> tuple[int, ...]:
  if "d2t" in stored.lazy:
    return take_vocab(stored, math.prod(stored.lazy["d2t"].get_shape()), target_size)
  size = raw.get("draft_vocab_size")
  stored.lazy.pop("t2d", None)
  if size not in (None, target_size):
    raise ValueError(f"d2t is missing, but draft_vocab_size={size} in config.json")
  has_head = kind == "eagle3" and "lm_head.weight" in stored.lazy  # for all tokens
  return tuple(range(target_size)) if has_head else ()


def take_vocab(stored: hf.Tensors, size: int | None, target_size: int) -> tuple[int, ...]:
  """Removes the tables of a vocabulary from `stored`; returns its ids."""
  if size is None:
    return ()
  d2t, t2d = stored.lazy.pop("d2t", None), stored.lazy.pop("t2d", None)
  where = next(iter(stored.file.values()))
  if d2t is None or d2t.get_shape() != [size] or d2t.get_dtype() not in ("I64", "I32"):
    raise hf.CheckpointError(
      f"{where}: d2t is not a table of {size} tokens, unlike draft_vocab_size in "
      "config.json; use another drafter"
    )
  ids = np.arange(size) + d2t[:]
  if not size or ids.min() < 0 or ids.max() >= target_size or np.any(np.diff(ids) < 1):
    raise hf.CheckpointError(
      f"{where}: d2t does not name increasing tokens below {target_size}; use another "
      "drafter"
    )
  if t2d is not None:  # redundant with d2t; not filled in where that has all tokens
    marked = np.flatnonzero(t2d[:])
    is_empty = size == target_size and not marked.size
    if t2d.get_shape() != [target_size] or not (is_empty or np.array_equal(marked, ids)):
      raise hf.CheckpointError(f"{where}: t2d and d2t name different tokens")
  return tuple(ids.tolist())


def check_target(
  path: pathlib.Path, config: drafter.DrafterConfig, target_config: config_lib.ModelConfig
) -> None:
  """Raises CheckpointError if the drafter's target has another shape."""
  for name in ("vocab_size", "width", "tie_embeddings"):
    have, want = getattr(config.layer, name), getattr(target_config, name)
    if have != want:
      raise hf.CheckpointError(
        f"{path}: this drafter is for a target of {name} {have}, not {want}; train one "
        "with experiments.train_drafter"
      )
  if (
    config.taps and not 0 <= min(config.taps) <= max(config.taps) < target_config.num_layers
  ):
    raise hf.CheckpointError(
      f"{path}: this drafter reads layers {config.taps!s:.60} of the target (taps), which "
      f"has {target_config.num_layers} layers"
    )
