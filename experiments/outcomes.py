"""What a run ended with, for comparing runs: all but what the clock and memory say."""

import pathlib
import re

from tlt_jax import metrics

_MEASURED = re.compile(r".*_s|memory/.*")


def of(workdir: pathlib.Path) -> dict[str, object]:
  """What a run must end with, whatever happened to it on the way."""
  drafter = workdir / "drafter" / "model.safetensors"
  records = metrics.read(workdir / "metrics.jsonl")
  rollouts = metrics.read(workdir / "rollouts.jsonl")
  return {
    "policy": (workdir / "policy" / "model.safetensors").read_bytes(),
    "drafter": drafter.read_bytes() if drafter.is_file() else None,
    "metrics": [
      {key: x for key, x in record.items() if not _MEASURED.fullmatch(key)}
      for record in records
    ],
    "responses": [(r["step"], r["length"], r["outcome"]) for r in rollouts],
    "trained": [[chunk["trained"] for chunk in r["chunks"]] for r in rollouts],
  }


def updates(workdir: pathlib.Path) -> int:
  """How often the drafter was updated in a run."""
  records = metrics.read(workdir / "metrics.jsonl")
  return sum(int(r.get("drafter/updates", 0)) for r in records)
