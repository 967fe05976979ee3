"""Measures what it is worth to train the drafter inside rollouts: online or frozen.

    python -m experiments.bench.sweep_drafter --workdir=runs/sweep --seeds=0 --steps=32

One RL run for each seed, learning rate of the policy, and variant: the offline drafter
frozen, the same trained on, a random one trained from scratch. The policy of all
variants is the same, as no token depends on the drafter. Afterwards every drafter,
frozen, drafts for the policy at the end of its run, on held-out prompts. Runs that are
done are not done again, those that were killed go on. Writes sweep.csv and sweep.png;
the first column is the variant. `--config=FILE` and overrides are passed on to the runs.
"""

from collections.abc import Sequence
import csv
import itertools
import json
import pathlib
import subprocess
import sys

from absl import flags
import matplotlib as mpl
from matplotlib import figure

from experiments import acceptance
from experiments import from_config
from experiments import keys
from experiments import launch
from experiments import plot
from experiments import workdirs
from tlt_jax import metrics

_WORKDIR = flags.DEFINE_string("workdir", "runs/sweep", "Where everything goes.")
_DRAFTER = flags.DEFINE_string(
  "drafter", "", "Folder of the offline drafter; default: the config's."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_STEPS = flags.DEFINE_integer("steps", 32, "RL steps of a run.", lower_bound=1)
_RATES = flags.DEFINE_list("rates", [], "Learning rates of the policy; default: one.")
_STRATEGY = flags.DEFINE_string("strategy", "5_1_6", "Strategy that is measured.")
_PROMPTS = flags.DEFINE_integer(
  "prompts", 24, "Held-out prompts, two responses each.", lower_bound=2
)

# Hardly a slice of the default run is ever idle: all train a while after each rollout.
AFTERWARDS = {"rows": 512, "carried_rows": 256, "warm_up_rollouts": 1000}
NEW = {"optimizer.learning_rate": 2e-3, "optimizer.floor": 0.1, "optimizer.total": 8000}
# Drafter to start from ("": the offline one), and settings of `spot`.
VARIANTS = {
  "offline_frozen": ("", {"every": 0}),
  "offline_online": ("", {**AFTERWARDS, "warm_up_s": 3}),
  "random_online": ("eagle2", {**AFTERWARDS, **NEW, "warm_up_s": 12}),
}
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "Which to run.")


def train(workdir: pathlib.Path, config: dict) -> None:
  """Takes an RL run to its end, unless it is there.

  Args:
    workdir: of the run
    config: dotted keys of the config, and what is set
  """
  if (workdir / "figures").exists():
    return
  given = [arg for arg in sys.argv[1:] if arg.startswith(("--config", "--noconfig"))]
  settings = [f"--config.{key}={value}" for key, value in config.items()]
  command = [sys.executable, "-m", "experiments.train", f"--workdir={workdir}"]
  subprocess.run([*command, *given, *settings], check=True)


def measure(
  config: dict, workdir: pathlib.Path, drafter: str, records: Sequence[dict]
) -> float:
  """Measures tokens per pass of a run's drafter, or the one given, for its last policy.

  Args:
    config: of the run
    workdir: of the run
    drafter: folder of the one given
    records: the prompts that are asked
  """
  own = workdir / "drafter"
  config = config | {
    "policy": str(workdir / "policy"),
    "drafter": str(own) if own.exists() else drafter,
  }
  found = acceptance.measure(
    config,
    from_config.load_models(config),
    strategies=[_STRATEGY.value],
    verifications=("coupled",),
    records=records,
    samples=2,
    seed=2**30,
  )
  return found[0]["mean_acceptance_length"]


def draw(path: pathlib.Path, runs: dict[str, pathlib.Path]) -> None:
  """Draws acceptance in training, by step, one line per run."""
  with mpl.rc_context(plot.STYLE):
    fig = figure.Figure(figsize=(7, 3.8), layout="constrained")
    ax = fig.subplots()
    for name, workdir in runs.items():
      records = metrics.read(workdir / "metrics.jsonl")
      points = [
        (r["step"], r["rollout/acceptance_rate_pos_1"])
        for r in records
        if "rollout/acceptance_rate_pos_1" in r
      ]
      if points:
        ax.plot(*zip(*points, strict=True), label=name, linewidth=1.4)
    ax.set(
      title="First drafted token accepted",
      xlabel="RL step",
      ylabel="share of speculative passes",
    )
    ax.legend()
    fig.savefig(path)


def main(config):
  if unknown := set(_VARIANTS.value) - set(VARIANTS):
    raise ValueError(f"--variants takes of {', '.join(VARIANTS)}, not {sorted(unknown)[0]}")
  workdir = pathlib.Path(_WORKDIR.value)
  launch.start()
  workdirs.record(workdir, config)
  offline = _DRAFTER.value or config["drafter"]
  if not offline:
    raise ValueError("there is no offline drafter to start from: give --drafter")
  source = config["held_out"] | {"size": _PROMPTS.value}
  asked = from_config.prompts(config, source, whole=True)
  rates = _RATES.value or [str(config["optimizer"]["learning_rate"])]
  rows, runs = [], {}
  for rate, seed, name in itertools.product(rates, _SEEDS.value, _VARIANTS.value):
    drafter, spot = VARIANTS[name]
    folder = workdir / f"{name}_{rate}_{seed}"
    settings = {
      "seed": seed,
      "prompts.seed": seed,
      "steps": _STEPS.value,
      "drafter": drafter or offline,
      "evaluation.every": 0,
      "optimizer.learning_rate": rate,
      **{f"spot.{key}": value for key, value in spot.items()},
    }
    if "seed" not in config["prompts"]:  # a file has its order from `seed`
      del settings["prompts.seed"]
    train(folder, settings)
    length = measure(config, folder, drafter or offline, asked)
    rows.append((name, rate, seed, round(length, 3)))
    runs[f"{name} ({rate}, seed {seed})"] = folder
    print(f"{name}, learning rate {rate}, seed {seed}: {length:.2f} tokens per pass")
  with (workdir / "sweep.csv").open("w") as f:
    writer = csv.writer(f)
    writer.writerow(("variant", "learning_rate", "seed", "mean_acceptance_length"))
    writer.writerows(rows)
  draw(workdir / "sweep.png", runs)
  print(json.dumps({"strategy": _STRATEGY.value, "steps": _STEPS.value, "rows": rows}))


if __name__ == "__main__":
  launch.run(main, config=("countdown", keys.RUN))
