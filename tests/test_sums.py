"""Sums after worked examples: what is asked, and the verdict."""

import pytest

from tlt_jax.tasks import sums


def test_problems_are_sums_that_the_splits_do_not_share():
  sources = {split: sums.Problems(split, 10**9) for split in ("train", "held_out")}
  asked = {split: [x[i] for i in range(500)] for split, x in sources.items()}
  for records in asked.values():
    for record in records:
      *worked, last = record["prompt"].split("\n")
      assert len(worked) == 4 and all(eval(line.replace("=", "==")) for line in worked)
      assert eval(last.removesuffix("=")) == int(record["answer"])
      assert last.endswith("=") and " 0 " not in f" {last}"
  train, held_out = ({x["prompt"] for x in records} for records in asked.values())
  assert not train & held_out and (len(train), len(held_out)) == (331, 128)
  assert sources["train"][331] == sources["train"][0]
  with pytest.raises(IndexError):
    sources["train"][10**9]


@pytest.mark.parametrize(
  ("response", "expected"),
  [(" 29\n12 + 7 = 19", 1.0), ("29", 1.0), (" 2 9", 0.0), (" 290", 0.0), (" so", 0.0)],
)
def test_the_first_number_is_the_answer(response, expected):
  assert sums.score("21 + 8 =", response, "29") == expected
