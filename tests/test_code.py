"""Code that a model wrote: judged by tests, and kept from doing harm."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from tlt_jax import isolation
from tlt_jax import sandbox
from tlt_jax.rl import judge
from tlt_jax.rl import reward
from tlt_jax.tasks import code

LIMITS = sandbox.Limits(wall_s=20.0, cpu_s=2.0, memory_mb=256, processes=4, file_mb=1)


@pytest.fixture(scope="module")
def isolates():
  """Skips where Linux does not allow namespaces."""
  try:
    sandbox.check("namespaces")
  except sandbox.SandboxError as e:
    pytest.skip(str(e))


@pytest.fixture
def limited(monkeypatch):
  """Runs a Python that everybody can read: root's code runs as nobody."""
  python = pathlib.Path("/usr/bin/python3")
  if os.getuid() == 0:
    if not python.exists():
      pytest.skip("there is no Python that nobody can read")
    monkeypatch.setattr(sandbox, "_PYTHON", str(python))


def processes() -> set[str]:
  return {pid for pid in os.listdir("/proc") if pid.isdigit()}


def mark() -> str:
  """A text that no other process has, to find one's own by."""
  return f"mark_{os.getpid()}_{os.urandom(4).hex()}"


def left_of(text: str) -> list[str]:
  """Processes that hold a text in their command line or environment."""
  found = []
  for pid in processes():
    try:
      held = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
      held += pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
      continue
    if text.encode() in held:
      found.append(pid)
  return found


def test_a_program_reads_and_prints(isolates):
  """As nobody, with nothing but Python to see and one small folder of its own."""
  text = (
    "import os\n"
    "print(input(), os.getuid(), sorted(os.listdir('/work')), os.path.exists('/proc/1'))\n"
    "open('x', 'w').write('y'); print(open('/tmp/x').read(), os.path.exists('/home'))\n"
  )
  ran = sandbox.run(text, "hé\n", LIMITS)
  assert ran == sandbox.Ran(0, "hé 65534 [] False\ny False\n")


FORKS = """
import os, time, sys
print("before", flush=True)
try:
  for _ in range(50):
    if not os.fork():
      os.setsid()
      sleep = "import time; time.sleep(1000)"
      os.execv(sys.executable, [sys.executable, "-c", sleep, {m!r}])
except OSError as e:
  print(type(e).__name__, flush=True)
"""
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
    "for path in ('/usr/x', '/etc/x', '/x', '/dev/x', '/root/x'):\n"
    "  try: open(path, 'w'); print('got it')\n"
    "  except OSError: pass",
    "",
  ),
  "output": ("while True: print('x' * 10**6)", None),
  "privileges": (
    "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    "print(libc.unshare(0x10000000), libc.mount(b'n', b'/work', b'tmpfs', 0, None))\n"
    "try: os.setuid(0); print('got it')\n"
    "except OSError: pass",
    "-1 -1\n",
  ),
  "exit": ("import os; os._exit(7)", ""),
  "signal": ("import os; os.kill(os.getppid(), 9); os.kill(-1, 9)", ""),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_stopped(isolates, attack):
  """It gets nothing, and the next program runs as before."""
  text, printed = ATTACKS[attack]
  before = set(os.listdir(tempfile.gettempdir()))
  ran = sandbox.run(text, "", LIMITS)
  if printed is None:
    assert ran.status != 0 and len(ran.stdout) <= 2**20
  else:
    assert ran.stdout == printed
  new = set(os.listdir(tempfile.gettempdir())) - before
  assert not [name for name in new if name.startswith("tlt_jax_sandbox_")]


@pytest.mark.parametrize("how", ["namespaces", "limits"])
def test_processes_end_with_the_program(how, isolates, limited):
  """Those in sessions of their own too; there are no more than the limit allows."""
  name = mark()
  ran = sandbox.run(FORKS.format(m=name), "", LIMITS, how)
  assert ran.stdout == "before\nBlockingIOError\n"
  assert not left_of(name)


@pytest.mark.parametrize("how", ["namespaces", "limits"])
@pytest.mark.parametrize("text", ["import time\ntime.sleep(1000)", "while True: pass"])
def test_time_is_limited(how, text, isolates, limited):
  """Whether it sleeps or works."""
  limits = sandbox.Limits(wall_s=1.0, cpu_s=1.0)
  assert sandbox.run(text, "", limits, how).status != 0


