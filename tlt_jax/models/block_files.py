"""Drafters of blocks in the published layouts that SGLang and vLLM load: DFlash and DSpark.

    layout   classes                             guesses of K places        selector
    DFlash   DFlashDraftModel                    K - 1, of their own token  none
    DSpark   Qwen3DSparkModel, DSparkDraftModel  K, of the next token       markov_head

Both have `fc`, `hidden_norm`, `norm`, and layers of Qwen3's classes, whatever the target.
Neither embedding nor head is needed: copies of the target's are left out, and so is
`confidence_head`, which chooses how many drafts are verified, not which.

What a model's config.json does not have (`block_size`, `mask_token_id`, ...) is in
`dflash_config` or at the top level; `save` writes both for DSpark. In `target_layer_ids` i
is the output of layer i, from 0, as in `DrafterConfig.taps`.

A layer with `sliding_window` W is causal unless `is_causal` is false, in SGLang always.

Servers refuse a DSpark drafter without a selector: `save` adds one that is zero, and `read`
leaves it out.
"""

import dataclasses
import pathlib
import re
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import eagle_files
from tlt_jax.models import hf

_SHIFTED = {"DFlashDraftModel": False, "Qwen3DSparkModel": True, "DSparkDraftModel": True}
_LAYER_FAMILY = "Qwen3ForCausalLM"
_NO_SELECTOR = 16  # rank of one that is zero
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_NAMES = {
  "fc": "fc.weight",
  "hidden_norm/scale": "hidden_norm.weight",
  "norm/scale": "norm.weight",
  "before": _W1,
  "after": _W2,
}
# Keys that change the drafts unless they have these values.
_NEUTRAL = {
  "is_causal": (False,),
  "causal": (False,),
  "use_swa": (False,),
  "swa_window_size": (),
  "attention_sink_bias": (False,),
  "add_swa_attention_sink_bias": (False,),
  "is_neox_style": (True,),
  "rope_is_neox_style": (True,),
  "use_aux_hidden_state": (True,),
  "input_embedding_scale": (1,),
  "output_multiplier": (1,),
  "logit_scale": (1,),
  "final_logit_softcapping": (0,),
  "conv_kernel_size": (),
  "selector_rank": (0,),
  "gru_hidden_dim": (),
}
_NEUTRAL_IF = {  # the layout is shifted, or not
  True: dict(
    projector_type=("dspark",), shift_label=(True,), markov_head_type=("vanilla",)
  ),
  False: dict(projector_type=("dflash",), shift_label=(False,), markov_rank=(0,)),
}


def _names(num_layers: int) -> dict[str, str]:
  return _NAMES | {
    f"layers_{i}/{ours}": f"layers.{i}.{theirs}"
    for i in range(num_layers)
    for theirs, ours in hf.LAYER_TENSORS
  }


# --- out


def save(
  path: str | pathlib.Path,
  config: drafter.DrafterConfig,
  params: dict,
  server: Literal[eagle_files.SERVERS] = "sglang",
  dtype: str | None = None,
) -> None:
  """Writes the folder that a server loads as its drafter, whole or not at all.

  Servers draft among all tokens: a `vocab` is not written.

  Raises:
    CheckpointError: the server's classes do not compute what this drafter does
  """
  raw = _config_json(config, server)
  names, tensors = _names(config.layer.num_layers), hf.flatten(params)
  stored = {names[name]: np.asarray(x) for name, x in tensors.items()}
  if config.block.shifted and not config.block.rank:
    none = np.zeros((config.layer.vocab_size, _NO_SELECTOR), stored["fc.weight"].dtype)
    stored |= {_W1: none, _W2: none}
  eagle_files.write(path, raw, stored, jnp.dtype(dtype or stored["fc.weight"].dtype))


