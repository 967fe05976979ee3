"""Answers requests greedily with transformers' `generate`, one after the other.

`bench.transformers` runs this in another Python, one that has torch; it stands alone.
Arguments: the model's folder, and the threads. First a JSON line with versions; then, for
each JSON line {"prompt", "max_tokens", "stop"} of standard input, one {"tokens",
"seconds"}: the response's tokens, the end token included.
"""

import json
import sys
import time


def main(folder: str, threads: str) -> None:
  import torch
  import transformers

  transformers.logging.set_verbosity_error()
  torch.set_num_threads(int(threads))
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  model.eval()
  reply(torch=torch.__version__, transformers=transformers.__version__)
  for line in sys.stdin:
    asked = json.loads(line)
    prompt = torch.tensor([asked["prompt"]])
    began = time.perf_counter()
    with torch.inference_mode():
      answered = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=asked["max_tokens"],
        eos_token_id=asked["stop"],
        pad_token_id=asked["stop"][0],
      )
    seconds = time.perf_counter() - began
    reply(tokens=answered[0, prompt.shape[1] :].tolist(), seconds=seconds)


def reply(**fields) -> None:
  """Writes a JSON line."""
  print(json.dumps(fields), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
