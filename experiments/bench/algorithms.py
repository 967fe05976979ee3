"""Compares RL algorithms: the same start, the same config, the same number of tokens.

    python -m experiments.bench.algorithms --workdir=runs/algorithms --tokens=1000000

Each algorithm trains, with its own defaults, until its rollouts have drawn so many tokens,
and is then measured against the policy that all began with, on the same held-out prompts
under the same noise. Before that, a few of its steps are done with the config's drafter and
without: both must end in the same policy, and so the long run is done without. What is done
is not done again, a run that was killed goes on. Writes algorithms.csv and algorithms.png.
`--config=FILE`, overrides and `--cpu_devices` are passed on to the runs.
"""

from collections.abc import Mapping, Sequence
import csv
import json
import pathlib
import subprocess
import sys

from absl import flags
import matplotlib as mpl
from matplotlib import figure

from experiments import keys
from experiments import launch
from experiments import plot
from experiments import tables
from tlt_jax import checkpoint
from tlt_jax import metrics

ALGORITHMS = {  # name of a run -> entries of `config.algorithm`
  "grpo": {},
  "grpo_gae": {},
  "dr_grpo": {},
  "dapo": {},
  "rloo": {},
  "reinforce_pp": {},
  "reinforce_pp_baseline": {"name": "reinforce_pp", "baseline": "group"},
  "gspo": {},
  "gspo_token": {"name": "gspo", "credit": "token"},
  "cispo": {},
  "ppo": {},
}
COLUMNS = ("algorithm", "steps", "tokens", "accuracy", "gain", "gain_half_width", "same")

_WORKDIR = flags.DEFINE_string("workdir", "runs/algorithms", "Where everything goes.")
_NAMES = flags.DEFINE_list("names", list(ALGORITHMS), "Which to run.")
_TOKENS = flags.DEFINE_integer(
  "tokens", 1_000_000, "Response tokens that each draws, or a little more.", lower_bound=1
)
_COMPARED = flags.DEFINE_integer(
  "compared_steps", 3, "Steps with and without the drafter; 0: none.", lower_bound=0
)
_PROMPTS = flags.DEFINE_integer("prompts", 500, "Held-out prompts.", lower_bound=2)


def run(command: str, *args: str) -> str:
  """Runs a command with this one's config, and gives what it prints."""
  passed_on = ("--config", "--noconfig", "--cpu_devices")
  given = [arg for arg in sys.argv[1:] if arg.startswith(passed_on)]
  whole = [sys.executable, "-m", f"experiments.{command}", *given, *args]
  return subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(folder: pathlib.Path, settings: Mapping[str, object]) -> None:
  """Takes an RL run to the end of its steps."""
  told = [f"--config.{key}={value}" for key, value in settings.items()]
  run("train", f"--workdir={folder}", *told)


def drawn(folder: pathlib.Path) -> list[int]:
  """Response tokens that a run drew in each of its steps."""
  return [sum(r["length"]) for r in metrics.read(folder / "rollouts.jsonl")]