def _config_json(config: drafter.DrafterConfig, server: str) -> dict[str, Any]:
  """The config.json of a drafter; raises if the server would compute something else."""
  layer, block = config.layer, config.block
  if not block:
    raise hf.CheckpointError(
      f"a drafter of kind {config.kind} is none of blocks; train one of kind dspark"
    )
  if not layer.qk_norm or layer.qkv_bias:
    raise hf.CheckpointError(
      "DFlash and DSpark drafters have norms of q and k and no biases, unlike this one; "
      f"train one with --config.drafter.architecture={_LAYER_FAMILY}"
    )
  if block.mask_token is None or block.anchored:
    raise hf.CheckpointError(
      "this drafter has masks and inputs that DFlash and DSpark do not have; train one of "
      "kind dspark"
    )
  if block.rank and not block.shifted:
    raise hf.CheckpointError(
      "DFlash drafters have no selector; train one with block.rank=0, or with "
      "block.shifted=true for DSpark's layout"
    )
  if block.rank and config.vocab:
    raise hf.CheckpointError(
      f"this drafter's selector knows {len(config.vocab):,} tokens, those of servers all "
      f"{layer.vocab_size:,}; train one without a vocabulary (vocab_size=0)"
    )
  if block.window and server == "sglang":
    raise hf.CheckpointError(
      f"this drafter reads a window of {block.window} tokens, and SGLang makes blocks of "
      "layers with a window causal; export it for vLLM (--server=vllm), or train one with "
      "block.window=null"
    )
  kinds = ()
  if block.window:
    rope = config_lib.Rope(layer.rope_theta, layer.rope_scaling)
    kinds = (config_lib.LayerKind(block.window, rope),)
  layer = dataclasses.replace(layer, architecture=_LAYER_FAMILY, layers=kinds)
  keys = {"mask_token_id": block.mask_token, "target_layer_ids": list(config.taps)}
  raw = hf.unparse_config(layer) | {
    "tie_word_embeddings": False,
    "block_size": block.size,
    "is_causal": False,
    "dflash_config": keys | {"causal": False},
  }
  if not block.shifted:
    return raw | {"architectures": ["DFlashDraftModel"]}
  raw["dflash_config"]["projector_type"] = "dspark"
  selector = {"markov_rank": block.rank or _NO_SELECTOR, "markov_head_type": "vanilla"}
  own = {"architectures": ["Qwen3DSparkModel"], "enable_confidence_head": False}
  return raw | keys | selector | own


# --- in


def is_one(raw: dict) -> bool:
  """Whether a config.json is of this family of layouts, supported or not."""
  names = raw.get("architectures")
  is_named = re.compile(r"\w*(DFlash|DSpark|Domino)\w*").fullmatch
  return "dflash_config" in raw or (
    isinstance(names, list) and any(is_named(str(name)) for name in names)
  )


def read(
  file: pathlib.Path, raw: dict, stored: hf.Tensors, target_config: config_lib.ModelConfig
) -> tuple[drafter.DrafterConfig, hf.Tensors, dict[str, str]]:
  """Reads a published layout: the drafter, its tensors, and path in our tree -> name.

  `raw` is the content of config.json, `file`.
  """
  try:
    eagle_files.refuse_speculators(raw)
    shifted = _is_shifted(raw)
    stored = eagle_files.unprefixed(stored)
    for name in [name for name in stored.lazy if name.startswith("confidence_head.")]:
      del stored.lazy[name]
    _check_neutral(raw, file, shifted, target_config)
    layer, window = _layer(raw, stored, target_config)
    eagle_files.drop_copies(stored, ("embed_tokens.weight", "lm_head.weight"), layer)
    fields = {
      "size": _needed(raw, "block_size"),
      "shifted": shifted,
      "anchored": False,
      "mask_token": _needed(raw, "mask_token_id"),
      "window": window,
      "rank": _rank(raw, stored, layer.vocab_size) if shifted else 0,
    }
    keys = {"size": "block_size", "mask_token": "mask_token_id", "rank": "markov_rank"}
    block = config_lib.make(drafter.Block, fields, keys)
    if not 0 <= block.mask_token < layer.vocab_size:
      raise ValueError(f"mask_token_id={block.mask_token} is no token of the target's")
    ids = _needed(raw, "target_layer_ids")
    taps = eagle_files.layer_ids(ids, "target_layer_ids")
    config = drafter.DrafterConfig("block", layer, taps, block=block)
  except hf.CheckpointError:
    raise
  except ValueError as e:
    raise hf.CheckpointError(
      f"{file}: {e!s:.350}; use its original files, or another drafter"
    ) from e
  return config, stored, _names(layer.num_layers)


