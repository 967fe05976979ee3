"""Makes the golden drafters: tiny random ones in published layouts, and what torch says.

    pip install torch safetensors numpy
    python tests/golden/make_drafters.py

Per layout a folder as training code publishes it, and golden.npz: the target's embedding
f32[V D] and head f32[V D], its features f32[1 T E], the tokens after them i32[1 T+1], and
what the drafter makes of them: outputs f32[1 T+1 D] and logits f32[1 T+1 U], of which the
last are of a second drafting step, whose feature is the drafter's own output at T-1.

The computation is written from the papers (EAGLE, arXiv 2401.15077 section 3.1; EAGLE-3,
arXiv 2503.01840 section 3.1) and the public definition of a Llama layer, not from tlt_jax.
"""

import json
import pathlib

import numpy as np
from safetensors import torch as safetensors_torch
import torch
from torch.nn import functional as F

V, U, D, MLP, HEADS, KV, HD, T = 40, 12, 16, 20, 4, 2, 6, 11
EPS, TAPS = 0.05, (0, 2, 4)
LLAMA3 = dict(
  rope_type="llama3",
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)


def frequencies(theta, scaling):
  f = theta ** -(torch.arange(0, HD, 2, dtype=torch.float32) / HD)
  if scaling is None:
    return f
  n = scaling["original_max_position_embeddings"]
  wave = 2 * torch.pi / f
  low, high = (scaling[f"{k}_freq_factor"] for k in ("low", "high"))
  smooth = ((n / wave - low) / (high - low)).clamp(0, 1)
  return (1 - smooth) * f / scaling["factor"] + smooth * f


def rms_norm(x, weight):
  return weight * (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt())


def rotate(x, f):  # [T heads HD]
  angle = torch.arange(len(x), dtype=torch.float32)[:, None] * f
  cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]
  a, b = x.chunk(2, -1)
  return x * cos + torch.cat([-b, a], -1) * sin


def attention(w, x, f):
  split = lambda name, heads: F.linear(
    x, w[f"self_attn.{name}_proj.weight"], w.get(f"self_attn.{name}_proj.bias")
  ).view(len(x), heads, HD)
  q, k, v = rotate(split("q", HEADS), f), rotate(split("k", KV), f), split("v", KV)
  k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
  scores = torch.einsum("thd,shd->hts", q, k) / HD**0.5
  scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
  out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(len(x), -1)
  return F.linear(out, w["self_attn.o_proj.weight"])


