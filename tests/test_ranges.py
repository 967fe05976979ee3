"""Arguments are held to their annotations, and these are told in words."""

import dataclasses
from typing import Annotated, Any, Literal

import annotated_types
import numpy as np
import pytest

from tlt_jax import prompt_checks
from tlt_jax import ranges
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.spot import loss
from tlt_jax.spec_decode.spot import spot


class Unknown:
  """A type that pydantic cannot check."""


@dataclasses.dataclass
class Hidden:
  """A type with a name that only type checkers see."""

  field: "Nobody"  # noqa: F821


@pytest.mark.parametrize(
  ("annotation", "value", "expected"),
  [
    (ranges.Count, 1, True),
    (ranges.Count, 0, False),
    (ranges.Count, True, False),
    (ranges.Share, float("nan"), False),
    (ranges.Count | None, None, True),
    (Literal["a", "b"], "b", True),
    (Literal["a", "b"], "c", False),
    (tuple[int, ...], [1, 2], True),
    (tuple[tuple[int, int], ...], [[1, 2]], True),
    (tuple[tuple[int, int], ...], [[1]], False),
    (list[int], [1, 2], True),
    (list[int] | None, [1, 2], True),
    (list[int], ["x"], False),
    (dict[str, float], {"a": 0.5}, True),
    (dict[str, float], [1], False),
    (Unknown, 3, True),
    (list[Unknown], "x", True),
    (Hidden | None, "x", True),
    (Any, object(), True),
  ],
)
def test_values_hold_or_do_not(annotation, value, expected):
  assert ranges.holds(annotation, value) is expected


@pytest.mark.parametrize(
  ("annotation", "expected"),
  [
    (ranges.Count, "a whole number from 1 to 1,048,576"),
    (ranges.ShareAboveZero, "a number above 0 and at most 1"),
    (ranges.Seed, "a whole number at least 0 and below 2,147,483,648"),
    (Annotated[int, annotated_types.Interval(ge=2)], "a whole number at least 2"),
    (Annotated[float, annotated_types.Interval(lt=0.5)], "a number below 0.5"),
    (ranges.Large | None, "a whole number from 1 to 1,099,511,627,776 or None"),
    (Literal["a", "b"], "one of 'a', 'b'"),
    (tuple[str, ...], "a tuple, each entry a text"),
    (tuple[int, bool], "(a whole number, True or False)"),
    (list[int], "a list, each entry a whole number"),
    (dict[str, float], "a mapping"),
    (dict, "a mapping"),
    (Unknown, "Unknown"),
    (Any, "anything"),
  ],
)
def test_types_in_words(annotation, expected):
  assert ranges.words(annotation) == expected


def test_arguments_are_held_to_their_annotations():
  """Of functions and of classes; numpy's numbers are numbers."""

  def function(count: ranges.Count, free, kind: Unknown | None = None):
    local = free
    ranges.check(function, locals())
    return local

  @dataclasses.dataclass
  class Fields:
    share: ranges.Share = 0.5

    def __post_init__(self):
      ranges.check(Fields, vars(self))

  assert function(np.int64(3), "anything", kind=Unknown()) == "anything"
  assert Fields(np.float32(0.25)).share == 0.25
  with pytest.raises(ValueError, match="^count must be a whole number from 1 .*, got 0$"):
    function(0, None)
  with pytest.raises(ValueError, match="^share must be a number from 0 to 1, got 1.5$"):
    Fields(1.5)


@pytest.mark.parametrize(
  ("make", "arguments"),
  [
    (spot.Options, dict(rows=0)),
    (spot.Options, dict(carried_rows=-1)),
    (spot.Options, dict(carried_rows=129)),
    (spot.Options, dict(context_tokens=0)),
    (spot.Options, dict(context_tokens=129)),
    (spot.Options, dict(micro_batches_per_update=0)),
    (spot.Options, dict(after_rollout_share=-0.1)),
    (spot.Options, dict(chunk_tokens=1.5)),
    (loss.Loss, dict(steps=0)),
    (loss.Loss, dict(distance="l2")),
    (prompt_checks.Unusable, dict(too_long="cut")),
    (optimizer.make, dict(name="sgd", learning_rate=0.1)),
    (optimizer.make, dict(learning_rate=-0.1, name="adamw")),
    (optimizer.make, dict(total=2, warmup=2, name="adamw", learning_rate=0.1)),
  ],
  ids=lambda x: getattr(x, "__qualname__", str(x)),
)
def test_what_the_library_is_given_is_refused_by_name(make, arguments):
  with pytest.raises(ValueError, match=rf"\b{next(iter(arguments))}\b.* must (be|exceed)"):
    make(**arguments)
