"""Published drafters of blocks: what they compute, and bit for bit there and back."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests import blocks
from tests import tiny
from tests.test_eagle_files import assert_equal
from tests.test_eagle_files import random_params
from tlt_jax.models import block_files
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.models import layers

# Heads of another width than D / N, GQA, and a policy without norms of q and k.
TARGET = dataclasses.replace(
  tiny.CONFIG, architecture="LlamaForCausalLM", qk_norm=False, num_layers=6
)
V, D, N, K, H, F = 64, 32, 4, 2, 16, 40
TAPS, MASK, RANK = [0, 2, 4], 63, 5
DSPARK = dict(markov_rank=RANK, markov_head_type="vanilla")
WINDOW = dict(
  layer_types=["sliding_attention"] * 3, sliding_window=8, use_sliding_window=True
)


@functools.cache
def tensors(layers=3, rank=0, seed=0):
  """As published: names and shapes of the files, spelled out."""
  rng, made = np.random.default_rng(seed), {}

  def add(name, *shape):
    made[f"{name}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)

  add("fc", D, len(TAPS) * D)
  add("hidden_norm", D)
  add("norm", D)
  for i in range(layers):
    add(f"layers.{i}.input_layernorm", D)
    add(f"layers.{i}.post_attention_layernorm", D)
    for name, heads in (("q", N), ("k", K), ("v", K)):
      add(f"layers.{i}.self_attn.{name}_proj", heads * H, D)
    add(f"layers.{i}.self_attn.o_proj", D, N * H)
    add(f"layers.{i}.self_attn.q_norm", H)
    add(f"layers.{i}.self_attn.k_norm", H)
    add(f"layers.{i}.mlp.gate_proj", F, D)
    add(f"layers.{i}.mlp.up_proj", F, D)
    add(f"layers.{i}.mlp.down_proj", D, F)
  if rank:
    add("markov_head.markov_w1", V, rank)
    add("markov_head.markov_w2", V, rank)
  return made


def config_json(architecture="DFlashDraftModel", own=None, **keys):
  return {
    "architectures": [architecture],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 5,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS} | (own or {}),
    "dtype": "bfloat16",
    "head_dim": H,
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": F,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 40960,
    "max_window_layers": 3,
    "num_attention_heads": N,
    "num_hidden_layers": 3,
    "num_key_value_heads": K,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": V,
  } | keys


def write(folder, raw, stored):
  folder.mkdir(exist_ok=True)
  raw = {key: x for key, x in raw.items() if x != "absent"}
  (folder / "config.json").write_text(json.dumps(raw))
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.numpy.save_file(stored, folder / "model.safetensors")
  return folder


def tree(stored):
  """Our parameters of the files' tensors, renamed by hand."""
  made = {}
  for name, x in stored.items():
    *path, last = name.removesuffix(".weight").replace("layers.", "layers_").split(".")
    short = {
      "self_attn": "attention",
      "input_layernorm": "input_norm",
      "post_attention_layernorm": "post_norm",
      "markov_w1": "before",
      "markov_w2": "after",
    }
    *path, last = (short.get(part, part) for part in (*path, last))
    node = made
    for part in path:
      if part != "markov_head":
        node = node.setdefault(part, {})
    node[last] = {"scale": x} if last.endswith("norm") else x
  return made


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("architecture", block_files._SHIFTED)
def test_a_published_folder_drafts_as_defined(architecture, window, tmp_path):
  """The head's inputs of a block, and the selector's scores, computed from the files."""
  shifted, keys, own = "DSpark" in architecture, {}, {}
  if shifted:
    keys |= DSPARK
  if window:
    keys |= WINDOW | {"is_causal": False}
  stored = tensors(rank=RANK if shifted else 0)
  folder = write(tmp_path / "d", config_json(architecture, own, **keys), stored)
  config, params = drafter_files.load(folder, TARGET)
  assert config.taps == tuple(TAPS) and config.layer.rope_theta == 1000
  assert config.layer.dtype == TARGET.dtype and config.layer.max_position == 4096
  assert config.block == drafter_lib.Block(
    size=5,
    shifted=shifted,
    mask_token=MASK,
    anchored=False,
    window=window,
    rank=RANK if shifted else 0,
  )
  assert_equal(params, tree(stored))
  rng, T, starts = np.random.default_rng(1), 20, (1, 6, 19)
  features = rng.normal(0, 1, (T, config.feature_width)).astype(np.float32)
  embedding = rng.normal(0, 1, (V, D)).astype(np.float32)
  pending, at = np.array([[7, 3, 9]]), np.array(starts)[:, None] + np.arange(5)
  behind = np.array(starts)[:, None] - 1 - np.arange(T)
  ahead = behind[:, None] + 1 + np.arange(5)[:, None]
  mask = (behind[:, None] >= 0) & (ahead < (window or 2 * T))
  mask = mask.reshape(-1, T)
  by = [layers.rotation(config.layer, x) for x in (np.arange(T)[None], at.reshape(1, -1))]
  x = drafter_lib.module(config).apply(
    {"params": params},
    {"embedding": jnp.asarray(embedding)},
    *(features[None], np.array([starts]) - 1, pending, by, mask[None]),
    method="of_anchors",
  )
  args = config, tree(stored), embedding, features
  expected = [
    blocks.definition(*args, *each) for each in zip(pending[0], starts, strict=True)
  ]
  assert x.shape == (1, 3, 5 if shifted else 4, D)
  np.testing.assert_allclose(x[0], expected, atol=2e-5)