def train_until(
  folder: pathlib.Path, settings: Mapping[str, object], tokens: int, most: int
) -> None:
  """Takes an RL run to about the first step after which it has drawn so many tokens.

  Args:
    folder: of the run
    settings: of its config
    tokens: that it draws
    most: that a step can draw
  """
  steps = checkpoint.latest(folder / "checkpoints") or max(tokens // most, 1)
  if (folder / "policy").exists() and sum(drawn(folder)) >= tokens:
    return
  while True:
    train(folder, {**settings, "drafter": "", "steps": steps})
    by_step = drawn(folder)
    if sum(by_step) >= tokens:
      return
    left, mean = tokens - sum(by_step), sum(by_step) / len(by_step)
    steps += max(int(left / mean), 1)  # rounded down: the last one is seldom too many


def is_same_without_drafter(folder: pathlib.Path, settings: Mapping, steps: int) -> bool:
  """Whether a run ends alike with the config's drafter and without one."""
  ends = []
  for name, drafter in (("with_drafter", {}), ("without", {"drafter": ""})):
    part = folder / name
    if not (part / "figures").exists():
      train(part, {**settings, **drafter, "steps": steps})
    lengths = [(r["length"], r["outcome"]) for r in metrics.read(part / "rollouts.jsonl")]
    ends.append((lengths, (part / "policy" / "model.safetensors").read_bytes()))
  return ends[0] == ends[1]


def measured(
  folders: Sequence[pathlib.Path], baseline: str
) -> list[dict[str, float]]:
  """Accuracy of each run's policy, and its gain over the policy that they began as.

  All that is not known yet is asked in one process, which asks the baseline once.
  """
  asked = [{"tokens": sum(drawn(f)), "prompts": _PROMPTS.value} for f in folders]
  paths = [folder / "evaluation.json" for folder in folders]
  known = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
  new = [i for i, a in enumerate(asked) if known[i].get("asked") != a]
  if new:
    models = {i: str(folders[i] / "policy") for i in new}
    told = [f"--model={','.join(models.values())}", f"--baseline={baseline}"]
    told.append(f"--prompts={_PROMPTS.value}")
    found = json.loads(run("evaluate", *told).splitlines()[-1])["models"]
    for i, model in models.items():
      known[i] = {"asked": asked[i], "found": found[model]}
      paths[i].write_text(json.dumps(known[i]) + "\n")
  return [x["found"] for x in known]


def write(workdir: pathlib.Path, rows: Sequence[Mapping[str, object]]) -> None:
  """Writes algorithms.csv and algorithms.png."""
  with (workdir / "algorithms.csv").open("w", newline="") as f:
    writer = csv.DictWriter(f, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
  with mpl.rc_context(plot.STYLE):
    fig = figure.Figure(figsize=(7, 1 + 0.35 * len(rows)), layout="constrained")
    ax = fig.subplots()
    names = [row["algorithm"] for row in rows]
    gains = [100 * row["gain"] for row in rows]
    ax.errorbar(gains, names, xerr=[100 * row["gain_half_width"] for row in rows], fmt="o")
    ax.axvline(0, linewidth=0.8, color="grey")
    ax.invert_yaxis()
    ax.set(title="Gain in accuracy on held-out prompts", xlabel="points (95% intervals)")
    fig.savefig(workdir / "algorithms.png")


def show(rows: Sequence[Mapping[str, object]]) -> None:
  """Prints the table."""
  tables.show(
    "gains in points, with 95% intervals over prompts",
    ("algorithm", "steps", "tokens", "accuracy", "gain", "same without drafter"),
    [
      (
        row["algorithm"],
        str(row["steps"]),
        f"{row['tokens']:,}",
        f"{100 * row['accuracy']:.1f}%",
        f"{100 * row['gain']:+.1f} +- {100 * row['gain_half_width']:.1f}",
        str(row["same"]),
      )
      for row in rows
    ],
  )


def main(config):
  if unknown := sorted(set(_NAMES.value) - set(ALGORITHMS)):
    raise ValueError(f"--names takes of {', '.join(ALGORITHMS)}, not {unknown[0]}")
  workdir, same = pathlib.Path(_WORKDIR.value), {}
  batch, sampling = config["batch"], config["sampling"]
  prompts = max(batch["prompts"], batch["most_prompts"])
  most = prompts * batch["responses"] * sampling["max_tokens"]
  for name in _NAMES.value:
    algorithm = {"name": name, **ALGORITHMS[name]}
    settings = {f"algorithm.{key}": value for key, value in algorithm.items()}
    settings["evaluation.every"] = 0
    if _COMPARED.value:
      same[name] = is_same_without_drafter(workdir / name, settings, _COMPARED.value)
    train_until(workdir / name / "run", settings, _TOKENS.value, most)
  runs = [workdir / name / "run" for name in _NAMES.value]
  rows = [
    {
      "algorithm": name,
      "steps": len(drawn(folder)),
      "tokens": sum(drawn(folder)),
      **{key: found[key] for key in ("accuracy", "gain", "gain_half_width")},
      "same": same.get(name),
    }
    for name, folder, found in zip(
      _NAMES.value, runs, measured(runs, config["policy"]), strict=True
    )
  ]
  write(workdir, rows)
  show(rows)
  print(json.dumps(rows))


if __name__ == "__main__":
  launch.run(main, config=("algorithms", keys.RUN))
