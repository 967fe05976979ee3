"""The results of a run, without memory, times and their ratios, to compare bit for bit."""

import pathlib
import re

from tlt_jax import metrics

_MEASURED = re.compile(r".*_s|memory/.*|rollout/(predicted|realised)_gain")


def of(workdir: pathlib.Path) -> dict[str, object]:
  """The results that must not depend on interruptions."""
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
  """Updates of the drafter in a run."""
  records = metrics.read(workdir / "metrics.jsonl")
  return sum(int(r.get("drafter/updates", 0)) for r in records)
