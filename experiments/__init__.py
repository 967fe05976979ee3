"""Commands, configs and figures; docs/commands.md has a list of them."""

import os
import signal
import sys


def _stop(*_):
  os.write(2, b"\nstopped\n")
  os._exit(143)


# A command begins by importing its libraries, for seconds; then `launch` answers signals.
if sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) == "tlt":
  signal.signal(signal.SIGINT, _stop)
