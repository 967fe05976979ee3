"""Checks prompts: short enough, with characters that the tokenizer knows, and answers that
the reward can use.

Files, sources of up to 2**13 records, and those that the caller reads whole are checked at
the start; of other sources the first 1,000 records, and each of the rest when it is drawn.
The result depends on the record alone, so that a resumed run draws the same ones.
"""

from collections.abc import Callable, Sequence
import dataclasses
import logging
from typing import Literal

from tlt_jax import data
from tlt_jax import progress
from tlt_jax import ranges
from tlt_jax import tokenization

_WHOLE = 2**13  # records of the longest source that is always checked at the start
_SOME = 250  # records checked of longer ones, which may take milliseconds each to make
_TRIES = 1000  # records that one draw tries at most
_BATCH = 1024  # records tokenized together


@ranges.options
class Unusable:
  too_long: Literal["refuse", "drop"] = ranges.field(
    "refuse",
    "what is done with prompts of more tokens than the rollout takes: 'refuse' is an "
    "error, 'drop' leaves the record out",
  )
  bad_answer: Literal["refuse", "drop"] = ranges.field(
    "refuse",
    "what is done with gold answers on which the reward raises, such as null: the same; "
    "of sources too long to be read at the start they are left out",
  )


@dataclasses.dataclass
class Rules:
  """`max_prompt` may be set after a source was measured: it holds for later draws."""

  tokenizer: tokenization.Tokenizer
  unusable: Unusable = Unusable()
  max_prompt: int | None = None  # tokens; None: any number
  chat: bool | None = False  # see `Tokenizer.text`, as for `system`
  system: str | None = None
  # Why each record's answer cannot be used, "" where it can (`rl.gold`); None: all can
  try_answers: Callable[..., list[str]] | None = None

  def text(self, prompt: str | list[dict]) -> str:
    return self.tokenizer.text(prompt, system=self.system, chat=self.chat)


def usable(
  source: Sequence[dict], name: str, rules: Rules, whole: bool = False
) -> Sequence[dict]:
  """The records that can be used; logs how many are dropped.

  A list; for a source that is not checked `whole` a sequence of the same length, in which
  a dropped record is replaced by the next usable one.

  Raises:
    DataError: a record lacks a field, a prompt is refused, or none is left
  """
  return measured(source, name, rules, whole)[0]


def measured(
  source: Sequence[dict], name: str, rules: Rules, whole: bool = False
) -> tuple[Sequence[dict], int]:
  """The result of `usable`, and the longest prompt, or twice that of those checked."""
  whole = whole or isinstance(source, list) or len(source) <= _WHOLE
  count = len(source) if whole else _SOME
  kept, longest = [], 0
  batches = [range(i, min(i + _BATCH, count)) for i in range(0, count, _BATCH)]
  with progress.counted(f"checking prompts of {name}, batch", batches) as each:
    for index in each:
      records, length = _kept(source, index, name, rules)
      kept.extend(records)
      longest = max(longest, length)
  if dropped := count - len(kept):
    logging.info("%s: of %s prompts %s dropped (too long)", name, f"{count:,}", dropped)
  if not kept:
    raise data.DataError(
      f"{name}: none of {count:,} prompts is left; raise rollout.max_prompt="
      f"{rules.max_prompt}"
    )
  kept = [record for _, record in _answerable(kept, name, rules)]
  return (kept, longest) if whole else (_Drawn(source, name, rules), 2 * longest)


