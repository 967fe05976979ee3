r"""Programming problems: the code of a response has to pass tests.

    reward="tlt_jax.tasks.programs.passes(cpu_s=5.0, memory_mb=512)"

The code is the last block between ``` and ```, or ```python and ```. An answer is a list
of tests, or the JSON text of one:

    [["1 2\n", "3\n"], ["2 2\n", "4\n"]]     pairs: stdin, and expected stdout
    ["assert add(1, 2) == 3"]                statements, run after the code

Space at the ends of lines is ignored. Each test runs in its own `sandbox`; code that
exceeds a limit fails that test. Code can cheat an assert, with an __eq__ that is always
true; pairs do not have this weakness.
"""

from collections.abc import Callable
import dataclasses
import json
import re
import secrets
import time

from tlt_jax import ranges
from tlt_jax import sandbox
from tlt_jax.tasks import gsm8k

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Reads the code, and only when that has run the statement and the text to print at the end,
# so that code that exits early does not pass.
_ASSERTING = """
import os, sys
tests = os.fdopen(os.dup(0))
nothing, end = os.pipe()
os.dup2(nothing, 0)
os.close(end)
names = {"__name__": "__main__"}
import json
exec(compile(json.loads(tests.readline()), "code.py", "exec"), names)
statement, passed = json.loads(tests.readline())
exec(compile(statement, "test.py", "exec"), names)
print("\\n" + passed, flush=True)
os._exit(0)
"""


def passes(
  wall_s: ranges.Positive = 10.0,
  cpu_s: ranges.Positive = 5.0,
  memory_mb: ranges.Count = 512,
  processes: ranges.Count = 4,
  file_mb: ranges.Count = 4,
  total_s: ranges.Positive = 90.0,
  partial: bool = False,
  isolation: sandbox.Isolation = "namespaces",
) -> Callable[[object, str, object], float | tuple[float, bool]]:
  """A reward of 1.0 for code that passes all tests, else 0.0.

  Args:
    wall_s: seconds that a test may take, for code that waits; where it decides, another
      machine may judge otherwise
    cpu_s: seconds of CPU time that each process of a test may take, rounded up
    memory_mb: MiB of address space of each process; all tests of a moment can take this
      times `processes`, times verifier.processes
    processes: processes and threads that a test may have at a time
    file_mb: MiB of all files that a test writes, and of what it prints
    total_s: seconds that all tests of a response may take, one after the other; those that
      have not ended by then are not passed. Keep it below verifier.wall_s: a verdict that
      takes longer than that is a failure, whatever was passed
    partial: whether the reward is the share of tests that are passed; a response is solved
      if that is all of them
    isolation: 'namespaces'; or 'limits', where Linux does not allow those: then code is
      limited in time, memory, and number and size of processes, but not kept from files
      and network
  Raises:
    ValueError: an argument out of its range, or code cannot be isolated on this machine
  """
  ranges.check(passes, locals())
  limits = sandbox.Limits(wall_s, cpu_s, memory_mb, processes, file_mb)
  sandbox.check(isolation)

  def score(prompt: object, response: str, answer: object) -> float | tuple[float, bool]:
    del prompt
    tests, code = read_tests(answer), find_code(response)
    until, passed = time.monotonic() + total_s, 0
    for test in tests:
      if code is not None and _passes(code, test, limits, isolation, until):
        passed += 1
      elif not partial:
        return 0.0
    return passed / len(tests), passed == len(tests)

  return score


def find_code(response: str) -> str | None:
  blocks = _BLOCK.findall(gsm8k.after_thoughts(response))
  return blocks[-1] if blocks else None


def read_tests(answer: object) -> list[str | list[str]]:
  """Parses the tests of an answer; ValueError if it is no list of tests."""
  try:
    tests = json.loads(answer) if isinstance(answer, str) else answer
  except ValueError:
    tests = None
  if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
    raise ValueError(
      f"the answer {answer!r:.80} is no list of tests: give [stdin, stdout] pairs of "
      "texts, or assert statements"
    )
  return tests


def _is_test(test: object) -> bool:
  if isinstance(test, list | tuple):
    return len(test) == 2 and all(isinstance(text, str) for text in test)
  return isinstance(test, str)


def _passes(
  code: str,
  test: str | list[str],
  limits: sandbox.Limits,
  isolation: sandbox.Isolation,
  until: float,
) -> bool:
  left_s = until - time.monotonic()
  if left_s <= 0:
    return False
  limits = dataclasses.replace(limits, wall_s=min(limits.wall_s, left_s))
  if isinstance(test, str):
    passed = secrets.token_hex(16)
    stdin = f"{json.dumps(code)}\n{json.dumps([test, passed])}\n"
    ran = sandbox.run(_ASSERTING, stdin, limits, isolation)
    return ran.status == 0 and ran.stdout.endswith(f"\n{passed}\n")
  ran = sandbox.run(code, test[0], limits, isolation)
  return ran.status == 0 and _lines(ran.stdout) == _lines(test[1])


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().splitlines()]
