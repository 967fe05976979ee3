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
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import target

GOLDEN = pathlib.Path(__file__).parent / "golden"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = ("qwen2", "qwen2_tied", "qwen3", "llama3")
NAMES += ("mistral", "qwen3_windows", "smollm3", "gemma3", "qwen3_moe")
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


PUBLISHED = {  # what google/gemma-3-4b-it's config.json says of text
  "architectures": ["Gemma3ForConditionalGeneration"],
  "text_config": {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
  },
  "torch_dtype": "bfloat16",
  "vision_config": {"hidden_size": 1152},
}


def test_what_published_files_leave_out_is_as_in_transformers():
  """The text part of Gemma 3 4B; Mistral's window where null is not missing."""
  config = hf.parse_config(PUBLISHED)
  kinds = [config.layer_kind(i) for i in range(34)]
  assert [kind.window for kind in kinds] == ([1024] * 5 + [None]) * 5 + [1024] * 4
  assert {kind.rope.theta for kind in kinds if kind.window} == {1e4}
  assert kinds[5].rope == config_lib.Rope(1e6, config_lib.LinearScaling(8.0))
  assert len(config.layers) == 6 and config.dtype == "bfloat16" and config.tie_embeddings
  assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
  assert (config.head_dim, config.query_scalar, config.max_position) == (256, 256, 131072)
  raw = json.loads((GOLDEN / "mistral" / "config.json").read_text())
  assert hf.parse_config(raw).context == 64  # 4 times 16, and of config.json
  assert hf.parse_config(raw | {"max_position_embeddings": 16}).context == 64
  del raw["sliding_window"]
  assert hf.parse_config(raw).layer_kind(0).window == 4096
  assert hf.parse_config(raw | {"sliding_window": None}).layers == ()


def test_the_text_part_of_a_model_of_images_is_read(tmp_path):
  """By either spelling of its tensors; what reads images is left out."""
  config, params = hf.load(GOLDEN / "gemma3")
  raw = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
  whole = {**dict.fromkeys(raw), **PUBLISHED, "text_config": raw}
  for prefix in ("language_model.model.", "model.language_model."):
    path = copy("gemma3", tmp_path / prefix, **whole)

    def rename(tensors, prefix=prefix):
      for name in [*tensors]:
        tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
      tensors["model.vision_tower.x"] = tensors["multi_modal_projector.x"] = np.ones(1)

    edit(path, rename)
    again, params2 = hf.load(path)
    assert again == config
    assert_same(params, params2)


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


BIAS = "model.layers.1.self_attn.k_proj.bias"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
  "name, change",
  [
    ("qwen3", dict(layer_types=["full_attention", "sliding_attention"])),
    ("llama3", dict(rope_parameters={"rope_type": "yarn"})),
    ("llama3", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
    ("llama3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    ("mistral", dict(sliding_window=0)),
    ("mistral", dict(layer_types=["full_attention", "sliding_attention"])),
    ("qwen3_windows", dict(layer_types=["sliding_attention"])),
    ("smollm3", dict(no_rope_layers=[1, 0])),
    ("smollm3", dict(mlp_bias=True)),
    ("gemma3", dict(final_logit_softcapping=30.0)),
    ("gemma3", dict(hidden_activation="gelu")),
    ("gemma3", dict(use_bidirectional_attention=True)),
    ("llama3", dict(attention_bias=True)),
    ("llama3", dict(quantization_config={"bits": 4})),
  ],
)
def test_an_unsupported_config_is_refused(name, change, tmp_path):
  """What would change the outputs is never approximated."""
  assert "config.json" in message(copy(name, tmp_path, **change))


def test_what_is_damaged_or_missing_is_named(tmp_path):
  """Half of a file; a lost tensor, one of another shape; a head that is not tied."""
  path = copy("qwen2", tmp_path)
  whole = (path / SINGLE).read_bytes()
  (path / SINGLE).write_bytes(whole[:-4])
  assert SINGLE in message(path)
  for change in (lambda t: t.pop(BIAS), lambda t: t.update({BIAS: t[BIAS][:-1]})):
    (path / SINGLE).write_bytes(whole)
    edit(path, change)
    assert BIAS in message(path)
  (path / SINGLE).rename(path / "pytorch_model.bin")
  assert "never loaded" in message(path)  # a pickle
  path = copy("qwen2_tied", tmp_path)
  edit(path, lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}))
  assert "lm_head.weight" in message(path)
  path = copy("qwen3", tmp_path)
  (path / "model-00002-of-00004.safetensors").unlink()
  assert "model-00002" in message(path)


def test_copies_and_buffers_are_passed_over(tmp_path):
  """A tied head that is the embedding, and rotary frequencies of old exports."""
  path = copy("qwen2_tied", tmp_path)
  _, params = hf.load(path)
  buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
  edit(path, lambda t: t.update(buffer | {"lm_head.weight": t[EMBEDDING]}))
  assert_same(params, hf.load(path)[1])


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