def _answerable(
  placed: list[tuple[str, dict]], name: str, rules: Rules
) -> list[tuple[str, dict]]:
  if rules.try_answers is None:
    return placed
  problems = rules.try_answers([record for _, record in placed], name)
  bad = [i for i, problem in enumerate(problems) if problem]
  if not bad:
    return placed
  what = f"{placed[bad[0]][0]}: the reward cannot use the answer: {problems[bad[0]]}"
  if len(bad) == len(placed):
    raise data.DataError(
      f"the reward fails on all {len(bad):,} gold answers, the first ({placed[0][0]}): "
      f"{problems[0]}; correct the reward, or name the field that holds the answers",
      "answer_field",
    )
  if rules.unusable.bad_answer == "refuse":
    raise data.DataError(
      f"{what}; {len(bad):,} of {len(placed):,} answers are like this: correct them, name "
      "another field, or set unusable_prompts.bad_answer to drop",
      "answer_field",
    )
  logging.warning("%s: of %s prompts %s dropped (bad answers)", name, len(placed), len(bad))
  logging.warning("the first of them: %s", what)
  return [x for x, problem in zip(placed, problems, strict=True) if not problem]


class _Drawn(Sequence):
  def __init__(self, source: Sequence[dict], name: str, rules: Rules):
    self._source, self._name, self._rules = source, name, rules

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, i: int) -> dict:
    if not 0 <= i < len(self):  # ends an iteration
      raise IndexError(f"{self._name} has {len(self):,} records, none of index {i}")
    for j in range(i, i + _TRIES):
      records, _ = _kept(self._source, [j % len(self)], self._name, self._rules)
      if records and self._has_usable_answer(*records[0]):
        return records[0][1]
    raise data.DataError(
      f"{self._name}: none of the {_TRIES:,} prompts from record {i} on can be used"
    )

  def _has_usable_answer(self, place: str, record: dict) -> bool:
    """Warns of others, which must not end a run that goes."""
    if self._rules.try_answers is None:
      return True
    (problem,) = self._rules.try_answers([record])
    if problem:
      logging.warning("%s is left out: the reward cannot use it: %s", place, problem)
    return not problem


def _kept(
  source: Sequence[dict], index: Sequence[int], name: str, rules: Rules
) -> tuple[list[tuple[str, dict]], int]:
  """Records with their places, and the longest prompt."""
  records = [source[i] for i in index]
  places = [
    _check_fields(record, name, i) for i, record in zip(index, records, strict=True)
  ]
  texts, prompts = [], [record["prompt"] for record in records]
  for place, prompt in zip(places, prompts, strict=True):
    try:
      texts.append(rules.text(prompt))
      unknown = rules.tokenizer.unknown(texts[-1])
    except data.DataError as e:
      raise data.DataError(f"{place}: {e}") from e
    if unknown:
      raise data.DataError(
        f"{place}: the tokenizer does not know {', '.join(map(repr, unknown[:5]))}; "
        "correct the prompt, the system message or the chat template"
      )
  kept, longest = [], 0
  lengths = rules.tokenizer.lengths(texts)
  for record, place, length in zip(records, places, lengths, strict=True):
    if not length:
      raise data.DataError(f"{place}: the prompt has no tokens; correct it")
    length += len(rules.tokenizer.opening(record["prompt"], rules.chat))
    if rules.max_prompt is None or length <= rules.max_prompt:
      kept.append((place, record))
      longest = max(longest, length)
    elif rules.unusable.too_long == "refuse":
      raise data.DataError(
        f"{place}: the prompt has {length:,} tokens, rollout.max_prompt is "
        f"{rules.max_prompt:,}; raise it, or set unusable_prompts.too_long to drop"
      )
  return kept, longest


def _check_fields(record: dict, name: str, i: int) -> str:
  place = f"{name}, record {i}"
  if not isinstance(record, dict):
    raise data.DataError(
      f"{place}: is a {type(record).__name__}, not a dict with the fields 'prompt' and "
      "'answer'"
    )
  place = record.get("place") or place
  for field in ("prompt", "answer"):
    if field not in record:
      raise data.DataError(data.no_field(place, field, record))
  if record["prompt"] != "" and (problem := data.prompt_problem(record["prompt"])):
    raise data.DataError(f"{place}: field 'prompt' {problem}")
  return place