def _value(raw: dict, key: str) -> Any:
  """What `dflash_config` or the top level say; null is like a missing key."""
  own = raw.get("dflash_config") or {}
  if not isinstance(own, dict):
    raise ValueError(f"dflash_config={own!r:.60} is not an object")
  found = [x for x in (own.get(key), raw.get(key)) if x is not None]
  if found and found[0] != found[-1]:
    raise ValueError(f"{key}={found[-1]!s:.60}, but {found[0]!s:.60} in dflash_config")
  return found[0] if found else None


def _needed(raw: dict, key: str) -> Any:
  value = _value(raw, key)
  if value is None:
    raise ValueError(f"{key} is missing")
  return value


def _is_shifted(raw: dict) -> bool:
  names = raw.get("architectures")
  name = names[0] if isinstance(names, list) and names else names
  if not isinstance(name, str) or name not in _SHIFTED:
    raise ValueError(
      f"architectures={names!s:.60} is not supported; of drafters of blocks "
      f"{', '.join(_SHIFTED)} are"
    )
  return _SHIFTED[name]


def _check_neutral(
  raw: dict, file: pathlib.Path, shifted: bool, target_config: config_lib.ModelConfig
) -> None:
  for key, harmless in (_NEUTRAL | _NEUTRAL_IF[shifted]).items():
    value = _value(raw, key)
    if value is not None and value not in harmless:
      raise ValueError(f"{key}={value!s:.60} is not supported and would change the drafts")
  if file.with_name("mask_embedding.pt").exists():
    raise ValueError("its mask_embedding.pt, instead of a token's, is not supported")
  size = _value(raw, "draft_vocab_size")
  if size not in (None, raw.get("vocab_size")):
    raise ValueError(f"draft_vocab_size={size!s:.60}: part of a vocabulary is unsupported")
  layers = _value(raw, "num_target_layers")
  if layers not in (None, target_config.num_layers):
    raise ValueError(
      f"num_target_layers={layers!s:.60}, but the target has {target_config.num_layers}"
    )


def _layer(
  raw: dict, stored: hf.Tensors, target_config: config_lib.ModelConfig
) -> tuple[config_lib.ModelConfig, int | None]:
  """The layers, and the tokens of the context that blocks see; None: all."""
  count = len({m[1] for n in stored.lazy if (m := re.match(r"layers\.(\d+)\.", n))})
  if raw.get("num_hidden_layers") != count:
    raise ValueError(
      f"num_hidden_layers={raw.get('num_hidden_layers')!s:.60}, but there are tensors of "
      f"{count} layers"
    )
  known = {"architectures": [_LAYER_FAMILY]}
  layer = eagle_files.layer_config(raw | known, target_config)
  windows = {layer.layer_kind(i).window for i in range(count)}
  if len(windows) > 1:
    raise ValueError("layer_types: windows in some of the layers only are not supported")
  window = windows.pop()
  if window is None:
    return layer, None
  if _value(raw, "is_causal") is None and _value(raw, "causal") is None:
    raise ValueError(
      f"with sliding_window={window} and without is_causal its blocks are causal, which is "
      "not supported"
    )
  return dataclasses.replace(layer, layers=()), window


def _rank(raw: dict, stored: hf.Tensors, vocab_size: int) -> Any:
  """That of the selector; one that is zero is left out."""
  rank = _value(raw, "markov_rank")
  if rank is None and _W1 in stored.lazy:
    rank = stored.lazy[_W1].get_shape()[-1]
  if type(rank) is not int or rank < 1:
    return rank or 0
  for name in (_W1, _W2):
    stored.check(name, (vocab_size, rank))
  first, second = stored.lazy[_W1], stored.lazy[_W2]
  if np.any(first[:1]) or np.any(first[:]) or np.any(second[:]):
    return rank
  del stored.lazy[_W1], stored.lazy[_W2]
  return 0
