"""Puts the package together; what it is stands in pyproject.toml.

Two things need a program. Dependencies are those of requirements.txt, whose headings in
brackets are extras. And `experiments/` goes into the wheel as
`tlt_jax/bundled/experiments`, where `tlt` finds it (`tlt_jax/command_line.py`), and
Python itself, last of all places, by a .pth file.
"""

import pathlib
import re

import setuptools
from setuptools.command import build_py

_BUNDLED = "tlt_jax.bundled.experiments"
# The paper's figures and the records of benchmarks stay in the checkout, as do the
# folders benchmarks/ and dev/.
_LEFT_OUT = ("figures*", "results*", "log*", "*__pycache__*")
_DATA = ["*.json", "*.safetensors", "*.md"]
_EXTRAS = {
  "cuda": ["jax[cuda12]"],  # NVIDIA drivers from 525 on
  "cuda13": ["jax[cuda13]"],  # from 580 on
  "tpu": ["jax[tpu]"],
  "docs": ["mkdocs-material>=9.5"],
  "wandb": ["wandb>=0.18"],
}


def requirements() -> dict[str, list[str]]:
  """The lines of requirements.txt by extra; "" has those of the package itself."""
  found, extra = {"": []}, ""
  for line in pathlib.Path(__file__).with_name("requirements.txt").read_text().splitlines():
    heading = re.match(r"# \[(\w+)\]", line)
    if heading:
      extra = heading[1]
    elif line and not line.startswith("#"):
      found.setdefault(extra, []).append(line)
  return found


def packages() -> list[str]:
  """Every folder with code or with what the commands read."""
  inside = setuptools.find_namespace_packages("experiments", exclude=_LEFT_OUT)
  library = setuptools.find_namespace_packages(
    include=["tlt_jax", "tlt_jax.*"], exclude=["*__pycache__*"]
  )
  return [*library, _BUNDLED, *(f"{_BUNDLED}.{name}" for name in inside)]


class BuildWithPath(build_py.build_py):
  """Makes `python -m experiments.train`, and configs that import, work in any folder."""

  def run(self):
    super().run()
    pathlib.Path(self.build_lib, "tlt_jax.pth").write_text("tlt_jax/bundled\n")


if __name__ == "__main__":
  own = requirements()
  setuptools.setup(
    cmdclass={"build_py": BuildWithPath},
    packages=packages(),
    package_dir={_BUNDLED: "experiments"},
    package_data={"": _DATA},
    include_package_data=False,
    install_requires=own.pop(""),
    extras_require=own | _EXTRAS,
  )
