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
