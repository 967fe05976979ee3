"""Which prompts a run can use: short enough, of characters that the tokenizer knows.

`usable` is the way in: a source of records in, those that can be used out, or an error
that names the first that cannot. A file, a source of up to 2**13 records, and one that
the caller reads whole are checked at once; of any other, whose records are made when
they are asked for, the first 1,000, and each of the rest when it is drawn. What becomes
of a prompt depends on the prompt alone, so that a run that is resumed draws the same
ones.
"""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import logging
from typing import Literal

from tlt_jax import data
from tlt_jax import ranges
from tlt_jax import tokenization

_WHOLE = 2**13  # records of the longest source that is checked at once in any case
_SOME = 1000  # of a longer one at the start; and that one draw looks at
_AT_ONCE = 1024  # that are tokenized together

Prompt = str | list[dict]


@ranges.options
class Unusable:
  """What is done with prompts that cannot be used as they are.

  "refuse": it is an error. "drop": the record is left out. "cut": only the last tokens
  are kept, of a chat those of the user's last message; unknown characters are left out.
  """

  too_long: Literal["refuse", "drop", "cut"] = ranges.field(
    "refuse", "what is done with prompts of more tokens than the rollout takes"
  )
  unknown_characters: Literal["refuse", "drop", "cut"] = ranges.field(
    "refuse", "what is done with prompts that have characters unknown to the tokenizer"
  )


@dataclasses.dataclass
class Rules:
  """Which prompts can be used, and what is done with the others.

  `max_prompt` may be set after a source was measured: it holds for what is drawn later.
  """

  tokenizer: tokenization.Tokenizer
  unusable: Unusable = Unusable()
  max_prompt: int | None = None  # tokens; None: any number
  chat: bool = False  # see `Tokenizer.text`, as for `system`
  system: str | None = None

  def encode(self, prompts: Sequence[Prompt]) -> list[tuple[str, tokenization.Pieces]]:
    """Of each prompt the text that the model continues, and its tokens."""
    texts = [self.tokenizer.text(p, system=self.system, chat=self.chat) for p in prompts]
    return list(zip(texts, self.tokenizer.pieces(texts), strict=True))


def usable(
  source: Sequence[dict], name: str, rules: Rules, whole: bool = False
) -> Sequence[dict]:
  """The records that can be used; what became of the others is logged.

  Args:
    source: records, by index
    name: of the source; for messages, where a record has no "place"
    rules: what can be used
    whole: check every record now, however many there are, and return a list
  Returns:
    a list; for a source that is not checked whole a sequence of its length, in which the
    next usable record stands for one that is dropped
  Raises:
    DataError: a record lacks a field, a prompt is refused, or none is left
  """
  return measured(source, name, rules, whole)[0]


def measured(
  source: Sequence[dict], name: str, rules: Rules, whole: bool = False
) -> tuple[Sequence[dict], int]:
  """What `usable` returns, and the tokens of the longest prompt.

  Prompts that are drawn later may be longer: twice the longest of the first ones is told.
  """
  whole = whole or isinstance(source, list) or len(source) <= _WHOLE
  count = len(source) if whole else _SOME
  kept, longest = _check([source[i] for i in range(count)], name, rules)
  return (kept, longest) if whole else (_Drawn(source, name, rules), 2 * longest)


class _Drawn(Sequence):
  """The records of a long source, each of them checked when it is drawn."""

  def __init__(self, source: Sequence[dict], name: str, rules: Rules):
    """Checks nothing yet."""
    self._source, self._name, self._rules = source, name, rules

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, i: int) -> dict:
    """Record i, or the next that can be used."""
    if not 0 <= i < len(self):  # what ends an iteration
      raise IndexError(f"{self._name} has {len(self):,} records, none of index {i}")
    for j in range(i, i + _SOME):
      j %= len(self)
      record = self._source[j]
      _check_fields(record, self._name, j)
      record, _, _ = _settled(record, self._name, j, self._rules)
      if record is not None:
        return record
    raise data.DataError(
      f"{self._name}: none of the {_SOME:,} prompts from record {i} on can be used"
    )


def _check(records: list[dict], name: str, rules: Rules) -> tuple[list[dict], int]:
  """The usable ones of some records, and the most tokens of one; see `usable`."""
  for i, record in enumerate(records):
    _check_fields(record, name, i)
  kept, refused, counts, longest = [], [], collections.Counter(), 0
  for i, (record, encoded) in enumerate(_encoded(records, rules)):
    try:
      record, done, tokens = _settled(record, name, i, rules, encoded)
    except data.DataError as e:
      refused.append(str(e))
      continue
    counts.update(done)
    if record is not None:
      kept.append(record)
      longest = max(longest, tokens)
  if refused:
    count = f" (the first of {len(refused):,} unusable prompts)" if refused[1:] else ""
    raise data.DataError(refused[0] + count)
  if counts:
    done = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()))
    logging.info("%s: of %s prompts %s", name, f"{len(records):,}", done)
  if not kept:
    raise data.DataError(
      f"{name}: none of {len(records):,} prompts is left; raise rollout.max_prompt, or "
      "use prompts that the tokenizer knows"
    )
  return kept, longest


def _check_fields(record: dict, name: str, i: int) -> None:
  """Raises DataError unless a record has an answer, and a prompt that is one."""
  if not isinstance(record, dict):
    raise data.DataError(
      f"{name}, record {i}: is a {type(record).__name__}, not a dict with the fields "
      "'prompt' and 'answer'"
    )
  for field in ("prompt", "answer"):
    if field not in record:
      raise data.DataError(data.no_field(_place(record, name, i), field, record))
  prompt = record["prompt"]
  problem = None if isinstance(prompt, str) else data.prompt_problem(prompt)
  if problem:
    raise data.DataError(f"{_place(record, name, i)}: field 'prompt' {problem}")


