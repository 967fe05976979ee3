r"""Tries gold answers with the reward before a run depends on them.

An answer is unusable if the reward raises, or returns no number, on every response tried:
the answer itself, \boxed{answer}, after ####, and in <answer> (of a dict or list: an empty
response). How many responses of these solve their problem is logged: none may, where a
reward needs more than the answer, such as a program.
"""

from collections.abc import Iterator, Sequence
import logging
import math
import time

from tlt_jax.rl import judge as judge_lib
from tlt_jax.rl import reward

_FORMS = (
  "{}",
  "\\boxed{{{}}}",
  "#### {}",
  "<think>\n</think>\n<answer>{}</answer>",
)
_SECONDS = 30.0  # for a source, after which the rest is not tried
_ONE_S = 10.0  # for one answer
_UNSOLVED = 64  # records after which, if none is solved, only usability is tried
_MOST = 1024  # records tried together, as many as 2 s allow


class Trial:
  """Tries the answers of a source's records.

  Args:
    judge: of the reward
    max_tokens: most tokens of a response, for rewards that take it
    whole: try every record, however long that takes: what is found then depends on the
      records alone
  """

  def __init__(self, judge: judge_lib.Judge, max_tokens: int, whole: bool):
    self._judge, self._whole = judge, whole
    self._slow = ""  # how an answer exceeded a limit
    self._given = {"length": 1, "max_tokens": max_tokens}

  def __call__(self, records: Sequence[dict], name: str = "") -> list[str]:
    """Why each record's answer cannot be used, "" where it can; logs if there is a name."""
    if not self._judge.terms:
      return [""] * len(records)
    began, self._slow = time.monotonic(), ""
    until = math.inf if self._whole else began + _SECONDS
    problems = list(map(self._unsendable, records))
    left = [i for i, problem in enumerate(problems) if not problem]
    count, solved, unsolved, typed = 2, [], [], 0
    while left and (now := time.monotonic()) < until:
      chunk, left = left[:count], left[count:]
      is_searched = bool(name and (solved or len(unsolved) < _UNSOLVED))
      for i, problem, is_solved in self._try(records, chunk, is_searched, until):
        problems[i] = problem
        (solved if is_solved else unsolved).append(i)
      typed += 0 if is_searched else len(chunk)
      if time.monotonic() - now < 2.0:
        count = min(2 * count, _MOST)
    is_file = bool(records and records[0].get("place"))
    if name and self._slow:
      logging.warning("%s: the reward is slow: an answer %s", name, self._slow)
    if name and (solved or unsolved and is_file) and not all(problems):
      _log(name, records, solved, unsolved, typed)
    if name and left:
      logging.info(
        "%s: gold answers: the other %s are not tried now, as these took %.0f s",
        *(name, f"{len(left):,}", time.monotonic() - began),
      )
    return problems

  def _unsendable(self, record: dict) -> str:
    try:
      self._judge.check_sendable(record["prompt"], record["answer"])
    except reward.RewardError as e:
      return str(e)
    return ""

  def _try(
    self, records: Sequence[dict], chunk: list[int], is_searched: bool, until: float
  ) -> Iterator[tuple[int, str, bool]]:
    """Why the answer of each cannot be used, and whether a response with it solves."""
    failure, usable, solved = {}, set(), set()
    for form in _FORMS:
      left = [i for i in chunk if i not in (solved if is_searched else usable)]
      if form != _FORMS[0]:
        left = [i for i in left if _is_scalar(records[i]["answer"])]
        if time.monotonic() > until:
          usable.update(left)  # nothing says that it is not
          break
      for i, verdict in zip(left, self._ask(records, left, form), strict=True):
        # A limit of time or memory says nothing of the answer.
        if not verdict.failure.startswith("reward "):
          usable.add(i)
          self._slow = self._slow or verdict.failure
        failure.setdefault(i, verdict.failure)
        if verdict.solved:
          solved.add(i)
    for i in chunk:
      yield i, "" if i in usable else failure[i], i in solved

  def _ask(
    self, records: Sequence[dict], index: Sequence[int], form: str
  ) -> list[reward.Verdict]:
    samples = []
    for record in (records[i] for i in index):
      answer = record["answer"]
      response = form.format(answer) if _is_scalar(answer) else ""
      samples.append((record["prompt"], response, answer, self._given))
    return self._judge.ask(samples, _ONE_S)


def _is_scalar(answer: object) -> bool:
  return isinstance(answer, str | int | float) and not isinstance(answer, bool)


def _log(
  name: str,
  records: Sequence[dict],
  solved: list[int],
  unsolved: list[int],
  typed: int,
) -> None:
  """`typed`: how many of the unsolved were tried in one form only."""
  which = f"{len(solved):,} of {len(solved) + len(unsolved) - typed:,}"
  more = ""
  if not solved:
    more = ", as with rewards that need more than an answer; else see answer_field"
  elif unsolved and (place := records[unsolved[0]].get("place")):
    more = f"; that of {place} does not"
  logging.info(
    "%s: gold answers: %s score as solved when given as the response%s",
    *(name, which, more),
  )