def mlp(w, x):
  gate, up = (F.linear(x, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
  return F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def layer(w, prefix, x, residual, f):
  w = {k.removeprefix(prefix): x for k, x in w.items() if k.startswith(prefix)}
  h = residual + attention(w, x, f)
  return h + mlp(w, rms_norm(h, w["post_attention_layernorm.weight"]))


def eagle2(w, embedded, h, f):
  z = F.linear(torch.cat([embedded, h], -1), w["fc.weight"], w.get("fc.bias"))
  return layer(w, "layers.0.", z, z, f)


def eagle3(w, embedded, h, f):
  norm = lambda name, x: rms_norm(x, w[f"midlayer.{name}.weight"])
  x = torch.cat([norm("input_layernorm", embedded), norm("hidden_norm", h)], -1)
  return layer(w, "midlayer.", x, h, f)


def weights(prefix, width, bias):
  shapes = {
    "q_proj": (HEADS * HD, width),
    "k_proj": (KV * HD, width),
    "v_proj": (KV * HD, width),
    "o_proj": (D, HEADS * HD),
  }
  w = {f"{prefix}self_attn.{k}.weight": torch.randn(s) * 0.4 for k, s in shapes.items()}
  if bias:
    for name in ("q_proj", "k_proj", "v_proj"):
      w[f"{prefix}self_attn.{name}.bias"] = torch.randn(shapes[name][0]) * 0.5
  for name, shape in (("gate", (MLP, D)), ("up", (MLP, D)), ("down", (D, MLP))):
    w[f"{prefix}mlp.{name}_proj.weight"] = torch.randn(shape) * 0.4
  w[f"{prefix}post_attention_layernorm.weight"] = torch.rand(D) + 0.5
  return w


def config(**changes):
  return (
    dict(
      vocab_size=V,
      hidden_size=D,
      intermediate_size=MLP,
      num_hidden_layers=1,
      num_attention_heads=HEADS,
      num_key_value_heads=KV,
      head_dim=HD,
      hidden_act="silu",
      max_position_embeddings=64,
      rms_norm_eps=EPS,
      tie_word_embeddings=False,
      torch_dtype="float32",
    )
    | changes
  )


def write(name, config, stored, w, step, features, first, theta, scaling=None):
  """A folder: `w` is what is computed with, `stored` what is in the file."""
  folder = pathlib.Path(__file__).parent / "drafters" / name
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  safetensors_torch.save_file(
    {k: x.contiguous() for k, x in stored.items()}, folder / "model.safetensors"
  )
  embedding, head = w["embedding"], w["head"]
  tokens, f = torch.randint(0, V, (T + 1,)), frequencies(theta, scaling)
  h = first(features)
  once = step(w, embedding[tokens[:T]], h, f)
  both = step(w, embedding[tokens], torch.cat([h, once[-1:]]), f)
  read = rms_norm(both, w["norm.weight"]) if "norm.weight" in w else both
  logits = F.linear(read, w.get("lm_head.weight", head))
  arrays = dict(
    embedding=embedding,
    head=head,
    features=features[None],
    tokens=tokens[None].int(),
    outputs=both[None],
    logits=logits[None],
  )
  np.savez_compressed(folder / "golden.npz", **{k: x.numpy() for k, x in arrays.items()})
  print(name, "logits std", float(logits.std()))


def main():
  torch.manual_seed(0)
  target = lambda: {"embedding": torch.randn(V, D), "head": torch.randn(V, D) * 0.5}
  fc = lambda parts: {"fc.weight": torch.randn(D, parts * D) * 0.3}

  # As FastRL publishes it: no fc.bias, the target's own class in config.json.
  w = fc(2) | weights("layers.0.", D, bias=True)
  write(
    "qwen2_eagle2",
    config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1000.0),
    w,
    w | target(),
    eagle2,
    torch.randn(T, D),
    lambda x: x,
    1000.0,
  )

  # As its authors do: with fc.bias and the embedding; without rope_theta, which is 10,000.
  own = target()
  w = fc(2) | {"fc.bias": torch.randn(D) * 0.5} | weights("layers.0.", D, bias=False)
  write(
    "llama_eagle2",
    config(architectures=["LlamaForCausalLM"], model_type="llama"),
    w | {"embed_tokens.weight": own["embedding"]},
    w | own,
    eagle2,
    torch.randn(T, D),
    lambda x: x,
    10_000.0,
  )

  # As SpecForge does: a vocabulary and a head of its own, layers that are not the usual.
  w = fc(3) | weights("midlayer.", 2 * D, bias=False)
  for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
    w[f"{name}.weight"] = torch.rand(D) + 0.5
  w["lm_head.weight"] = torch.randn(U, D) * 0.5
  chosen = torch.randperm(V)[:U].sort().values
  t2d = torch.zeros(V, dtype=torch.bool)
  t2d[chosen] = True
  tables = {"d2t": chosen - torch.arange(U), "t2d": t2d}
  eagle_config = dict(eagle_aux_hidden_state_layer_ids=list(TAPS))
  write(
    "llama_eagle3",
    config(
      architectures=["LlamaForCausalLMEagle3"],
      model_type="llama",
      rope_theta=100.0,
      rope_scaling=LLAMA3,
      draft_vocab_size=U,
      eagle_config=eagle_config,
    ),
    w | tables,
    w | target(),
    eagle3,
    torch.randn(T, 3 * D),
    lambda x: F.linear(x, w["fc.weight"]),
    100.0,
    LLAMA3,
  )


if __name__ == "__main__":
  main()
