"""Generates responses to prompts, with speculative decoding.

    python -m experiments.generate --model=DIR (--prompt=TEXT | --prompts=FILE.jsonl) \\
        [--drafter=DIR] [--strategy=auto|off|DEPTH_WIDTH_VERIFY|ngram_DEPTH] \\
        [--max_tokens=N] [--output=FILE.jsonl]

A terminal gets streamed responses, one after the other; a file or a pipe gets a JSON line
per response with index, prompt, response, length and finish reason. Tokens per second and
the acceptance length go to stderr. `--drafter` is a folder of `train_drafter` or `export`,
or a published drafter.

The tokens are the same with and without a drafter, for every strategy. `auto` chooses
between plain decoding, n-grams and the drafter's chains and trees by their measured speed;
"up to 2 live: off or 3_1_4" chooses among others (docs/drafters.md). The sizes of the
rollout follow from the prompts, the model and the memory. The chat template is applied
where the model's folder has one (`--config.chat.apply=False`: prompts as they are). The
config has the sampling parameters (`--config.sampling.temperature=0`), a system message
(`--config.chat.system`) and the largest number of slots (`--config.rollout.slots`).
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys
from typing import TextIO

from absl import flags

from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import memory_plan
from experiments import opening
from experiments import sizes
from experiments import streaming
from experiments import trees
from tlt_jax import data
from tlt_jax import processes
from tlt_jax import prompt_checks
from tlt_jax import writing
from tlt_jax.models import hf
from tlt_jax.rl import sample
from tlt_jax.spec_decode.decoding import samples as samples_lib

_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder.", required=True)
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of a drafter.")
_PROMPT = flags.DEFINE_string("prompt", None, "A prompt, instead of a file.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSONL or Parquet file.")
_FIELD = flags.DEFINE_string("prompt_field", "", "Field of the prompt; '': a known one.")
_STRATEGY = flags.DEFINE_string(
  "strategy",
  "auto",
  "auto, off, DEPTH_WIDTH_VERIFY (5_1_6), ngram_DEPTH, or several by live requests.",
)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Responses per prompt.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer(
  "max_tokens",
  None,
  "Of a response; default: the config's, within the model's context.",
  lower_bound=1,
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, memory_plan.DRY_RUN)
_OUTPUT = flags.DEFINE_string("output", None, "File; standard output by default.")
_STREAM = flags.DEFINE_bool(
  "stream", None, "Print responses as they are generated; default: on a terminal."
)


def fit(config: config_lib.RunConfig, longest: int, prompts: int) -> config_lib.RunConfig:
  """Sizes the rollout for so many prompts, the longest of so many tokens."""
  room = max(hf.load_config(config.policy).context - longest, 1)
  max_tokens = _MAX_TOKENS.value or min(config.sampling.max_tokens, room)
  most_slots = config.rollout.slots
  config = dataclasses.replace(
    config,
    rollout=dataclasses.replace(config.rollout, **dict.fromkeys(sizes.OPEN["rollout"])),
    sampling=dataclasses.replace(config.sampling, max_tokens=max_tokens),
  )
  asked = sizes.Asked(longest, prompts, _SAMPLES.value)
  return sizes.fill_rollout(config, asked, most_slots=most_slots)


def load_prompts(rules: prompt_checks.Rules) -> tuple[list[dict], int]:
  """The prompts, with indices, and the tokens of the longest."""
  if (_PROMPT.value is None) == (_PROMPTS.value is None):
    raise ValueError("give either --prompt=TEXT or --prompts=FILE")
  name, records = _PROMPTS.value or "--prompt", [{"prompt": _PROMPT.value, "answer": None}]
  if _PROMPTS.value:
    records = data.load_prompts(name, _FIELD.value, answer_field=None)
  records = [record | {"index": i} for i, record in enumerate(records)]
  rules.max_prompt = None
  return prompt_checks.measured(records, name, rules)


def check_writable(path: pathlib.Path) -> None:
  """Raises OSError unless the file can be written; leaves no new file."""
  is_new = not path.exists()
  path.open("a").close()
  if is_new:
    path.unlink()


def main(config: config_lib.RunConfig):
  # With a single response one of two slices would be idle.
  launch.start(1 if _PROMPT.value is not None and _SAMPLES.value == 1 else 2)
  if _OUTPUT.value:
    processes.on_first(lambda: check_writable(pathlib.Path(_OUTPUT.value)))
  config = dataclasses.replace(config, policy=_MODEL.value, reward="")
  records, longest = load_prompts(from_config.prompt_rules(config))
  drafting = dataclasses.replace(config, drafter=_DRAFTER.value or "")
  shape = from_config.drafter_shape(drafting, hf.load_config(config.policy))
  chosen = from_config.parse_selector(_STRATEGY.value, config.strategy_rule, shape)
  drafter = _DRAFTER.value or "" if chosen else ""
  config = fit(dataclasses.replace(config, drafter=drafter), longest, len(records))
  memory_plan.check(memory_plan.of_rollout(config, chosen), _DRY_RUN.value)
  opening.log(opening.of_rollout(config, chosen, len(records), _SAMPLES.value))
  models = from_config.load_models(config, records=records)
  sampler = from_config.make_sampler(
    config, models.model, models.mesh, models.drafter, chosen
  )
  streams = _STREAM.value
  if streams is None:
    streams = sys.stdout.isatty() and not _OUTPUT.value
  prompts = [r["prompt"] for r in records for _ in range(_SAMPLES.value)]
  shown = streaming.Stream(sampler.tokenizer.decode, prompts, sys.stdout)
  scored = sampler(
    models.params,
    records,
    _SAMPLES.value,
    seed=config.seed,
    watch=shown if streams else None,
  )
  if not processes.is_first():
    return
  if _OUTPUT.value:
    with writing.to(_OUTPUT.value), open(_OUTPUT.value, "w", encoding="utf-8") as out:
      write(scored, records, out)
  elif not streams:
    write(scored, records, sys.stdout)
  print(summary(scored, sampler.rollout.pool.seconds), file=sys.stderr)


def summary(scored: sample.Scored, compile_s: float) -> str:
  samples, seconds = scored.samples, max(scored.rollout_s, 1e-9)
  count = int(samples.length.sum())
  return (
    f"{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s), and "
    f"{compile_s:.1f} s to compile; acceptance length "
    f"{samples.mean_acceptance_length:.2f} (tokens per pass of the target)"
  )


def write(scored: sample.Scored, records: Sequence[dict], out: TextIO) -> None:
  for i, text in enumerate(scored.text):
    p = int(scored.requests.prompt_idx[i])
    stopped = scored.samples.finish_reason[i] == samples_lib.STOP
    record = {
      "index": records[p]["index"],
      "prompt": records[p]["prompt"],
      "response": text,
      "length": int(scored.samples.length[i]),
      "finish_reason": "stop" if stopped else "length",
    }
    print(json.dumps(record, ensure_ascii=False), file=out)


if __name__ == "__main__":
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, joins_jobs=True, config=read)
