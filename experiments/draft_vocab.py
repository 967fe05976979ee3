"""The vocabulary of a new drafter: all tokens of its policy, or those most often seen.

Of a large vocabulary most of a draft's time goes into logits of tokens that a task never
has (FR-Spec, https://arxiv.org/abs/2502.14856). How many a drafter has follows from the
config alone, so that memory can be planned; which ones, from texts: what the run asks and
its gold answers, or responses where there are some (`train_drafter`).
"""

from collections.abc import Sequence
import logging
import string
from typing import Any

import numpy as np

from experiments import config as config_lib
from tlt_jax import data
from tlt_jax import tokenization
from tlt_jax.models import drafter as drafter_lib

_LARGE, _OWN = 100_000, 32_768  # tokens of a policy, and of a new drafter of such a one
# Most records that are counted: of a list, and of what makes a record when it is asked.
_LISTED, _MADE = 2**13, 2**8


def size(asked: int | None, vocab_size: int, key: str = "drafter_vocab_size") -> int:
  """The number of tokens that a new drafter has of its policy's; 0: all.

  Args:
    asked: the entry `key` of the config
    vocab_size: of the policy
  Raises:
    ValueError: the policy has fewer
  """
  if asked is None:
    return _OWN if vocab_size >= _LARGE else 0
  if asked > vocab_size:
    raise ValueError(
      f"{key}={asked}: the policy has {vocab_size:,} tokens; a new drafter has as many or "
      "fewer, 0 for all of them"
    )
  return asked


def choose(
  tokenizer: tokenization.Tokenizer,
  vocab_size: int,
  count: int,
  tokens: Sequence[np.ndarray],
  where: str,
) -> tuple[int, ...]:
  """A drafter's `count` tokens, which hold all stops and markup; logs what they cover.

  Single characters come before other tokens that were not seen: vocabularies of
  SentencePiece have them last.

  Args:
    vocab_size: of the policy
    tokens: ids that were seen
    where: they were seen, for the log
  """
  characters = map(tokenizer.inner.token_to_id, string.printable)
  vocab = drafter_lib.most_frequent(
    tokens,
    vocab_size,
    count,
    first=tokenizer.markup,
    then=[i for i in characters if i is not None],
  )
  seen = np.concatenate([np.zeros(0, np.int32), *tokens])
  if len(seen):
    logging.info(
      "the drafter drafts %s of the policy's %s tokens: %.2f%% of those in %s, which have "
      "%s different ones",
      f"{count:,}",
      f"{vocab_size:,}",
      100 * np.isin(seen, vocab).mean(),
      where,
      f"{len(np.unique(seen)):,}",
    )
  return vocab


def tokens_of(
  tokenizer: tokenization.Tokenizer, records: Sequence[dict], chat: config_lib.Chat
) -> list[np.ndarray]:
  """The ids of prompts, as the policy is asked, and of gold answers, of some records."""
  counted = _some(records)
  texts = [tokenizer.text(r["prompt"], chat.system or None, chat.apply) for r in counted]
  answers = [_text(r["answer"]) for r in counted]
  texts += [text for text in answers if text and not tokenizer.unknown(text)]
  return tokenizer.encode_texts(texts)


def _text(answer: Any) -> str:
  return "" if answer is None else str(answer)


def _some(records: Sequence[dict]) -> list[dict]:
  """Records at equal distances, as many of each part of a mixture at most."""
  if isinstance(records, data.Mixture):
    return [record for part in records.parts for record in _some(part)]
  count = min(len(records), _LISTED if isinstance(records, list) else _MADE)
  return [records[i * len(records) // count] for i in range(count)]
