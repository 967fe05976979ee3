"""Answers a file of prompts, with speculative decoding if there is a drafter.

    python -m experiments.generate --model=DIR --prompts=FILE.jsonl \\
        [--drafter=DIR] [--strategy=auto|off|DEPTH_WIDTH_VERIFY|ngram_DEPTH] \\
        [--output=FILE.jsonl]

One JSON line per response: the prompt's index, the prompt and the response, its
length and why it ended. The tokens are the same with and without a drafter, for every
strategy. How requests are sampled is the config's (`--config.sampling.temperature=0`).
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile

from absl import flags

from experiments import setup
from tlt_jax import axes
from tlt_jax import data
from tlt_jax.models import convert
from tlt_jax.models import drafter_files
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder.", required=True)
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of `train_drafter`.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL or Parquet file.", required=True)
_FIELD = flags.DEFINE_string("prompt_field", "prompt", "Where a record has its prompt.")
_STRATEGY = flags.DEFINE_string(
  "strategy", "auto", "auto, off, DEPTH_WIDTH_VERIFY (5_1_6), or ngram_DEPTH."
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Responses per prompt.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File; standard output by default.")

# Speculation pays while few requests are live.
_AUTO = strategy_lib.ByLiveBatch(((2, strategy_lib.Strategy(3, 1, 4)),))


def main():
  config = setup.start(pathlib.Path(tempfile.mkdtemp()), _CONFIG.value)
  config["policy"] = _MODEL.value
  records = data.load_prompts(_PROMPTS.value, _FIELD.value, answer_field=None)
  mesh = axes.make_mesh(config["tensor_parallel"])
  model, params = convert.load_hf(_MODEL.value, mesh, axes.ROLLOUT)
  drafter = draft_params = policy = None
  if _STRATEGY.value == "auto":
    policy = _AUTO if _DRAFTER.value else None
  elif (strategy := strategy_lib.parse(_STRATEGY.value)) is not None:
    policy = strategy_lib.always(strategy)
    if strategy.source == strategy_lib.MODEL and not _DRAFTER.value:
      raise ValueError(f"--strategy={_STRATEGY.value} needs a --drafter")
  if _DRAFTER.value and policy is not None:
    drafter, draft_params = drafter_files.load(_DRAFTER.value, model, mesh)
  sampler = setup.sampler(config, model, mesh, drafter, policy)
  sampler = dataclasses.replace(sampler, score=lambda *_: 0.0)  # nobody asks
  scored = sampler(
    params,
    list(records),
    _SAMPLES.value,
    config["seed"],
    first_request=0,
    draft_params=draft_params,
  )
  samples = scored.samples
  with contextlib.ExitStack() as stack:
    out = sys.stdout
    if _OUTPUT.value:
      out = stack.enter_context(open(_OUTPUT.value, "w"))
    for i, text in enumerate(scored.text):
      p = int(scored.requests.prompt_idx[i])
      stopped = samples.finish_reason[i] == requests_lib.STOP
      record = {
        "index": p,
        "prompt": records[p]["prompt"],
        "response": text,
        "length": int(samples.length[i]),
        "finish_reason": "stop" if stopped else "length",
      }
      print(json.dumps(record, ensure_ascii=False), file=out)
  print(
    f"{samples.length.sum()} tokens in {scored.rollout_s:.1f} s, "
    f"{samples.mean_acceptance_length:.2f} tokens per pass of the target",
    file=sys.stderr,
  )


if __name__ == "__main__":
  setup.run(main)
