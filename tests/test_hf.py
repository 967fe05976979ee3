"""Hugging Face folders: the same logits as transformers, nothing lost, clear errors."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest
import safetensors.numpy

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import hf
from tlt_jax.models import target

GOLDEN = pathlib.Path(__file__).parent / "golden"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = ("qwen2", "qwen2_tied", "qwen3", "llama3")
LEGACY = {  # the transformers 4 spelling of llama3's `rope_parameters`
  "rope_parameters": None,
  "rope_theta": 100.0,
  "rope_scaling": {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
  },
  "dtype": None,
  "torch_dtype": "torch.bfloat16",
}


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, positions, cache=None):
  """f32[B T V] and the cache."""
  _, logits, cache = target.Target(config).apply(
    {"params": params},
    tokens,
    positions,
    cache=cache,
    method=target.Target.features_and_logits,
  )
  return logits, cache


def full_logits(config, params, ids):
  """Logits of one uncached pass over i32[B T]."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  return np.asarray(forward(config, params, ids, positions)[0])


def golden(name):
  """The token ids and transformers' logits of a golden model."""
  data = np.load(GOLDEN / name / "golden.npz")
  return data["ids"], data["logits"]


def flat(params):
  return {jax.tree_util.keystr(k): x for k, x in jax.tree.leaves_with_path(params)}


def assert_same(a, b):
  """Two parameter trees are equal in names, dtypes and bits."""
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for name, x in a.items():
    assert x.dtype == b[name].dtype, name
    assert np.asarray(x).tobytes() == np.asarray(b[name]).tobytes(), name


def copy(name, tmp_path, **config):
  """A golden model to damage, with these keys of config.json changed (None: removed)."""
  path = tmp_path / name
  shutil.copytree(GOLDEN / name, path)
  file = path / "config.json"
  raw = {**json.loads(file.read_text()), **config}
  file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
  return path


def edit(path, change):
  """Applies `change` to the dict of tensors of a single-file model."""
  tensors = safetensors.numpy.load_file(path / "model.safetensors")
  change(tensors)
  safetensors.numpy.save_file(tensors, path / "model.safetensors")


def message(path):
  """The one line with which loading a folder fails."""
  with pytest.raises(hf.CheckpointError) as e:
    hf.load(path)
  assert "\n" not in str(e.value)
  return str(e.value)


