"""Code that a model wrote: judged by tests, and kept from doing harm."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tlt_jax import sandbox
from tlt_jax.rl import judge
from tlt_jax.tasks import programs

LIMITS = sandbox.Limits(wall_s=20.0, cpu_s=2.0, memory_mb=256, processes=4, file_mb=1)


@pytest.fixture(scope="module")
def isolates():
  """Skips where Linux does not allow namespaces."""
  try:
    sandbox.check("namespaces")
  except sandbox.SandboxError as e:
    pytest.skip(str(e))


def left_of(text: str) -> list[psutil.Process]:
  """Processes that hold a text in their command line."""
  return [p for p in psutil.process_iter(["cmdline"]) if text in (p.info["cmdline"] or [])]


def test_a_program_reads_and_prints_in_a_folder_of_its_own(isolates):
  text = (
    "import os\n"
    "print(input(), os.getcwd(), os.listdir('.'), os.listdir('/proc'), __name__)\n"
    "open('x', 'w').write('y'); print(open('/tmp/x').read())\n"
  )
  ran = sandbox.run(text, "hé\n", LIMITS)
  assert ran == sandbox.Ran(0, "hé /tmp [] [] __main__\ny\n")


ATTACKS = {
  "fork bomb": ("import os\nwhile True:\n  os.fork()", ""),
  "memory": ("x = bytearray(2**30)\nprint('got it')", ""),
  "files": ("open('x', 'wb').write(bytes(2**22))\nprint('got it')", ""),
  "many files": (
    "n = 0\ntry:\n  while n < 9999:\n    open(str(n), 'x').close(); n += 1\n"
    "except OSError: print(n < 100)",
    "True\n",
  ),
  "foreign files": (
    f"for path in ('/usr/x', '/x', '/dev/x', {str(pathlib.Path.cwd())!r} + '/x'):\n"
    "  try: open(path, 'w'); print('got it')\n"
    "  except OSError: pass",
    "",
  ),
  "output": ("while True: print('x' * 10**6)", None),
  "privileges": (
    "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "print(libc.mount(b'n', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/proc', 2),\n"
    "      libc.mount(b'none', b'/', None, 4096 | 32, None))\n",
    "-1 -1 -1\n",
  ),
  "exit": ("import os; os._exit(7)", ""),
  "sleep": ("import time; time.sleep(1000)", ""),
  "spin": ("while True: pass", ""),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_stopped(isolates, attack):
  """It gets nothing."""
  text, printed = ATTACKS[attack]
  waits = attack in ("sleep", "fork bomb")
  limits = dataclasses.replace(LIMITS, wall_s=2.0) if waits else LIMITS
  ran = sandbox.run(text, "", limits)
  if printed is None:
    assert ran.status != 0 and len(ran.stdout) <= 2**20
  else:
    assert ran.stdout == printed
  assert not pathlib.Path("x").exists()


def test_there_is_no_network(isolates):
  """Not even to this machine."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    text = (
      f"import socket\nfor host in ('127.0.0.1', '1.1.1.1'):\n"
      f"  try: socket.create_connection((host, {port}), 1); print('connected')\n"
      "  except OSError as e: print(type(e).__name__)\n"
    )
    assert sandbox.run(text, "", LIMITS).stdout == "OSError\nOSError\n"


