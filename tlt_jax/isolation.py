"""Runs one program that nobody trusts, on Linux, without root; see `sandbox` for its use.

    python -I -S isolation.py < JOB > REPORT

It runs as a script in a session of its own, imports the standard library only, and is
single-threaded, as namespaces demand. SIGTERM and SIGINT do not end it: a run that is told
to stop wants the result first. The processes, each the parent of the next:

    this script   user, mount, PID, network and IPC namespaces of its own; keeps the time
    process 1     of the PID namespace: when it ends, the kernel kills whatever is left
    the program   nobody's user, no privileges, resource limits

The program's file system is new: system folders and Python, read-only, and a small empty
/work in memory. It is gone with the namespace. The network has no interface that is up.

With `"isolation": "limits"` there are resource limits only, and all descendants are
killed in the end: files and network are open to the program.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time

# Of users, mounts, process numbers, network, shared memory and host names.
_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 0x1, 0x2, 0x4
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # numbers of system calls
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_NOBODY = 65534
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_WORK = "/work"  # the program's folder
_PYTHON = os.path.realpath(sys.executable)  # not a link of a virtual environment

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
  """Of `mount_setattr`."""

  _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def main() -> None:
  """Runs the job on stdin; what became of it goes to stdout."""
  _handle(signal.SIG_IGN)
  job = json.load(sys.stdin)
  _die_with_parent()
  try:
    if job["isolation"] == "namespaces":
      _enter_namespaces()
      _make_root(job)
    else:
      _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
      if os.getuid() == 0:  # the program will be nobody
        _check_readable(sys.base_prefix)
        os.chmod(job["root"], 0o777)
  except OSError as e:
    json.dump({"error": str(e)}, sys.stdout)
    return
  output = os.memfd_create("stdout")  # a file: it cannot grow beyond the limit of files
  child = os.fork()
  if not child:
    _be_process_one(job, output)
  status = _wait(child, job["wall_s"])
  text = os.pread(output, job["file_bytes"], 0).decode(errors="replace")
  json.dump({"status": status, "stdout": text}, sys.stdout)


def _call(name: str, *args) -> int:
  """A function of libc, whose -1 is an OSError."""
  result = getattr(_libc, name)(*args)
  if result == -1:
    code = ctypes.get_errno()
    raise OSError(code, f"{name}: {os.strerror(code)}")
  return result


def _handle(how: signal.Handlers) -> None:
  """Sets what becomes of SIGTERM and SIGINT, here and in children."""
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, how)


def _die_with_parent() -> None:
  _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _enter_namespaces() -> None:
  """Leaves all that is shared, as root of a new user namespace, or as nobody in it."""
  uid, gid, me = os.getuid(), os.getgid(), os.getpid()
  entered = os.pipe()
  helper = os.fork()  # maps users from outside, which the user root is allowed to
  if not helper:
    os.close(entered[1])
    os.read(entered[0], 1)
    try:
      if uid == 0:
        both = f"0 0 1\n{_NOBODY} {_NOBODY} 1\n"
        maps = (("uid_map", both), ("gid_map", both))
      else:
        own = (("uid_map", f"{_NOBODY} {uid} 1\n"), ("gid_map", f"{_NOBODY} {gid} 1\n"))
        maps = (("setgroups", "deny"), *own)
      for name, text in maps:
        with open(f"/proc/{me}/{name}", "w") as file:
          file.write(text)
      os._exit(0)
    except OSError:
      os._exit(1)
  os.close(entered[0])
  _call("unshare", _NAMESPACES)
  os.write(entered[1], b".")
  os.close(entered[1])
  if os.waitpid(helper, 0)[1]:
    raise OSError("the users of a new namespace cannot be mapped")
  try:  # no namespaces within
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
      file.write("0")
  except OSError:
    pass


def _check_readable(folder: str) -> None:
  """Raises OSError unless nobody can use a folder."""
  while os.stat(folder).st_mode & 0o001:
    if folder == os.path.dirname(folder):
      return
    folder = os.path.dirname(folder)
  raise OSError(
    f"started by root, code runs as nobody, who cannot read Python in {sys.base_prefix}; "
    "start the run as another user"
  )


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
  texts = [text.encode() for text in (source, target, kind)]
  try:
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode())
  except OSError as e:
    raise OSError(e.errno, f"{e.strerror} ({source} on {target})") from e


def _make_root(job: dict) -> None:
  """Makes the file system that the program sees, and goes there."""
  root = job["root"]
  _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
  _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  prefix = [] if sys.base_prefix.startswith("/usr/") else [sys.base_prefix]
  for path in (*_SYSTEM, *prefix, *_DEVICES):
    if not os.path.exists(path):
      continue
    target = root + path
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.islink(path):
      os.symlink(os.readlink(path), target)
      continue
    if os.path.isdir(path):
      os.makedirs(target, 0o755, exist_ok=True)
    else:
      open(target, "x").close()
    _mount(path, target, "", _MS_BIND | _MS_REC)
  for name in ("old", _WORK[1:]):
    os.mkdir(f"{root}/{name}", 0o755)
  os.symlink(_WORK, f"{root}/tmp")
  attributes = _Attributes(_MS_RDONLY | _MS_NOSUID, 0, 0, 0)
  size = ctypes.c_size_t(ctypes.sizeof(attributes))
  where = (_AT_FDCWD, root.encode(), _AT_RECURSIVE)
  _call("syscall", _MOUNT_SETATTR, *where, ctypes.byref(attributes), size)
  limits = f"size={job['file_bytes']},nr_inodes={job['files']},mode=1777"
  _mount("tmpfs", root + _WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
  number = _PIVOT_ROOT.get(os.uname().machine)
  if number is None:
    raise OSError(f"pivot_root on {os.uname().machine} is not known")
  outside = os.path.realpath(root)
  _call("syscall", number, root.encode(), f"{root}/old".encode())
  os.chdir("/")
  try:  # here and now, so that nobody who is killed leaves the folder behind
    os.rmdir("/old" + outside)
  except OSError:
    pass
  _call("umount2", b"/old", _MNT_DETACH)


def _be_process_one(job: dict, output: int) -> None:
  """Starts the program and ends when it does, with its exit status."""
  try:
    _die_with_parent()
    program = os.fork()
    if not program:
      _become(job, output)
    while True:
      child, status = os.wait()
      if child == program:
        os._exit(os.waitstatus_to_exitcode(status) % 256)
  finally:
    os._exit(255)


def _become(job: dict, output: int) -> None:
  """Turns this process into the program."""
  try:
    _handle(signal.SIG_DFL)
    stdin = os.memfd_create("stdin")
    _write_all(stdin, job["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    code = os.memfd_create("program", 0)
    _write_all(code, job["program"].encode(errors="replace"))
    os.lseek(code, 0, os.SEEK_SET)
    nothing = os.open("/dev/null", os.O_WRONLY)
    # None of these is 3 or less but, at most, `output`, which comes first.
    for fd, number in ((output, 1), (stdin, 0), (nothing, 2), (code, 3)):
      os.dup2(fd, number)
    os.closerange(4, 256)
    is_isolated = job["isolation"] == "namespaces"
    os.chdir(_WORK if is_isolated else job["root"])
    _limit(job, is_isolated)
    if os.getuid() == 0:
      os.setgroups([])
      os.setresgid(_NOBODY, _NOBODY, _NOBODY)
      os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _die_with_parent()  # again: who becomes another user loses it
    run = "import os; exec(compile(os.fdopen(3).read(), 'program.py', 'exec'))"
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"}
    os.execve(_PYTHON, [_PYTHON, "-I", "-S", "-B", "-c", run], environment)
  finally:
    os._exit(254)


def _write_all(fd: int, data: bytes) -> None:
  while data:
    data = data[os.write(fd, data) :]


def _limit(job: dict, is_isolated: bool) -> None:
  """Sets the resource limits, of each process but for their number."""
  processes = job["processes"]
  # The kernel counts all of a user's together: in the namespace, unless root started it,
  # this process and process 1; outside whatever runs.
  if not is_isolated:
    processes += _running(os.getuid() or _NOBODY)
  elif os.getuid():
    processes += 2
  cpu = max(1, int(job["cpu_s"] + 0.999))
  for kind, most in (
    (resource.RLIMIT_CPU, cpu),
    (resource.RLIMIT_AS, job["memory_bytes"]),
    (resource.RLIMIT_NPROC, processes),
    (resource.RLIMIT_FSIZE, job["file_bytes"]),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
  ):
    resource.setrlimit(kind, (most, most))


def _running(uid: int) -> int:
  """Threads of a user."""
  count = 0
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      if os.stat(f"/proc/{pid}").st_uid == uid:
        count += len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
      continue
  return count


def _wait(child: int, wall_s: float) -> int | None:
  """Waits for process 1, kills it when its time is over, and what it left behind.

  Returns:
    its exit status; None if it was killed
  """
  late, ended = time.monotonic() + wall_s, None
  while time.monotonic() < late:
    found, status = os.waitpid(child, os.WNOHANG)
    if found:
      ended = os.waitstatus_to_exitcode(status)
      break
    time.sleep(0.005)
  else:
    os.kill(child, signal.SIGKILL)
  while True:  # of what process 1 left: without namespaces it comes to its grandparent
    for pid in _children():
      os.kill(pid, signal.SIGKILL)
    try:
      os.wait()
    except ChildProcessError:
      return ended


def _children() -> list[int]:
  try:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
      return [int(pid) for pid in file.read().split()]
  except OSError:  # within the namespace there is no /proc, and nothing is left
    return []


if __name__ == "__main__":
  main()
