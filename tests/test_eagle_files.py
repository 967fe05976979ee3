"""Drafters in published layouts: bit for bit there and back, and torch's logits."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests import tiny
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import eagle_files
from tlt_jax.models import hf
from tlt_jax.models import layers

GOLDEN = pathlib.Path(__file__).parent / "golden" / "drafters"
NAMES = ("qwen2_eagle2", "llama_eagle2", "llama_eagle3")
LAYERS = 8  # of the target


def target_of(architecture: str, **changes) -> config_lib.ModelConfig:
  return dataclasses.replace(
    tiny.CONFIG,
    architecture=f"{architecture}ForCausalLM",
    num_layers=LAYERS,
    qk_norm=architecture == "Qwen3",
    qkv_bias=architecture == "Qwen2",
    **changes,
  )


QWEN2, QWEN3, LLAMA = map(target_of, ("Qwen2", "Qwen3", "Llama"))
SCALING = config_lib.RopeScaling(8.0, 1.0, 4.0, 32)
LLAMA_LAYER = dict(architecture="LlamaForCausalLM", qkv_bias=False, qk_norm=False)
# Target, drafter, server.
CASES = {
  "qwen2": (QWEN2, drafter_lib.of_target(QWEN2), "sglang"),
  "llama in vllm": (LLAMA, drafter_lib.of_target(LLAMA), "vllm"),
  "llama with a bias": (LLAMA, drafter_lib.of_target(LLAMA, fc_bias=True), "sglang"),
  "part of the vocabulary": (
    QWEN2,
    drafter_lib.of_target(QWEN2, vocab=tiny.DRAFT_VOCAB),
    "sglang",
  ),
  "eagle3": (LLAMA, drafter_lib.of_target(LLAMA, "eagle3"), "sglang"),
  "eagle3 for qwen2, own head": (
    QWEN2,
    drafter_lib.of_target(QWEN2, "eagle3", vocab=tiny.DRAFT_VOCAB, **LLAMA_LAYER),
    "vllm",
  ),
  "eagle3, tied and scaled": (
    target_of("Llama", tie_embeddings=True, rope_scaling=SCALING),
    drafter_lib.of_target(
      target_of("Llama", tie_embeddings=True, rope_scaling=SCALING),
      "eagle3",
      vocab=tuple(range(64)),
      taps=(0, 1, 3),
    ),
    "sglang",
  ),
}


def random_params(config: drafter_lib.DrafterConfig, dtype=jnp.float32):
  """Every parameter random, biases and norms too."""
  flat, tree = jax.tree.flatten(drafter_lib.abstract_params(config))
  rng = np.random.default_rng(0)
  made = [jnp.asarray(rng.normal(size=x.shape), dtype) for x in flat]
  params = jax.tree.unflatten(tree, made)
  return jax.tree.map(
    lambda x: getattr(x, "value", x), params, is_leaf=lambda x: hasattr(x, "value")
  )


def assert_equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


@pytest.mark.parametrize("case", CASES)
def test_a_drafter_comes_back_bit_for_bit(case, tmp_path):
  """And is written again as the very same files."""
  target, config, server = CASES[case]
  params = random_params(config, jnp.bfloat16)
  eagle_files.save(tmp_path / "a", config, params, server)
  found, again = drafter_files.load(tmp_path / "a", target)
  assert found == config
  assert_equal(again, params)
  assert len(drafter_files.load_shape(tmp_path / "a", target).vocab) == len(config.vocab)
  eagle_files.save(tmp_path / "b", found, again, server)
  for name in ("config.json", "model.safetensors"):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_folder_is_what_servers_look_for(tmp_path):
  """Names of classes and tensors; zeros where SGLang's class would leave a bias random."""
  stored, raw = {}, {}
  for case, (_, config, server) in CASES.items():
    eagle_files.save(tmp_path / case, config, random_params(config), server)
    stored[case] = safetensors.numpy.load_file(tmp_path / case / "model.safetensors")
    raw[case] = json.loads((tmp_path / case / "config.json").read_text())
  name = {case: raw[case]["architectures"][0] for case in CASES}
  assert name["qwen2"] == "Qwen2ForCausalLMEagle"
  assert name["llama in vllm"] == "EagleLlamaForCausalLM"
  assert name["eagle3"] == "LlamaForCausalLMEagle3"
  eagle2 = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
  eagle2 |= {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
  eagle2 |= {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
  biases = {f"layers.0.self_attn.{p}_proj.bias" for p in "qkv"}
  assert stored["llama with a bias"].keys() == eagle2
  assert stored["llama in vllm"].keys() == eagle2 - {"fc.bias"}
  assert stored["qwen2"].keys() == eagle2 | biases
  assert (
    not stored["qwen2"]["fc.bias"].any() and stored["llama with a bias"]["fc.bias"].any()
  )
  assert stored["qwen2"]["fc.weight"].shape == (32, 64)
  own = stored["eagle3 for qwen2, own head"]
  assert {"midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight"} < own.keys()
  assert own["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
  assert own["lm_head.weight"].shape == (32, 32) and own["d2t"].dtype == np.int64
  assert raw["eagle3"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
  assert raw["eagle3"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
  assert not any(r["tie_word_embeddings"] for r in raw.values())  # SGLang deletes it twice


def golden(name: str):
  """The drafter of a folder, its target, and what torch says of it."""
  arrays = np.load(GOLDEN / name / "golden.npz")
  raw = json.loads((GOLDEN / name / "config.json").read_text())
  target = config_lib.ModelConfig(
    architecture="Qwen2ForCausalLM" if "qwen2" in name else "LlamaForCausalLM",
    vocab_size=raw["vocab_size"],
    width=raw["hidden_size"],
    mlp_width=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position=64,
    qkv_bias="qwen2" in name,
  )
  return target, *drafter_files.load(GOLDEN / name, target), arrays


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_torch(name):
  """Of a first drafting step over the target's features, and a second over its output."""
  _, config, params, a = golden(name)
  frozen = {"embedding": jnp.asarray(a["embedding"]), "head": jnp.asarray(a["head"])}
  T = a["features"].shape[1]

  def where(n):
    by = layers.rotation(config.layer, jnp.arange(n)[None])
    return by, jnp.tril(jnp.ones((1, n, n), bool))

  @jax.jit
  def draft(params):
    def run(module):
      h = module.features(jnp.asarray(a["features"]))
      once, _ = module(frozen, h, a["tokens"][:, :T], *where(T))
      h = jnp.concatenate([h, once[:, -1:]], 1)
      both, _ = module(frozen, h, a["tokens"], *where(T + 1))
      return both, module.logits(module.output_head(frozen), both)

    return drafter_lib.Drafter(config).apply({"params": params}, method=run)

  outputs, logits = draft(params)
  np.testing.assert_allclose(outputs, a["outputs"], atol=1e-4)
  np.testing.assert_allclose(logits, a["logits"], atol=1e-4)


def test_a_published_folder_keeps_what_it_computes(tmp_path):
  """A bias that is not there is none; the embedding goes; the layers it reads stay."""
  _, config, params, _ = golden("qwen2_eagle2")
  assert not config.fc_bias and config.layer.rope_theta == 1000
  _, config, params, _ = golden("llama_eagle2")
  assert config.fc_bias and config.layer.rope_theta == 10_000 and "embedding" not in params
  target, config, params, a = golden("llama_eagle3")
  assert config.taps == (0, 2, 4) and len(config.vocab) == 12
  eagle_files.save(tmp_path, config, params)
  assert_equal(drafter_files.load(tmp_path, target), (config, params))
  stored = safetensors.numpy.load_file(GOLDEN / "llama_eagle3" / "model.safetensors")
  written = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert_equal(written, stored)


def edited(tmp_path, name, tensors=(), **keys) -> pathlib.Path:
  """A copy of a golden folder with other tensors and keys; None removes."""
  folder = tmp_path / "edited"
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(GOLDEN / name, folder)
  stored = safetensors.numpy.load_file(folder / "model.safetensors") | dict(tensors)
  stored = {k: x for k, x in stored.items() if x is not None}
  safetensors.numpy.save_file(stored, folder / "model.safetensors")
  raw = json.loads((folder / "config.json").read_text()) | keys
  (folder / "config.json").write_text(json.dumps(raw))
  return folder


def test_names_as_training_code_leaves_them_are_read(tmp_path):
  """With "model." before them, and with the head; d2t alone says the vocabulary."""
  target, config, params, a = golden("llama_eagle2")
  stored = safetensors.numpy.load_file(GOLDEN / "llama_eagle2" / "model.safetensors")
  prefixed = {f"model.{k}": x for k, x in stored.items()} | dict.fromkeys(stored)
  folder = edited(tmp_path, "llama_eagle2", prefixed | {"lm_head.weight": a["head"]})
  assert_equal(drafter_files.load(folder, target), (config, params))
  target, config, params, _ = golden("llama_eagle3")
  stored = safetensors.numpy.load_file(GOLDEN / "llama_eagle3" / "model.safetensors")
  mid = {k for k in stored if k.startswith("midlayer.")}
  renamed = {k.replace("midlayer.", "layers.0."): stored[k] for k in mid}
  folder = edited(tmp_path, "llama_eagle3", renamed | dict.fromkeys(mid) | {"t2d": None})
  assert_equal(drafter_files.load(folder, target), (config, params))


@pytest.mark.parametrize(
  ("tensors", "keys"),
  [
    ({}, {"num_hidden_layers": 40}),
    ({}, {"num_hidden_layers": 40, "layer_types": ["full_attention"] * 40}),
    ({}, {"num_hidden_layers": 36, "max_window_layers": 36, "use_sliding_window": False}),
    ({}, {"num_hidden_layers": 0}),
    ({}, {"draft_vocab_size": None}),
    ({}, {"draft_vocab_size": 7}),
    ({}, {"vocab_size": 7}),
    ({}, {"architectures": ["LlamaForCausalLM"]}),
    ({}, {"architectures": None}),
    ({"t2d": lambda a: a["t2d"].astype(np.uint8)}, {}),
    ({"t2d": lambda a: a["t2d"].astype(np.int64)}, {}),
    ({"d2t": lambda a: a["d2t"].astype(np.int32)}, {}),
  ],
)
def test_tensors_decide_where_config_json_says_otherwise(tensors, keys, tmp_path):
  target, config, params, _ = golden("llama_eagle3")
  stored = safetensors.numpy.load_file(GOLDEN / "llama_eagle3" / "model.safetensors")
  tensors = {name: make(stored) for name, make in tensors.items()}
  folder = edited(tmp_path, "llama_eagle3", tensors, **keys)
  assert_equal(drafter_files.load(folder, target), (config, params))


@pytest.mark.parametrize("t2d", [None, np.zeros, np.ones])
@pytest.mark.parametrize("key", [{}, {"draft_vocab_size": None}, {"draft_vocab_size": 32}])
def test_a_full_vocabulary_may_have_empty_tables(t2d, key, tmp_path):
  target, config, _, _ = golden("llama_eagle3")
  V, rng = target.vocab_size, np.random.default_rng(0)
  tensors = {
    "d2t": np.zeros(V, np.int64),
    "t2d": None if t2d is None else t2d(V, bool),
    "lm_head.weight": rng.normal(size=(V, target.width)).astype(np.float32),
  }
  folder = edited(tmp_path, "llama_eagle3", tensors, **key)
  found, params = drafter_files.load(folder, target)
  assert found == dataclasses.replace(config, vocab=tuple(range(V)))
  np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])


LAYER_1 = {"layers.1.mlp.up_proj.weight": np.zeros((4, 4), np.float32)}


@pytest.mark.parametrize(
  ("tensors", "keys", "named"),
  [
    ({}, {"speculators_model_type": "eagle3"}, "vLLM's speculators, which is not supp"),
    (
      {"fc.weight": None},
      {"architectures": ["Eagle3Speculator"], "speculators_config": {}},
      "Eagle3Speculator in the layout of vLLM's speculators",
    ),
    ({"fc.weight": None}, {"architectures": ["MedusaModel"]}, "this is MedusaModel"),
    ({"fc.weight": None}, {"architectures": None}, "a class without a name"),
    (LAYER_1, {}, "2 layers; drafters of one"),
    ({"t2d": np.zeros(7, bool)}, {}, "d2t does not name"),
    ({"d2t": np.zeros(3, np.float32)}, {}, "d2t is not a table"),
  ],
)
def test_what_is_not_supported_is_called_so(tensors, keys, named, tmp_path):
  target, *_ = golden("llama_eagle3")
  folder = edited(tmp_path, "llama_eagle3", tensors, **keys)
  with pytest.raises(hf.CheckpointError, match=named) as e:
    drafter_files.load(folder, target)
  assert str(folder) in str(e.value) and "download it again" not in str(e.value)


@pytest.mark.parametrize(
  ("key", "value"), [("fc_norm", True), ("rope_scaling", {"rope_type": "yarn"})]
)
def test_a_variant_that_computes_something_else_is_refused(key, value, tmp_path):
  target, *_ = golden("llama_eagle3")
  folder = edited(tmp_path, "llama_eagle3", **{key: value})
  with pytest.raises(hf.CheckpointError, match="config.json"):
    drafter_files.load(folder, target)


@pytest.mark.parametrize(
  ("target", "changes", "server"),
  [
    (QWEN2, dict(kind="eagle3"), "sglang"),  # biases and norms
    (QWEN3, {}, "vllm"),  # norms of q and k
    (LLAMA, dict(kind="eagle3", taps=(0, 1)), "sglang"),
    (LLAMA, dict(kind="my_package.mtp", taps=(0, 1)), "sglang"),
  ],
)
def test_what_no_server_computes_is_not_written(target, changes, server, tmp_path):
  config = drafter_lib.of_target(target, **changes)
  with pytest.raises(hf.CheckpointError):
    eagle_files.save(tmp_path / "d", config, random_params(config), server)
  assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
  ("tensors", "keys", "named"),
  [
    ({"fc.weight": None}, {}, "fc.weight"),
    ({"x": np.zeros(3, np.float32)}, {}, "tensor x"),
    ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [9, 10, 11]}}, "taps"),
  ],
)
def test_what_is_damaged_is_one_clear_error(tensors, keys, named, tmp_path):
  target, *_ = golden("llama_eagle3")
  folder = edited(tmp_path, "llama_eagle3", tensors, **keys)
  with pytest.raises(hf.CheckpointError, match=named) as e:
    drafter_files.load(folder, target)
  assert str(folder) in str(e.value) and "\n" not in str(e.value)