FORKS = """
import os, sys
if not os.fork():
  os.setsid()
  sleep = "import time; time.sleep(1000)"
  os.execv(sys.executable, [sys.executable, "-c", sleep, {mark!r}])
import time
time.sleep({wait_s})
"""
RUNS = """
import sys
sys.path.insert(0, sys.argv[1])
from tlt_jax import sandbox
sandbox.run(sys.argv[2], "", sandbox.Limits(wall_s=500.0))
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_end_with_the_program(isolates, is_killed):
  """Those in sessions of their own too; and all with a run that is killed."""
  mark = f"mark_{os.getpid()}_{os.urandom(4).hex()}"
  if not is_killed:
    assert sandbox.run(FORKS.format(mark=mark, wait_s=1), "", LIMITS).status == 0
  else:
    root = str(pathlib.Path(__file__).parents[1])
    program = FORKS.format(mark=mark, wait_s=500)
    run = subprocess.Popen([sys.executable, "-c", RUNS, root, program])
    while not left_of(mark):
      assert run.poll() is None
      time.sleep(0.05)
    run.kill()
    run.wait()
    time.sleep(1.0)
  assert not left_of(mark)


def test_limits_alone_must_be_asked_for(monkeypatch):
  python = "/usr/bin/python3"  # where root's own can be read by nobody but root
  if os.getuid() == 0:
    if not os.path.exists(python):
      pytest.skip("there is no Python that everybody can read")
    monkeypatch.setattr(sys, "executable", python)
  score = programs.passes(isolation="limits")
  assert score("", "```\nprint(1)\n```", [["", "1"]]) == (1.0, True)


ADD = "Adding:\n```python\ndef add(a, b):\n  return a {} b\n```\n"
ECHO = "```\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"


@pytest.mark.parametrize(
  "response, answer, reward_, solved",
  [
    (ADD.format("+"), ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1, True),
    (ADD.format("*"), ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 0.5, False),
    (ADD.format("+"), '["assert add(1, 2) == 3"]', 1, True),
    ("def add(a, b): return a + b", ["assert add(1, 2) == 3"], 0, False),
    ("```\nraise SystemExit(0)\n```", ["assert add(1, 2) == 3"], 0, False),
    ("```\nimport os\nos._exit(0)\n```", ["assert False"], 0, False),
    ("```\nprint(input())\n```", ["assert False"], 0, False),
    (ECHO, [["1 2\n", "3 \n\n"], ["2 2", "4"]], 1, True),
    (ECHO, [["1 2\n", "3"], ["2 2", "5"]], 0.5, False),
    ("```\nprint(3)\n```\nor\n" + ECHO, [["1 1", "2"]], 1, True),
    (ECHO + "</think>no", [["1 1", "2"]], 0, False),
    ("```\n\ud800 = 1\n```", [["", ""]], 0, False),
  ],
)
def test_code_is_judged_by_its_tests(isolates, response, answer, reward_, solved):
  """In part, if that is wanted; code that ends before a test does not pass it."""
  score = programs.passes(wall_s=60.0, cpu_s=10.0, partial=True)
  assert score("", response, answer) == (reward_, solved)


SUM = "a, b = map(int, input().split())\nprint(a + b)"


def block(code: str = SUM, tag: str = "python", fence: str = "```") -> str:
  return f"So:\n{fence}{tag}\n{code}\n{fence}\n"


def indented(text: str, by: str) -> str:
  return "".join(by + line for line in text.splitlines(keepends=True))


IN_A_STRING = f"X = '''\n```python\nprint(1)\n```\n'''\n# ```\n{SUM}"
TAGS = (
  *("", "py", "Python", "python3", "PY3", "pypy3", "{.python}", "{python}", " python "),
  *("python title='a.py'", "python:a.py", "python3 []", "python3.11", "language-python"),
)


@pytest.mark.parametrize(
  "response, code",
  [
    *((block(tag=tag), SUM) for tag in TAGS),
    (block(fence="~~~"), SUM),
    (block(fence="````"), SUM),
    (block().replace("\n", "\r\n"), SUM),
    (f"```python\n{SUM}", SUM),
    (f"```python\n{SUM}```", SUM),
    (f"```python\nprint(0)\nNo:\n{block()}", SUM),
    (indented(block(), "   "), SUM),
    (indented(block(), "\t"), SUM),
    (indented(block(), "> "), SUM),
    (f"- ```python\n  {SUM[:-12]}  {SUM[-12:]}\n  ```", SUM),
    (f"1. \n   ```python\n{SUM}\n   ```", SUM),
    (block(IN_A_STRING), IN_A_STRING),
    (indented(block("if x:\n  y('''a\n''')"), "  "), "if x:\n  y('''a\n''')"),
    *(
      (block() + block(text, ""), SUM)
      for text in ("3", "1 2", "[3]", "YES", "$ python a.py")
    ),
    *(
      (block() + block("3", tag), SUM)
      for tag in ("text", "output", "bash", "json", "python")
    ),
    (block() + block(">>> f(1)\n1"), SUM),
    (block() + block(""), SUM),
    (block() + "```\n", SUM),
    (block("print(0)") + block(tag=""), SUM),
    (block() + block("print(", "python"), "print("),
    (block("print(", ""), "print("),
    (block(tag="cpp"), None),
    (SUM, None),
  ],
)
def test_the_last_block_of_code_is_found(response, code):
  """Fenced in any way; output is not code. The last one counts, if it is wrong, too."""
  found = programs.find_code(response)
  assert found == code or found.strip() == code


def test_code_is_found_quickly():
  """In responses that repeat themselves, too."""
  start = time.process_time()
  for text in ("```\n", "```\n(\n", "```\n'''\n", "> ", "- ", "1", "`"):
    programs.find_code("```\nx = '''\n" + text * 5_000)
  assert time.process_time() - start < 5.0


THREAD = "t = threading.Thread(target=lambda: f(10**5)); t.start(); t.join()"
PROGRAMS = {
  "exit": f"{SUM}\nexit()",
  "quit": f"{SUM}\nquit(0)",
  "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
  "/dev/stdout": f"o = open('/dev/stdout', 'w')\n{SUM[:-1]}, file=o)",
  "other devices": f"open('/dev/null', 'w'), open('/dev/urandom', 'rb').read(9)\n{SUM}",
  "descriptor": "print(sum(map(int, open(0).read().split())))",
  "size of stdin": "import os\nx = os.read(0, os.fstat(0).st_size)\n"
  "print(sum(map(int, x.split())))",
  "numpy": "import numpy as np\nx = np.loadtxt('/dev/stdin', int)\nprint(x @ [1, 1])",
  "its file": f"import inspect\ndef f(): pass\ninspect.getsource(f), open(__file__)\n{SUM}",
  "its module": f"import pickle\nclass A: pass\npickle.dumps(A())\n{SUM}",
  "stderr": f"import sys\nsys.stderr.write('x' * 10**7)\n{SUM}",
  "deep": "import sys, threading, resource as r\nsys.setrecursionlimit(10**6)\n"
  "r.setrlimit(r.RLIMIT_STACK, (r.RLIM_INFINITY, r.RLIM_INFINITY))\n"
  f"threading.stack_size(2**29)\ndef f(n): return n and f(n - 1)\n{THREAD}\n{SUM}",
  "deep in C": "import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.cache\n"
  f"def f(n): return n and f(n - 1)\nf(50_000)\n{SUM}",
  "processes": "import multiprocessing as m\nif __name__ == '__main__':\n"
  f"  with m.Pool(2) as p: p.map(abs, [1])\n{indented(SUM, '  ')}",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_what_python_has(isolates, name):
  """Where it can be had in isolation; it must still end well."""
  score = programs.passes(wall_s=60.0)
  assert score("", block(PROGRAMS[name]), [["1 2", "3\n"]]) == (1.0, True)
  assert score("", block(PROGRAMS[name] + "\n1 / 0"), [["1 2", "4"]]) == 0.0


@pytest.mark.parametrize(
  "code, test, passed",
  [
    ("class A:\n  def f(self, x: List[int]): return Counter(x)", "assert A().f([1])[1]", 1),
    ("@cache\ndef f(n): return n and f(n - 1)", "assert f(9_000) == 0", 1),
    ("def f(): return sqrt(4)", "assert math.isclose(f(), 2)", 1),
    (
      "def f(): return pow(2, 3, 5)\nif __name__ == '__main__': f(input())",
      "assert f()",
      1,
    ),
    ("from math import gcd", "assert gcd(4, 6) == 2", 1),
    ("from math import *", "assert gcd(4, 6) == 2", 1),
    ("def f(): return gcd(4, 6)", "assert gcd(4, 6) == 2", 0),
    ("import io, sys\nsys.stdout = io.StringIO()\ndef f(): pass", "f()", 1),
    ("def f(): pass\nexit()", "f()", 0),
    ("print(open('/dev/stdin').read())\nimport os\nos._exit(0)", "f()", 0),
  ],
)
def test_asserted_code_has_what_leetcode_has(isolates, code, test, passed):
  """Imports, which are no answers, and recursion; its main part does not run."""
  found = programs.passes(wall_s=60.0, partial=True)("", block(code), [test])
  assert found == (passed, bool(passed))


def test_tests_beyond_the_total_time_are_not_passed(isolates):
  """What was found until then counts."""
  score = programs.passes(total_s=1.0, partial=True)
  tests = [["", "1"], ["x", "1"], *[["", "1"]] * 6]
  program = "import sys, time\ntime.sleep(1000 * len(sys.stdin.read()))\nprint(1)"
  found, solved = score("", f"```\n{program}\n```", tests)
  assert found in (0.0, 1 / 8) and not solved


def test_an_attack_costs_only_its_sample(isolates):
  """In processes of verifiers; without partial rewards one failure is enough."""
  judges = judge.Judge("tlt_jax.tasks.programs.passes(wall_s=20.0, cpu_s=1.0)")
  responses = [ECHO, "```\nwhile True: pass\n```", ECHO.replace("sum", "max"), ECHO]
  found = judges("pppp", responses, [[["1 2", "3"], ["5 0", "5"]]] * 4)
  judges.close()
  assert found.reward.tolist() == [1, 0, 0, 1] and not any(found.failure)
  assert found.solved.tolist() == [True, False, False, True]
