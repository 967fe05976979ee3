"""Makes the golden checkpoints: tiny random models and what transformers says.

    pip install torch transformers safetensors
    python tests/golden/make.py [NAME ...]

Per model a folder as transformers saves it, and golden.npz with token ids
i32[B T] and the logits f32[B T V] of its eager attention in float32. Every norm,
bias and epsilon is set so that a mistake in it shows; head_dim is not
width / heads.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

SHAPE = dict(
  vocab_size=40,
  hidden_size=16,
  intermediate_size=20,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=6,
  max_position_embeddings=64,
  rms_norm_eps=0.05,
  tie_word_embeddings=False,
)


def rope(theta, rope_type="default", **scaling):
  return dict(rope_theta=theta, rope_type=rope_type, **scaling)


MODELS = {
  "qwen2": (transformers.Qwen2Config(**SHAPE, rope_parameters=rope(1000.0)), None),
  "qwen2_tied": (
    transformers.Qwen2Config(
      **{**SHAPE, "tie_word_embeddings": True, "num_key_value_heads": 1},
      rope_parameters=rope(100.0),
    ),
    None,
  ),
  "qwen3": (transformers.Qwen3Config(**SHAPE, rope_parameters=rope(500.0)), "8KB"),
  # Wavelengths 6, 20, 63 and 199: one kept, one interpolated, two stretched.
  "llama3": (
    transformers.LlamaConfig(
      **{**SHAPE, "num_attention_heads": 8, "head_dim": 8},
      rope_parameters=rope(
        100.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
      ),
    ),
    None,
  ),
  "mistral": (
    transformers.MistralConfig(
      **{**SHAPE, "head_dim": 16},
      sliding_window=7,
      rope_parameters=rope(
        100.0,
        rope_type="yarn",
        factor=4.0,
        beta_fast=2.0,
        beta_slow=0.1,
        mscale=1.0,
        mscale_all_dim=0.3,
        truncate=False,
        original_max_position_embeddings=16,
      ),
    ),
    None,
  ),
  "qwen3_windows": (
    transformers.Qwen3Config(
      **{**SHAPE, "head_dim": 16},
      use_sliding_window=True,
      sliding_window=9,
      max_window_layers=1,
      rope_parameters=rope(
        500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32
      ),
    ),
    None,
  ),
  # Every second layer slides, without RoPE.
  "smollm3": (
    transformers.SmolLM3Config(
      **{**SHAPE, "num_hidden_layers": 3, "tie_word_embeddings": True},
      pad_token_id=None,
      no_rope_layer_interval=2,
      use_sliding_window=True,
      sliding_window=7,
      rope_parameters=rope(100.0, rope_type="linear", factor=4.0),
    ),
    None,
  ),
  "gemma3": (
    transformers.Gemma3TextConfig(
      **{**SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": True},
      query_pre_attn_scalar=9,
      sliding_window=7,
      sliding_window_pattern=3,
      rope_parameters={
        "sliding_attention": rope(10.0),
        "full_attention": rope(300.0, rope_type="linear", factor=8.0),
      },
    ),
    None,
  ),
  "qwen3_moe": (
    transformers.Qwen3MoeConfig(
      **SHAPE,
      moe_intermediate_size=12,
      num_experts=5,
      num_experts_per_tok=2,
      norm_topk_prob=True,
      rope_parameters=rope(500.0),
    ),
    None,
  ),
}


def randomize(model):
  """Weights large enough for sharp attention; norms around one, biases around zero."""
  for name, p in model.named_parameters():
    if "norm" in name:
      p.data.uniform_(0.5, 1.5)
      if "Gemma" in type(model).__name__:  # is multiplied by 1 + p
        p.data -= 1
    else:
      p.data.normal_(0.0, 0.5 if p.ndim == 1 else 0.4)


def main():
  for seed, (name, (config, max_shard_size)) in enumerate(MODELS.items()):
    if sys.argv[1:] and name not in sys.argv[1:]:
      continue
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.eval()
    ids = torch.randint(0, config.vocab_size, (2, 32))
    with torch.no_grad():
      logits = model(ids).logits
    folder = pathlib.Path(__file__).parent / name
    model.save_pretrained(folder, max_shard_size=max_shard_size or "5GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
      folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy()
    )
    print(name, "logits std", float(logits.std()))


if __name__ == "__main__":
  main()
