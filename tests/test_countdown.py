"""Countdown: problems, written searches, and the verdict on them."""

import functools
import operator
import random
import re

import numpy as np
import pytest

from tlt_jax import tokenization
from tlt_jax.tasks import countdown

PROMPT = "14 12 11>22:"
SOLVED = "14+12=26,26-11=15;14-12=2,11+2=13;11*2=22!\n"


def score(prompt, response):
  return countdown.score(prompt, response, answer="")


@functools.cache
def problems(split, size=64, **options):
  source = countdown.Problems(split, size, **{"four_share": 0.5, **options})
  return [source[i] for i in range(size)]


@functools.cache
def searches():
  """(prompt, response) of written searches with three and with four numbers."""
  rng = random.Random(0)
  written = [
    (r["prompt"], countdown.write_search(r["prompt"], rng, 3000))
    for r in problems("train", 160)
  ]
  return [(prompt, response) for prompt, response in written if response]


def test_written_searches_score_one():
  """With dead ends and without, three numbers and four."""
  sizes = [len(prompt.split(">")[0].split()) for prompt, _ in searches()]
  assert sizes.count(3) > 40 and sizes.count(4) > 40
  assert sum(";" in response for _, response in searches()) > 80
  assert all(score(*search) == 1.0 for search in searches())


def test_every_step_of_a_written_search_is_right():
  """Also those that led nowhere."""
  for _, response in searches():
    for a, op, b, result, _ in re.findall(r"(\d+)(\D)(\d+)=(\d+)(.)", response):
      operation = {"+": "add", "-": "sub", "*": "mul", "/": "truediv"}[op]
      exact = getattr(operator, operation)(int(a), int(b))
      assert exact == int(result) >= 0


@pytest.mark.parametrize(
  "response",
  [
    SOLVED,
    "14-12=2,11*2=22!\n",
    "12-11=1,14*1=14;11*14=154,154/12=12;14-12=2,2*11=22!\n",
  ],
)
def test_a_right_solution_scores_one(response):
  """However it was found, and in whatever order a product's factors stand."""
  assert score(PROMPT, response) == 1.0


@pytest.mark.parametrize(
  ("response", "fault"),
  [
    ("\n", "nothing but the stop"),
    ("22!\n", "no step"),
    ("14-12=2,11*2=22!", "no stop"),
    ("14-12=2,11*2=22;\n", "given up"),
    ("14-12=2,11*2=22!\n14-12=2", "text after the stop"),
    ("14-12=2,11*2=2\n", "cut off"),
    ("11*2=22!\n", "a number from nowhere, one left over"),
    ("14-12=2,11+11=22!\n", "a number used twice"),
    ("11+11=22,22*1=22!\n", "one number used as two"),
    ("12+11=23,23-14=9!\n", "not the target"),
    ("12+11=23,23-14=22!\n", "the last result is wrong, the value too"),
    ("14-12=2,11*2=23!\n", "the last result is wrong, the value is not"),
    ("14-12=3,11*3=22!\n", "wrong twice, and right in the end"),
    ("12-14=2,11*2=22!\n", "the wrong way round"),
    ("14-12=2!11*2=22!\n", "no step leads to two numbers left"),
    ("14*0=0,11/0=22!\n", "division by zero"),
  ],
)
def test_a_wrong_solution_scores_zero(response, fault):
  assert score(PROMPT, response) == 0.0


@pytest.mark.parametrize(
  ("response", "expression"),
  [
    # Both ways back: from a dead end to two numbers, and to three.
    (
      "1+2=3|3+3=6,6+4=10;6*4=24;3*4=12,12+3=15;2*3=6|6*4=24,24-1=23;24+1=25!\n",
      "(((2*3)*4)+1)",
    ),
    # The step to two numbers is the last one, the one to three further back.
    ("1+4=5|5+2=7,7*3=21;5-3=2,2+2=4;3*5=15,15*2=30!\n", "((3*(1+4))*2)"),
    # A step to three numbers that nothing follows is not on the path.
    ("1+2=3|4*2=8|8-1=7,7*3=21!\n", "(((4*2)-1)*3)"),
  ],
)
def test_the_path_to_the_end_is_found_among_dead_ends(response, expression):
  """Four numbers: the last step of each depth before the end."""
  assert countdown.answer_expression([1, 2, 3, 4], response) == expression
  target = round(eval(expression))
  assert score(f"1 2 3 4>{target}:", response) == 1.0
  assert score(f"1 2 3 4>{target + 1}:", response) == 0.0


def test_problems_depend_on_their_split_and_index_alone():
  """Not on the size of the source, nor on what was read before."""
  source = countdown.Problems("train", 10_000, four_share=0.5)
  assert [source[i] for i in (63, 5, 0)] == [problems("train")[i] for i in (63, 5, 0)]
  assert len(source) == 10_000
  with pytest.raises(IndexError):
    source[10_000]


def test_problems_are_what_they_are_said_to_be():
  """Numbers of 1..20, targets of 10..99, answers that hit them, a share of fours."""
  counts = []
  for record in problems("train", 160):
    numbers, target = re.fullmatch(r"([\d ]+)>(\d+):", record["prompt"]).groups()
    numbers = [int(n) for n in numbers.split()]
    counts.append(len(numbers))
    assert all(1 <= n <= 20 for n in numbers) and 10 <= int(target) <= 99
    assert sorted(map(int, re.findall(r"\d+", record["answer"]))) == sorted(numbers)
    np.testing.assert_allclose(eval(record["answer"]), int(target))
  assert set(counts) == {3, 4} and 50 < counts.count(4) < 110
  for share, numbers in ((0.0, 3), (1.0, 4)):
    prompts = [r["prompt"] for r in problems("train", 16, four_share=share)]
    assert {p.count(" ") + 1 for p in prompts} == {numbers}


def test_the_splits_share_no_problem():
  """Not even with the numbers in another order."""

  def names(records):
    split = [r["prompt"].rstrip(":").split(">") for r in records]
    return {(tuple(sorted(numbers.split())), target) for numbers, target in split}

  train, held_out = names(problems("train", 600)), names(problems("held_out", 32))
  assert len(held_out) > 30 and not train & held_out


def test_the_tokenizer_survives_being_saved_next_to_a_policy(tmp_path):
  """Every character a token of its own, spaces and the stop included."""
  countdown.tokenizer().save_pretrained(tmp_path)
  tokenizer = tokenization.Tokenizer.load(tmp_path)
  assert tokenizer.vocab_size == len(countdown.CHARACTERS) + 1
  for text in (PROMPT, SOLVED, countdown.CHARACTERS, " 1  2 > :", *searches()[0]):
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text) and tokens.min() > 0
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, 0, 0]) == text
  assert tokenizer.stop_tokens == tuple(tokenizer.encode(countdown.STOP))


def test_a_search_that_gives_up_ends_at_one_of_its_dead_ends():
  """All of them are drawn; a search that has none stays as it is."""
  search = "14+12=26,26-11=15;14-12=2,2+11=13;11*2=22!\n"
  found = {countdown.give_up(search, random.Random(seed)) for seed in range(20)}
  assert found == {"14+12=26,26-11=15;\n", "14+12=26,26-11=15;14-12=2,2+11=13;\n"}
  assert not any(countdown.score("14 12 11>22:", text, "") for text in found)
  at_once = "14-12=2,11*2=22!\n"
  assert countdown.give_up(at_once, random.Random(0)) == at_once