def test_what_servers_do_not_need_may_be_there(tmp_path):
  """Copies of the target's, what chooses depths, prefixes, and keys at another place."""
  stored = tensors(rank=RANK)
  expected = drafter_files.load(
    write(tmp_path / "a", config_json("Qwen3DSparkModel", **DSPARK), stored), TARGET
  )
  more = {f"model.{name}": x for name, x in stored.items()} | {
    "model.embed_tokens.weight": np.ones((V, D), np.float32),
    "lm_head.weight": np.ones((V, D), np.float32),
    "confidence_head.proj.weight": np.ones((1, D + RANK), np.float32),
    "confidence_head.proj.bias": np.ones(1, np.float32),
  }
  keys = {"mask_token_id": MASK, "target_layer_ids": TAPS, "num_anchors": 512}
  head = {"enable_confidence_head": True, "confidence_head_with_markov": True}
  flat = config_json("Qwen3DSparkModel", **DSPARK, **keys, **head, dflash_config="absent")
  assert_equal(drafter_files.load(write(tmp_path / "b", flat, more), TARGET), expected)
  own = DSPARK | {"projector_type": "dspark", "block_size": 5}
  nested = config_json("DSparkDraftModel", own, block_size="absent")
  assert_equal(drafter_files.load(write(tmp_path / "c", nested, stored), TARGET), expected)
  with pytest.raises(hf.CheckpointError, match="embed_tokens.weight is F32 of shape"):
    wrong = stored | {"embed_tokens.weight": np.ones((V + 1, D), np.float32)}
    drafter_files.load(write(tmp_path / "d", nested, wrong), TARGET)


BLOCK = drafter_lib.Block(size=4, window=None, mask_token=63, anchored=False, rank=0)
BLOCKS = {
  "dflash": dataclasses.replace(BLOCK, shifted=False),
  "dflash with a window": dataclasses.replace(BLOCK, shifted=False, window=7),
  "dspark": dataclasses.replace(BLOCK, rank=6),
  "without selector": BLOCK,
  "with a window": dataclasses.replace(BLOCK, window=256, mask_token=0),
}
QWEN3 = dataclasses.replace(tiny.CONFIG, num_layers=6)
SCALING = config_lib.RopeScaling(8.0, 1.0, 4.0, 32)


