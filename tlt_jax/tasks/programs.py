r"""Programming problems: the code of a response has to pass tests.

    reward="tlt_jax.tasks.programs.passes(cpu_s=5.0, memory_mb=1024)"

The code is the last block of code between fences, ``` or ~~~; see `find_code`. An answer is
a list of tests, or the JSON text of one:

    [["1 2\n", "3\n"], ["2 2\n", "4\n"]]     pairs: stdin, and expected stdout
    ["assert add(1, 2) == 3"]                statements, run after the code

For pairs the code is a whole program. Space at the ends of lines is ignored.

For statements it is a module that is imported: `if __name__ == "__main__"` does not run. It
may use List, deque, math and the like without importing them, because problems in the style
of LeetCode expect that; the graders of TACO, LiveCodeBench and verl (prime_code) import the
same names. Statements may use these modules too, and else only what the code defines.

Each test runs in its own `sandbox`; code that exceeds a limit fails that test. Code can
cheat an assert, with an __eq__ that is always true; pairs do not have this weakness.
"""

import ast
from collections.abc import Callable, Iterator
import dataclasses
import json
import re
import secrets
import time
import warnings

from tlt_jax import ranges
from tlt_jax import sandbox
from tlt_jax.tasks import gsm8k

# In a list or a quotation, too: "1. ```python".
_OPENING = re.compile(
  r"(?P<before>\s*(?:(?:[-*+>]|\d+[.)])\s*)*)(?P<fence>`{3,}|~{3,})(?P<tag>[^`]*)"
)
_LANGUAGE = re.compile(r"[{.\s]*(?:language-)?([^\s}:,;=]*)")
_PYTHON = re.compile(r"i?py(?:thon|py)?[\d.]*", re.IGNORECASE)
_QUOTED = re.compile(r"\s*> ?")
_ACTIVE = (
  *(ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
  *(ast.Import, ast.ImportFrom),
)
_FENCES = 64  # within a block's texts, before the one that ends it

_IMPORTS = """
from string import *; from re import *; from datetime import *; from collections import *
from heapq import *; from bisect import *; from copy import *; from math import *
from random import *; from statistics import *; from itertools import *
from functools import *; from operator import *; from io import *; from sys import *
from json import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json
sys.setrecursionlimit(50_000)
"""
# Reads the code, and only when that has run the statement and the text to print at the end,
# so that code that exits early does not pass. The imports are builtins of the code, so they
# are no names of it: a statement that calls `gcd` fails if the code has none.
_ASSERTING = f"""
import builtins, json, linecache, os, sys
tests = os.fdopen(os.dup(0))
nothing, end = os.pipe()
os.dup2(nothing, 0)
os.close(end)
code = json.loads(tests.readline())
linecache.cache["solution.py"] = len(code), None, code.splitlines(True), "solution.py"
more = {{}}
exec({_IMPORTS!r}, more)
modules = {{name: x for name, x in more.items() if type(x) is type(sys)}}
solution = sys.modules["solution"] = type(sys)("solution")
solution.__file__ = "solution.py"
solution.__builtins__ = more | vars(builtins)
exec(compile(code, "solution.py", "exec"), vars(solution))
statement, passed = json.loads(tests.readline())
names = modules | vars(solution) | {{"__builtins__": builtins}}
exec(compile(statement, "test.py", "exec"), names)
os.write(1, f"\\n{{passed}}\\n".encode())
os._exit(0)
"""


def passes(
  wall_s: ranges.Positive = 10.0,
  cpu_s: ranges.Positive = 5.0,
  memory_mb: ranges.Count = 1024,
  processes: ranges.Count = 8,
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
  """The last block of code between fences, without its indentation; None if there is none.

  Code is tagged as Python, or has no tag but is Python, and can do anything; output is not,
  even where it is an expression of Python. If there is no code, the last block of Python or
  without a tag counts, a wrong program. A block without an end ends with the response. Text
  without fences is no code: prose can be valid Python, and a sketch is not meant to run.
  """
  code, other = None, None
  for tag, text in _blocks(gsm8k.after_thoughts(response)):
    language = _LANGUAGE.match(tag)[1]
    is_tagged = _PYTHON.fullmatch(language) is not None
    if is_tagged or not language:
      other = text
      code = other if _is_code(other, is_tagged) else code
  return other if code is None else code


def _blocks(text: str) -> Iterator[tuple[str, str]]:
  """The tag and the text of each block between fences, as Markdown has them.

  Other than in Markdown, a block may have any indentation, and end at the end of its last
  line or where the next one starts. Fences within a string of Python are text.
  """
  lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
  at = 0
  while at < len(lines):
    opening = _OPENING.fullmatch(lines[at])
    at += 1
    if opening:
      if ">" in opening["before"]:
        lines[at:] = [_QUOTED.sub("", line) for line in lines[at:]]
      inside, at = _inside(lines, at, opening["fence"])
      yield opening["tag"], _dedented(inside)


def _inside(lines: list[str], start: int, fence: str) -> tuple[str, int]:
  """The text of a block, and the number of the line after it."""
  closing = re.compile(f"(?!\\s*#)(.*?){fence[0]}{{{len(fence)},}}\\s*")
  ends = []
  for at in range(start, len(lines)):
    closed, opening = closing.fullmatch(lines[at]), _OPENING.fullmatch(lines[at])
    if closed:
      ends.append(("\n".join([*lines[start:at], closed[1]]), at + 1))
    elif opening and opening["fence"].startswith(fence):
      ends.append(("\n".join(lines[start:at]), at))
    else:
      continue
    if not _ends_in_string(ends[-1][0]):
      return ends[-1]
    if len(ends) == _FENCES:
      break
  return ends[0] if ends else ("\n".join(lines[start:]), len(lines))


def _ends_in_string(text: str) -> bool:
  if '"""' not in text and "'''" not in text:
    return False
  error = _parsed(_dedented(text))
  return isinstance(error, SyntaxError) and "unterminated triple-quoted" in error.msg


def _dedented(text: str) -> str:
  """Removes the first line's indentation from all lines, if text is no Python with it."""
  text = text.removeprefix("\ufeff")
  first = re.match(r"\s*^([ \t]+)\S", text, re.MULTILINE)
  if first is None or isinstance(_parsed(text), ast.Module):
    return text
  return re.sub(f"^[ \\t]{{1,{len(first[1])}}}", "", text, flags=re.MULTILINE)


def _is_code(text: str, is_tagged: bool) -> bool:
  """Whether it can do anything; text that is tagged as Python may have a wrong syntax."""
  tree = _parsed(text)
  if not isinstance(tree, ast.Module):
    return is_tagged and not text.lstrip().startswith(">>>")
  nodes = list(ast.walk(tree))
  if not is_tagged and all(
    isinstance(node, ast.Expr | ast.AnnAssign) for node in tree.body
  ):
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    return any(re.search(r"print|write|exec", call) for call in calls)
  return any(isinstance(node, _ACTIVE) for node in nodes)


def _parsed(code: str) -> ast.Module | Exception:
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of strange escapes
    try:
      return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
      return e


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