def test_who_runs_the_program_is_not_ended_by_signals_to_all_of_a_job(isolates):
  """The program may be, and may rely on it."""
  text = "import signal, time\ntime.sleep(0.5)\nprint(signal.getsignal(15) == 0)"

  def script():
    for child in psutil.Process().children():
      with contextlib.suppress(psutil.Error):
        if sandbox._SCRIPT in child.cmdline() and child.children():  # it has begun
          return child

  with concurrent.futures.ThreadPoolExecutor() as pool:
    ran = pool.submit(sandbox.run, text, "", LIMITS)
    while not (found := script()) and not ran.done():
      time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT):
      found.send_signal(number)
    assert ran.result() == sandbox.Ran(0, "True\n")


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


def test_a_machine_that_cannot_isolate_is_told(monkeypatch, tmp_path):
  """In one line with the remedy, when the reward is made."""
  source = pathlib.Path(isolation.__file__).read_text()
  refuses = tmp_path / "refuses.py"
  refuses.write_text(
    source.replace('_call("unshare", _NAMESPACES)', 'raise OSError(1, "unshare: refused")')
  )
  monkeypatch.setattr(sandbox, "_SCRIPT", str(refuses))
  with pytest.raises(reward.RewardError, match="unshare: refused.*isolation='limits'") as e:
    reward.parse("tlt_jax.tasks.code.passes()")
  assert "\n" not in str(e.value)


def test_limits_alone_must_be_asked_for(limited):
  score = code.passes(isolation="limits")
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
    (ECHO + "<think>", [["1 1", "2"]], 1, True),
    (ECHO + "</think>no", [["1 1", "2"]], 0, False),
    ("```\n\ud800 = 1\n```", [["", ""]], 0, False),
  ],
)
def test_code_is_judged_by_its_tests(isolates, response, answer, reward_, solved):
  """In part, if that is wanted; code that ends before a test does not pass it."""
  assert scorer()("", response, answer) == (reward_, solved)


_SCORER = []


def scorer():
  if not _SCORER:
    _SCORER.append(code.passes(wall_s=60.0, cpu_s=10.0, partial=True))
  return _SCORER[0]


def test_tests_beyond_the_total_time_are_not_passed(isolates):
  """What was found until then counts."""
  score = code.passes(total_s=1.0, partial=True)
  tests = [["", "1"], ["x", "1"], *[["", "1"]] * 6]
  program = "import sys, time\ntime.sleep(1000 * len(sys.stdin.read()))\nprint(1)"
  found, solved = score("", f"```\n{program}\n```", tests)
  assert found in (0.0, 1 / 8) and not solved


def test_an_attack_costs_only_its_sample(isolates):
  """Of several at a time; without partial rewards one failure is enough."""
  judges = judge.Judge(
    "tlt_jax.tasks.code.passes(wall_s=20.0, cpu_s=1.0, at_once=3)",
    options=judge.Options(processes=0),
  )
  responses = [ECHO, "```\nwhile True: pass\n```", ECHO.replace("sum", "max"), ECHO]
  found = judges("pppp", responses, [[["1 2", "3"], ["5 0", "5"]]] * 4)
  assert found.reward.tolist() == [1, 0, 0, 1] and not any(found.failure)
  assert found.solved.tolist() == [True, False, False, True]


@pytest.mark.parametrize("answer", [[], "x", "{}", [3], [["a"]], [["a", 1]], None])
def test_tests_that_are_none_are_an_error(answer):
  with pytest.raises(ValueError, match="is no list of tests"):
    code.read_tests(answer)


def test_a_run_that_is_killed_leaves_no_program(isolates, tmp_path):
  """The parent's end is that of all; nor does a folder stay."""
  name = mark()
  text = (
    "import sys; sys.path.insert(0, {root!r})\n"
    "from tlt_jax import sandbox\n"
    "sandbox.run({program!r}, '', sandbox.Limits(wall_s=500.0))\n"
  )
  program = (
    "import os, sys\nos.execve(sys.executable, [sys.executable, '-c', "
    f"'import time; time.sleep(500)', {name!r}], {{}})"
  )
  root = str(pathlib.Path(__file__).parents[1])
  text = text.format(root=root, program=program)
  own = os.environ | {"TMPDIR": str(tmp_path)}
  run = subprocess.Popen([sys.executable, "-c", text], env=own)
  for _ in range(3000):
    if left_of(name + "\0"):
      break
    time.sleep(0.05)
  assert left_of(name + "\0")
  run.kill()
  run.wait()
  for _ in range(3000):
    if not left_of(name + "\0"):
      break
    time.sleep(0.05)
  assert not left_of(name + "\0")
  assert not list(tmp_path.iterdir())
