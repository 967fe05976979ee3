"""Evaluation: pass@k and mean@k with intervals, and responses as readable files.

A problem is one observation, however many samples it has; intervals are 95%, Student's t
over problems. Records with a field `set` belong to the held-out set of that name
(`data.named_sets`), which is reported separately.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

import numpy as np

from tlt_jax import metrics as metrics_lib
from tlt_jax import processes
from tlt_jax import writing
from tlt_jax.rl import sample
from tlt_jax.spec_decode.decoding import samples as samples_lib


def pass_at_k(solved: np.ndarray, k: int) -> np.ndarray:
  """The unbiased estimate of pass@k of each problem from bool[P n]: f64[P].

  1 - C(n - c, k) / C(n, k) if c of n samples solve it (equation 1 of Chen et al. 2021,
  https://arxiv.org/abs/2107.03374).
  """
  n = solved.shape[1]
  if not 1 <= k <= n:
    raise ValueError(f"pass@{k} takes at least {max(k, 1)} samples of a problem, not {n}")
  wrong = n - solved.sum(1)
  i = np.arange(n - k + 1, n + 1)
  # C(n - c, k) / C(n, k) is the product of (i - c) / i over these i; where fewer than k
  # samples are wrong, one factor is 0.
  return 1.0 - np.prod(np.maximum(wrong[:, None] - n + i, 0) / i, axis=1)


def ks(n: int) -> list[int]:
  """The k of the reported pass@k: powers of two, and n."""
  return sorted({2**e for e in range(n.bit_length()) if 2**e <= n} | {n})


def metrics(scored: sample.Scored, n: int, prefix: str = "eval/") -> dict[str, float]:
  """Metrics of n samples per problem, for all problems and for every named set.

  `accuracy` is mean@n, which is pass@1; intervals need two problems.
  """
  result = _of_problems(scored, n, np.arange(len(scored.solved) // n), prefix)
  result[f"{prefix}seconds_s"] = scored.rollout_s + scored.reward_s
  sets = np.array([record.get("set", "") for record in scored.records[::n]])
  for name in sorted(set(sets) - {""}):
    of_set = np.flatnonzero(sets == name)
    result |= _of_problems(scored, n, of_set, f"{prefix}{name}/")
  return result


def _of_problems(
  scored: sample.Scored, n: int, chosen: np.ndarray, prefix: str
) -> dict[str, float]:
  def by_problem(values):
    return values.reshape(-1, n)[chosen]

  solved = by_problem(scored.solved)
  found = {
    "accuracy": float(solved.mean()),
    "reward_mean": float(by_problem(scored.reward).mean()),
    "length_mean": float(by_problem(scored.samples.length).mean()),
  }
  figures = {f"pass_at_{k}": pass_at_k(solved, k) for k in ks(n) if k > 1}
  found |= {name: float(values.mean()) for name, values in figures.items()}
  if len(chosen) > 1:
    for name, values in ({"accuracy": solved.mean(1)} | figures).items():
      found[f"{name}_half_width"] = metrics_lib.interval(values)[1]
  return {prefix + name: value for name, value in found.items()}


def problems(scored: sample.Scored, n: int) -> list[dict[str, Any]]:
  """{"prompt", "solved", "reward"} of each problem, with n entries in the lists."""
  return [
    {
      "prompt": scored.records[i]["prompt"],
      **({"set": scored.records[i]["set"]} if "set" in scored.records[i] else {}),
      "solved": scored.solved[i : i + n].tolist(),
      "reward": scored.reward[i : i + n].tolist(),
    }
    for i in range(0, len(scored.records), n)
  ]


def examples(scored: sample.Scored, count: int) -> list[dict[str, Any]]:
  stopped = scored.samples.finish_reason == samples_lib.STOP
  chosen = np.linspace(0, len(scored.text), min(count, len(scored.text)), endpoint=False)
  return [
    {
      "prompt": scored.records[i]["prompt"],
      "response": scored.text[i],
      "answer": scored.records[i]["answer"],
      "reward": float(scored.reward[i]),
      **{name: float(part[i]) for name, part in scored.parts.items()},
      "solved": bool(scored.solved[i]),
      "length": int(scored.samples.length[i]),
      "finish_reason": "stop" if stopped[i] else "length",
    }
    for i in chosen.astype(int)
  ]


def write(path: str | pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> None:
  """Writes or replaces a .jsonl file, on the first process; OSError names the remedy."""
  if not processes.is_first():
    return
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
  with writing.to(path):
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