def drafter_of(block, target=QWEN3, **changes):
  return drafter_lib.of_target(target, "block", taps=(1, 3), block=block, **changes)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_drafter_comes_back_bit_for_bit(name, tmp_path):
  """And is written again as the very same files."""
  target = dataclasses.replace(QWEN3, rope_scaling=SCALING, tie_embeddings=True)
  config = drafter_of(BLOCKS[name], target, num_layers=3)
  params = random_params(config, jnp.bfloat16)
  block_files.save(tmp_path / "a", config, params, "vllm")
  found, again = drafter_files.load(tmp_path / "a", target)
  assert found == config == drafter_files.load_shape(tmp_path / "a", target)
  assert_equal(again, params)
  block_files.save(tmp_path / "b", found, again, "vllm")
  for file in ("config.json", "model.safetensors"):
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_folder_is_what_servers_look_for(tmp_path):
  raw, stored = {}, {}
  for name in ("dflash", "dspark", "without selector"):
    config = drafter_of(BLOCKS[name], vocab=tiny.DRAFT_VOCAB if "out" in name else ())
    block_files.save(tmp_path / name, config, random_params(config), "sglang")
    stored[name] = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
    raw[name] = json.loads((tmp_path / name / "config.json").read_text())
    loaded, _ = drafter_files.load(tmp_path / name, QWEN3)
    assert loaded == dataclasses.replace(config, vocab=())  # servers draft among all
  own = {"mask_token_id": 63, "target_layer_ids": [1, 3]}
  assert raw["dflash"]["architectures"] == ["DFlashDraftModel"]
  assert raw["dflash"]["dflash_config"].items() >= own.items()
  assert raw["dspark"]["architectures"] == ["Qwen3DSparkModel"]
  assert raw["dspark"].items() >= (own | {"markov_rank": 6, "block_size": 4}).items()
  assert raw["dspark"]["layer_types"] == ["full_attention"] * 2
  assert {r["model_type"] for r in raw.values()} == {"qwen3"}
  published = tensors(2).keys()
  assert stored["dflash"].keys() == published
  assert stored["dspark"].keys() == stored["without selector"].keys()
  assert stored["dspark"].keys() == tensors(2, RANK).keys()
  assert stored["dspark"]["markov_head.markov_w2.weight"].shape == (64, 6)
  rank = raw["without selector"]["markov_rank"]  # zero is refused
  for i in (1, 2):
    none = stored["without selector"][f"markov_head.markov_w{i}.weight"]
    assert none.shape == (64, rank) and rank and not none.any()