def _place(record: dict, name: str, i: int) -> str:
  return record.get("place") or f"{name}, record {i}"


def _encoded(records: list[dict], rules: Rules) -> Iterator[tuple[dict, tuple | None]]:
  """Records with what `Rules.encode` gives; None where one of many cannot be encoded."""
  for start in range(0, len(records), _AT_ONCE):
    some = records[start : start + _AT_ONCE]
    try:
      encoded = rules.encode([record["prompt"] for record in some])
    except data.DataError:
      encoded = [None] * len(some)
    yield from zip(some, encoded, strict=True)


def _settled(
  record: dict, name: str, i: int, rules: Rules, encoded: tuple | None = None
) -> tuple[dict | None, list[str], int]:
  """A record as it is used, None if it is dropped, what was done to it, and its tokens.

  Args:
    name, i: of its source, and its index there
    encoded: its text and tokens, where they are known already
  Raises:
    DataError: it is refused; the message names its place
  """
  try:
    prompt, done, tokens = _settle(record["prompt"], rules, encoded)
  except data.DataError as e:
    raise data.DataError(f"{_place(record, name, i)}: {e}") from e
  if prompt is None:
    return None, done, 0
  return (record | {"prompt": prompt} if done else record), done, tokens


def _settle(
  prompt: Prompt, rules: Rules, encoded: tuple | None
) -> tuple[Prompt | None, list[str], int]:
  """A prompt as it is used, None if it is dropped, and the rest of `_settled`."""
  unusable, limit, done = rules.unusable, rules.max_prompt, []
  text, pieces = encoded or rules.encode([prompt])[0]
  unknown = _unknown(text, pieces, rules)
  if unknown:
    if unusable.unknown_characters == "refuse":
      raise data.DataError(
        f"the tokenizer does not know {unknown}; correct the prompt, or set "
        "unusable_prompts.unknown_characters to drop or cut"
      )
    if unusable.unknown_characters == "drop":
      return None, ["dropped (unknown characters)"], 0
    prompt = _without_unknown(prompt, rules.tokenizer)
    done.append("cut (unknown characters)")
    text, pieces = rules.encode([prompt])[0]
    if unknown := _unknown(text, pieces, rules):
      raise data.DataError(
        f"the tokenizer does not know {unknown} of the chat template or the system "
        "message; change chat.system, or use the model's own tokenizer files"
      )
  if limit is not None and len(pieces.ids) > limit:
    if unusable.too_long == "refuse":
      raise data.DataError(
        f"the prompt has {len(pieces.ids):,} tokens, rollout.max_prompt is {limit:,}; "
        "raise it, or set unusable_prompts.too_long to drop or cut"
      )
    if unusable.too_long == "drop":
      return None, ["dropped (too long)"], 0
    prompt = _shortened(prompt, len(pieces.ids), rules)
    done.append("cut (too long)")
  last = _last_text(prompt)
  if not pieces.ids or (done and last is not None and not last.strip()):
    if unusable.unknown_characters == "refuse":
      raise data.DataError(
        "nothing is left of the prompt in tokens; correct it, raise rollout.max_prompt, "
        "or set unusable_prompts.unknown_characters to drop"
      )
    return None, ["dropped (nothing left)"], 0
  return prompt, done, min(len(pieces.ids), limit or len(pieces.ids))


def _unknown(text: str, pieces: tokenization.Pieces, rules: Rules, most: int = 5) -> str:
  """Names the unknown characters of a text, each of them once; "" if there are none."""
  spans = rules.tokenizer.unknown(text, pieces)
  found = list(dict.fromkeys(text[start:end] for start, end in spans))
  more = f" and {len(found) - most} more" if len(found) > most else ""
  return ", ".join(map(repr, found[:most])) + more


def _without_unknown(prompt: Prompt, tokenizer: tokenization.Tokenizer) -> Prompt:
  """A prompt without the characters that the tokenizer does not know."""
  if not isinstance(prompt, str):
    clean = lambda message: _without_unknown(message["content"], tokenizer)
    return [message | {"content": clean(message)} for message in prompt]
  for start, end in reversed(tokenizer.unknown(prompt, *tokenizer.pieces([prompt]))):
    prompt = prompt[:start] + prompt[end:]
  return prompt


def _shortened(prompt: Prompt, size: int, rules: Rules) -> Prompt:
  """A prompt of `size` tokens with so much less at the start of the text that it fits.

  Of a chat the user's last message is shortened, the template stays whole.
  """
  while (over := size - rules.max_prompt) > 0:
    text = _last_text(prompt)
    if not text:
      raise data.DataError(
        f"{size:,} tokens are left of the prompt without the user's last message, "
        f"rollout.max_prompt is {rules.max_prompt:,}; raise it"
      )
    # Not always enough: what is left can take more tokens than it did.
    starts = [start for start, _ in rules.tokenizer.pieces([text])[0].spans]
    first = starts[over] if over < len(starts) else len(text)
    prompt = _with_last_text(prompt, text[max(first, 1) :])
    size = len(rules.encode([prompt])[0][1].ids)
  return prompt


def _last_text(prompt: Prompt) -> str | None:
  """A plain prompt, or the user's last message; None if there is none."""
  if isinstance(prompt, str):
    return prompt
  said = [message["content"] for message in prompt if message["role"] == "user"]
  return said[-1] if said else None


def _with_last_text(prompt: Prompt, text: str) -> Prompt:
  """A prompt in which another text stands for that of `_last_text`."""
  if isinstance(prompt, str):
    return text
  last = max(i for i, message in enumerate(prompt) if message["role"] == "user")
  return [*prompt[:last], prompt[last] | {"content": text}, *prompt[last + 1 :]]