# --- parity


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
  """One pass over all tokens gives the logits that transformers gave."""
  config, params = hf.load(GOLDEN / name)
  ids, want = golden(name)
  np.testing.assert_allclose(full_logits(config, params, ids), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_gives_the_same_logits(name):
  """So does a prefill of ragged rows followed by decoding token by token."""
  config, params = hf.load(GOLDEN / name)
  ids, want = golden(name)
  B, T = ids.shape
  start = np.array([5, 9])  # row 1 is four tokens ahead
  cache = cache_lib.init(config, B, T + 3)
  positions = np.broadcast_to(np.arange(9), (B, 9))
  got, cache = forward(config, params, ids[:, :9], positions, cache)
  row0, row1 = [np.asarray(got)[b, : start[b]] for b in range(B)]
  steps = []
  for i in range(T - 9):
    at = (start + i)[:, None]
    got, cache = forward(config, params, np.take_along_axis(ids, at, 1), at, cache)
    steps.append(np.asarray(got)[:, 0])
  steps = np.stack(steps, 1)
  row0, row1 = np.concatenate([row0, steps[0]]), np.concatenate([row1, steps[1]])
  np.testing.assert_allclose(row0, want[0, : len(row0)], rtol=0, atol=1e-4)
  np.testing.assert_allclose(row1, want[1], rtol=0, atol=1e-4)


def test_both_spellings_of_rope_and_dtype(tmp_path):
  """transformers 4 wrote rope_theta, rope_scaling (type) and torch_dtype."""
  config, _ = hf.load(GOLDEN / "llama3")
  legacy = hf.load_config(copy("llama3", tmp_path, **LEGACY))
  assert legacy == dataclasses.replace(config, dtype="bfloat16")
  assert legacy.rope_scaling is not None


def test_optional_keys_have_the_family_defaults(tmp_path):
  """head_dim, kv heads, theta, ... default as in transformers."""
  keys = ("head_dim", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "dtype")
  config = hf.load_config(copy("llama3", tmp_path, **dict.fromkeys(keys)))
  assert (config.head_dim, config.num_kv_heads) == (2, 8)
  assert (config.rope_theta, config.norm_eps, config.dtype) == (1e4, 1e-6, "float32")
  assert hf.load_config(copy("qwen3", tmp_path, head_dim=None)).head_dim == 128


@pytest.mark.parametrize(
  "change",
  [
    dict(use_sliding_window=False, sliding_window=8),
    dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
  ],
)
def test_an_unused_sliding_window_is_no_obstacle(tmp_path, change):
  """Qwen2.5 ships a window that no layer uses."""
  hf.load(copy("qwen2", tmp_path, **change, layer_types=None))


# --- round trips


@pytest.mark.parametrize("name", NAMES)
def test_import_export_import_is_bit_equal(name, tmp_path):
  """Nothing is lost, neither in our tree nor in the file's tensors."""
  config, params = hf.load(GOLDEN / name)
  hf.save(tmp_path / "out", config, params)
  again, params2 = hf.load(tmp_path / "out")
  assert again == config
  assert_same(params, params2)
  theirs = {}
  for file in (GOLDEN / name).glob("*.safetensors"):
    theirs |= safetensors.numpy.load_file(file)
  assert_same(theirs, safetensors.numpy.load_file(tmp_path / "out/model.safetensors"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_keep_their_dtype(dtype, tmp_path):
  """Half precision goes through files as it is; `dtype` converts on loading."""
  config, params = hf.load(GOLDEN / "qwen2", dtype=dtype)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  config = dataclasses.replace(config, dtype=dtype)
  hf.save(tmp_path, config, params)
  again, params2 = hf.load(tmp_path)
  assert again.dtype == dtype
  assert_same(params, params2)
  _, wide = hf.load(tmp_path, dtype="float32")
  assert_same(jax.tree.map(lambda x: x.astype("float32"), params), wide)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_stored_in_the_format_that_its_config_names(dtype, tmp_path):
  """Trained in float32, as it is; rounded once, by numpy as by jax."""
  config, params = hf.load(GOLDEN / "qwen2")
  config = dataclasses.replace(config, dtype=dtype)
  hf.save(tmp_path, config, params, dtype=dtype)
  _, again = hf.load(tmp_path)
  assert_same(again, jax.tree.map(lambda x: x.astype(dtype), params))
  stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert {str(x.dtype) for x in stored.values()} == {dtype}


def test_large_models_are_split_over_files(tmp_path):
  """Above the limit there is an index; a smaller save later leaves no stale shard."""
  config, params = hf.load(GOLDEN / "llama3")
  hf.save(tmp_path, config, params, max_file_bytes=8000)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  assert index["metadata"]["total_size"] == size
  assert_same(params, hf.load(tmp_path)[1])
  hf.save(tmp_path, config, params)
  assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
  assert_same(params, hf.load(tmp_path)[1])


@pytest.mark.parametrize("dies_in", ["save_file", "replace"])
def test_a_killed_save_leaves_no_mixture(dies_in, tmp_path, monkeypatch):
  """What loads after a kill is the old checkpoint, or nothing; the next save heals it."""
  config, old = hf.load(GOLDEN / "llama3")
  new = jax.tree.map(lambda x: x + 1, old)
  hf.save(tmp_path, config, old, max_file_bytes=8000)
  module = safetensors.numpy if dies_in == "save_file" else os
  real, calls = getattr(module, dies_in), []

  def die_on_the_second(*args, **kwargs):
    calls.append(args)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return real(*args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(module, dies_in, die_on_the_second)
    with pytest.raises(KeyboardInterrupt):
      hf.save(tmp_path, config, new, max_file_bytes=8000)
  if dies_in == "save_file":
    assert_same(old, hf.load(tmp_path)[1])
  else:
    assert "config.json" in message(tmp_path)
  hf.save(tmp_path, config, new)
  assert_same(new, hf.load(tmp_path)[1])
  assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_what_cannot_be_expressed_is_not_saved(tmp_path):
  """A config its architecture does not have, or parameters of another model."""
  config, params = hf.load(GOLDEN / "llama3")
  with pytest.raises(hf.CheckpointError, match="cannot express qk_norm=True"):
    hf.save(tmp_path, dataclasses.replace(config, qk_norm=True), params)
  with pytest.raises(hf.CheckpointError, match="GPT2LMHeadModel cannot be saved"):
    other = dataclasses.replace(config, architecture="GPT2LMHeadModel")
    hf.save(tmp_path, other, params)
  with pytest.raises(hf.CheckpointError, match="parameter head: .* nothing, found"):
    hf.save(tmp_path, dataclasses.replace(config, tie_embeddings=True), params)
  assert not os.listdir(tmp_path)


# --- sharding


@pytest.mark.parametrize("rules", [axes.ROLLOUT, axes.TRAIN])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3", "llama3"])
def test_sharded_loading_equals_unsharded(name, rules, tmp_path):
  """On a 2x2 mesh each device holds its part, and the same bits; saving gathers them."""
  mesh = axes.make_mesh(model=2, devices=jax.devices()[:4])
  config, whole = hf.load(GOLDEN / name)
  _, params = hf.load(GOLDEN / name, mesh, rules)
  want = axes.shardings(mesh, rules, target.abstract_params(config))
  jax.tree.map(lambda x, s: np.testing.assert_equal(x.sharding, s), params, want)
  assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
  assert_same(whole, params)
  hf.save(tmp_path, config, params)
  assert_same(whole, hf.load(tmp_path)[1])


def test_a_sharded_model_computes_the_same():
  """Tensor-parallel logits equal the golden ones; the default rules are the rollout's."""
  mesh = axes.make_mesh(model=2, devices=jax.devices()[:4])
  config, params = hf.load(GOLDEN / "llama3", mesh)
  assert params["head"].sharding.spec == PartitionSpec(axes.MODEL, None)
  ids, want = golden("llama3")
  np.testing.assert_allclose(full_logits(config, params, ids), want, rtol=0, atol=1e-4)


# --- errors


def remove(path, name):
  edit(path, lambda tensors: tensors.pop(name))


def replace(path, name, change):
  edit(path, lambda tensors: tensors.update({name: change(tensors[name])}))


def shorten(file, kept):
  file.write_bytes(file.read_bytes()[:kept])


BIAS = "model.layers.1.self_attn.k_proj.bias"
EMBEDDING = "model.embed_tokens.weight"
SHARD = "model-00002-of-00004.safetensors"
# What happens to a golden model, and what the error names.
FAULTS = {
  "no config.json": ("qwen2", lambda p: (p / "config.json").unlink(), "config.json"),
  "no weights": ("qwen2", lambda p: (p / SINGLE).unlink(), SINGLE),
  "half of the weights": ("qwen2", lambda p: shorten(p / SINGLE, -4), SINGLE),
  "no shard": ("qwen3", lambda p: (p / SHARD).unlink(), SHARD),
  "another shard": (
    "qwen3",
    lambda p: shutil.copy(p / SHARD.replace("2", "4", 1), p / SHARD),
    SHARD,
  ),
  "a lost tensor": ("qwen2", lambda p: remove(p, BIAS), BIAS),
  "a lost head": ("llama3", lambda p: remove(p, "lm_head.weight"), "lm_head.weight"),
  "another shape": ("qwen2", lambda p: replace(p, BIAS, lambda x: x[:-1]), BIAS),
  "an extra tensor": (
    "llama3",
    lambda p: edit(p, lambda t: t.update({BIAS: np.ones(16, np.float32)})),
    BIAS,
  ),
  "a head that is not the embedding": (
    "qwen2_tied",
    lambda p: edit(p, lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1})),
    "lm_head.weight",
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_damaged_or_missing_is_named(fault, tmp_path):
  name, damage, named = FAULTS[fault]
  path = copy(name, tmp_path)
  damage(path)
  assert named in message(path)


def test_a_pickle_is_never_loaded(tmp_path):
  path = copy("qwen2", tmp_path)
  (path / SINGLE).rename(path / "pytorch_model.bin")
  assert "pytorch_model.bin" in message(path) and "never loaded" in message(path)


def test_copies_and_buffers_are_passed_over(tmp_path):
  """A tied head that is the embedding, and rotary frequencies of old exports."""
  path = copy("qwen2_tied", tmp_path)
  _, params = hf.load(path)
  buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
  edit(path, lambda t: t.update(buffer | {"lm_head.weight": t[EMBEDDING]}))
  assert_same(params, hf.load(path)[1])


SLIDING = dict(use_sliding_window=True, sliding_window=8, layer_types=None)
UNSUPPORTED = [
  ("qwen2", dict(architectures=["MistralForCausalLM"]), "MistralForCausalLM"),
  ("qwen2", SLIDING | dict(max_window_layers=1), "sliding-window"),
  ("qwen3", dict(layer_types=["full_attention", "sliding_attention"]), "sliding-window"),
  ("llama3", dict(rope_parameters={"rope_type": "yarn"}), "rope_type yarn"),
  ("llama3", {**LEGACY, "rope_scaling": {"type": "linear"}}, "rope_type linear"),
  ("llama3", dict(rope_parameters={"rope_type": "llama3"}), "factor"),
  ("llama3", dict(rope_parameters={"full_attention": {}}), "per layer type"),
  ("llama3", dict(attention_bias=True), "attention_bias"),
  ("llama3", dict(mlp_bias=True), "mlp_bias"),
  ("llama3", dict(hidden_act="gelu"), "hidden_act"),
  ("llama3", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
  ("llama3", dict(quantization_config={"bits": 4}), "quantization_config"),
  ("llama3", dict(dtype="float8_e4m3fn"), "dtype"),
  ("llama3", dict(hidden_size=None), "hidden_size"),
]


@pytest.mark.parametrize("name,change,words", UNSUPPORTED)
def test_an_unsupported_config_is_refused(name, change, words, tmp_path):
  """What would change the outputs is named, never approximated."""
  told = message(copy(name, tmp_path, **change))
  assert "config.json" in told and words in told


# --- against transformers itself


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_our_export(name, tmp_path):
  """It gives the golden logits from our files, and what it saves again is the same."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  config, params = hf.load(GOLDEN / name)
  hf.save(tmp_path / "ours", config, params, max_file_bytes=8000)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "ours", attn_implementation="eager", output_loading_info=True
  )
  assert not any(info.values()), info
  ids, want = golden(name)
  with torch.no_grad():
    got = model.eval()(torch.from_numpy(ids).long()).logits.numpy()
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
  again, params2 = hf.load(tmp_path / "theirs")
  assert again == config
  assert_same(params, params2)