@pytest.mark.parametrize(
  ("config", "server", "named"),
  [
    (drafter_of(dataclasses.replace(BLOCK, mask_token=None)), "vllm", "kind dspark"),
    (drafter_of(dataclasses.replace(BLOCK, anchored=True)), "vllm", "kind dspark"),
    (drafter_of(BLOCKS["with a window"]), "sglang", "--server=vllm"),
    (drafter_of(dataclasses.replace(BLOCK, rank=6, shifted=False)), "vllm", "block.rank=0"),
    (drafter_of(BLOCKS["dspark"], vocab=tiny.DRAFT_VOCAB), "vllm", "vocab_size=0"),
    (drafter_of(BLOCK, TARGET), "vllm", "architecture=Qwen3ForCausalLM"),
    (
      drafter_of(BLOCK, dataclasses.replace(QWEN3, qkv_bias=True)),
      "vllm",
      "architecture=Qwen3ForCausalLM",
    ),
  ],
)
def test_what_no_server_computes_is_not_written(config, server, named, tmp_path):
  with pytest.raises(hf.CheckpointError, match=named):
    block_files.save(tmp_path / "d", config, random_params(config), server)
  assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
  ("raw", "named"),
  [
    (config_json("DFlash2DraftModel"), "architectures=..DFlash2DraftModel"),
    (config_json("DominoDraftModel"), "DominoDraftModel"),
    (config_json(None), "architectures"),
    (config_json(own={"conv_kernel_size": 2}), "conv_kernel_size=2"),
    (config_json(own={"projector_type": "domino"}), "projector_type=domino"),
    (config_json(own={"shift_label": True}), "shift_label=True"),
    (config_json(own={"causal": True}), "causal=True"),
    (config_json(is_causal=True), "is_causal=True"),
    (config_json(**WINDOW), "is_causal"),
    (config_json(**WINDOW | {"sliding_window": None}, is_causal=False), "sliding_window"),
    (config_json(**WINDOW | {"use_sliding_window": False}), "sliding_window"),
    (
      config_json(
        **WINDOW | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
        is_causal=False,
      ),
      "layer_types",
    ),
    (config_json(own={"use_swa": True, "swa_window_size": 8}), "use_swa"),
    (config_json(own={"attention_sink_bias": True}), "attention_sink_bias"),
    (config_json(own={"final_logit_softcapping": 20.0}), "final_logit_softcapping"),
    (config_json(own={"output_multiplier": 0.5}), "output_multiplier"),
    (config_json(own={"input_embedding_scale": 2.5}), "input_embedding_scale"),
    (config_json(is_neox_style=False), "is_neox_style"),
    (config_json(attention_bias=True), "attention_bias"),
    (config_json(fc_norm=True), "fc_norm"),
    (config_json(draft_vocab_size=32), "draft_vocab_size=32"),
    (config_json(markov_rank=RANK), "markov_rank=5"),
    (config_json("DSparkDraftModel", DSPARK | {"markov_head_type": "rnn"}), "=rnn"),
    (config_json("DSparkDraftModel", markov_rank=-1), "rank"),
    (config_json(speculators_model_type="dflash"), "speculators"),
    (config_json(num_hidden_layers=4, layer_types="absent"), "num_hidden_layers=4"),
    (config_json(num_hidden_layers=10**9), "num_hidden_layers"),
    (config_json(num_hidden_layers=None), "num_hidden_layers"),
    (config_json(layer_types=["full_attention"] * 36), "layer_types"),
    (config_json(num_target_layers=36), "num_target_layers=36"),
    (config_json(own={"mask_token_id": V}), "mask_token_id=64"),
    (config_json(own={"mask_token_id": -1}), "mask_token_id=-1"),
    (config_json(own={"mask_token_id": None}), "mask_token_id is missing"),
    (config_json(own={"mask_token_id": "<mask>"}), "mask_token_id='<mask>'"),
    (config_json(mask_token_id=5), "mask_token_id=5, but 63"),
    (config_json(block_size="absent"), "block_size is missing"),
    (config_json(block_size=1), "block.size is at least 2"),
    (config_json(block_size=16.5), "block_size=16.5"),
    (config_json(own={"target_layer_ids": None}), "target_layer_ids is missing"),
    (config_json(own={"target_layer_ids": [4, 2, 0]}), "target_layer_ids"),
    (config_json(own={"target_layer_ids": [0, 2, 6]}), "taps"),
    (config_json(own={"target_layer_ids": [-1, 2, 4]}), "target_layer_ids"),
    (config_json(own={"target_layer_ids": [0, 2]}), "fc.weight is F32 of shape"),
    (config_json(dflash_config=[1]), "dflash_config"),
    (config_json(hidden_size=64), "fc.weight|64"),
    (config_json(vocab_size=65), "vocab_size 65"),
    (config_json(num_key_value_heads=4), "k_proj.weight is F32 of shape"),
    (config_json(quantization_config={"bits": 4}), "quantization_config"),
  ],
)
def test_other_variants_and_damaged_configs_are_one_clear_error(raw, named, tmp_path):
  folder = write(tmp_path / "d", raw, tensors())
  with pytest.raises(hf.CheckpointError, match=named) as e:
    drafter_files.load(folder, TARGET)
  assert str(folder) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"fc.weight": None}, "lacks tensor fc.weight"),
    ({"hidden_norm.weight": None}, "lacks tensor hidden_norm.weight"),
    ({"layers.1.self_attn.q_norm.weight": None}, "lacks tensor layers.1.self_attn.q_norm"),
    ({"fc.weight": np.zeros((D, D), np.float32)}, "fc.weight is F32 of shape"),
    ({"norm.weight": np.zeros(D, np.int8)}, "norm.weight is I8"),
    ({"markov_head.markov_w2.weight": None}, "lacks tensor markov_head.markov_w2.weight"),
    (
      {"markov_head.markov_w1.weight": np.zeros((V, 9), np.float32)},
      "markov_w1.weight is F32 of shape",
    ),
    ({"markov_head.gate_proj.weight": np.zeros((RANK, D), np.float32)}, "gate_proj.weight"),
    ({"d2t": np.zeros(32, np.int64)}, "tensor d2t"),
    ({"lm_head.weight": np.zeros((32, D), np.float32)}, "lm_head.weight is F32 of shape"),
    ({"mask_hidden": np.zeros(D, np.float32)}, "tensor mask_hidden"),
    ({"model.fc.weight": np.zeros((D, 3 * D), np.float32)}, "fc.weight exists twice"),
    ({"layers.3.mlp.up_proj.weight": np.zeros((F, D), np.float32)}, "tensors of 4 layers"),
    (
      {"layers.0.attention_conv.base_kernel": np.zeros((2, 2, D), np.float32)},
      "layers.0.attention_conv.base_kernel",
    ),
  ],
)
def test_damaged_tensors_are_one_clear_error(changes, named, tmp_path):
  raw = config_json("DSparkDraftModel", **DSPARK)
  folder = write(tmp_path / "d", raw, tensors(rank=RANK) | changes)
  with pytest.raises(hf.CheckpointError, match=named) as e:
    drafter_files.load(folder, TARGET)
  assert str(folder) in str(e.value) and "\n" not in str(e.value)


def test_a_mask_in_a_file_of_its_own_is_refused(tmp_path):
  folder = write(tmp_path / "d", config_json(), tensors())
  (folder / "mask_embedding.pt").touch()
  with pytest.raises(hf.CheckpointError, match="mask_embedding.pt"):
    drafter_files.load(folder, TARGET)
