"""The benchmark beside transformers: its process, its turns, its figures."""

import sys

import numpy as np
import pytest

from tests import commands
from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib

bench = commands.module("bench.transformers")

# Speaks as `transformers_side` does, and answers with what it was asked.
STAND_IN = """
import json, sys
print(json.dumps({"torch": "2"}), flush=True)
for line in sys.stdin:
  asked = json.loads(line)
  tokens = asked["prompt"] + asked["stop"] + [asked["max_tokens"]]
  print(json.dumps({"tokens": tokens, "seconds": 0.5}), flush=True)
"""


def test_transformers_answers_one_request_after_the_other_in_its_own_process():
  requests = requests_lib.make_requests(
    [np.array([1, 2]), np.array([3])], max_tokens=7, temperature=0, stop_tokens=[5]
  )
  with bench.Transformers([sys.executable, "-c", STAND_IN]) as theirs:
    assert theirs.versions == {"torch": "2"}
    assert theirs.answer(requests) == ([[1, 2, 5, 7], [3, 5, 7]], 1.0)


def test_a_python_without_torch_is_told_how_to_get_one():
  with pytest.raises(ValueError, match="pip install torch transformers"):
    bench.Transformers([sys.executable, "-c", "pass"])


def test_the_side_of_transformers_stands_alone():
  """No module of this project is imported, which its Python does not have."""
  source = bench._PROGRAM.read_text()
  assert "experiments" not in source.split('"""')[2] and "tlt_jax" not in source
  compile(source, "transformers_side", "exec")


class Stored:
  """Stands for transformers: answers with tokens that are known."""

  def __init__(self, tokens):
    self._tokens = tokens

  def answer(self, requests):
    return self._tokens, 2.0


def test_a_response_that_differs_is_counted():
  """Ours are rollouts of a tiny model; the end token counts as one."""
  requests = tiny.requests(num_prompts=2, responses=1, max_tokens=8, temperature=0)
  options = rollout.Options(slots=1, **tiny.SIZES)
  mesh = tiny.mesh(2)
  engine = rollout.make(tiny.CONFIG, mesh, options)
  ours = {"off": lambda requests: engine(tiny.on(mesh), requests)}
  samples = ours["off"](requests)
  tokens = [samples.response(i).tolist() for i in range(2)]
  same = [bench.turn(Stored(tokens), ours, requests, number) for number in range(2)]
  found = bench.summary(same)
  assert set(found) == {"transformers", "off"}
  assert found["off"]["differing_responses"] == 0 and found["off"]["responses"] == 4
  assert found["transformers"]["tokens_per_s"] == sum(map(len, tokens)) / 2
  assert found["transformers"]["over_transformers"]["mean"] == 1
  other = [tokens[0], [*tokens[1][:-1], 63]]
  found = bench.summary([bench.turn(Stored(other), ours, requests, 0)])
  assert found["off"]["differing_responses"] == 1
