"""Generates with transformers, for `beside_transformers`; any Python with torch runs it.

    python benchmarks/transformers_generate.py MODEL DTYPE

Reads a JSON line per call, {"prompts": [[token, ...], ...] of one length, "tokens": new
ones of each, "seed"}, and answers with {"seconds", "tokens": in all}; at first with
{"torch", "transformers", "device"}. As fast as transformers goes without another engine: a
static cache, on a GPU with its forward pass compiled and in CUDA graphs. Tokens are drawn
at temperature 1, without filters, and nothing stops a response.
"""

import json
import sys
import time


def main(folder: str, dtype: str) -> None:
  import torch  # not of this project's environment
  import transformers

  answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer

  def answer(**found) -> None:
    print(json.dumps(found), file=answers, flush=True)

  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype)
  ).to(device)
  # Its own may have filters and tokens that stop.
  model.generation_config = transformers.GenerationConfig(pad_token_id=0)
  options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
  options |= {"cache_implementation": "static"}
  if device == "cuda":
    options["compile_config"] = transformers.CompileConfig(mode="reduce-overhead")
  answer(torch=torch.__version__, transformers=transformers.__version__, device=device)
  for line in sys.stdin:
    asked = json.loads(line)
    transformers.set_seed(asked["seed"])
    prompts = torch.tensor(asked["prompts"], device=device)
    began = time.perf_counter()
    drawn = model.generate(
      prompts,
      attention_mask=torch.ones_like(prompts),
      max_new_tokens=asked["tokens"],
      **options,
    ).cpu()  # which waits for the device
    seconds = time.perf_counter() - began
    answer(seconds=seconds, tokens=drawn.numel() - prompts.numel())


if __name__ == "__main__":
  main(*sys.argv[1:])
