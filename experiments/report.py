"""Writes one HTML file that tells a run; it needs nothing else, and fetches nothing.

    python -m experiments.report --workdir=DIR [--output=FILE.html]

Configuration, curves, the timeline of the last rollout, acceptance by position of the
draft, and some responses of the last step and evaluation. DIR/report.html by default.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
import html
import io
import json
import pathlib
from typing import Any

from absl import flags
import matplotlib as mpl
from matplotlib import figure
from matplotlib import ticker

from experiments import launch
from experiments import plot
from experiments import style
from experiments import summary
from tlt_jax import json_objects
from tlt_jax import metrics
from tlt_jax import writing

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File; default: report.html of the run.")

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; border-bottom: 1px solid #ddd; }
"""
# Nothing of a response can run or be fetched, whatever it is.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_ALT = {
  "reward.png": "Reward and accuracy over the steps",
  "gain.png": "Rollouts that were repeated plainly",
  "lengths.png": "Response lengths by outcome",
  "live_requests.png": "Live requests over the time of a rollout",
  "timeline.png": "What every slice did in the last rollout",
}


def write(workdir: pathlib.Path, output: pathlib.Path) -> None:
  """Writes the report of a run.

  Raises:
    ValueError: the folder holds no run, or a damaged file; names it
  """
  records = metrics.read(workdir / "metrics.jsonl")
  text = "\n".join(page(workdir, records))
  with writing.to(output):
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8", errors="backslashreplace")


def page(workdir: pathlib.Path, records: Sequence[Mapping]) -> Iterator[str]:
  """Yields the parts of the page."""
  name = html.escape(workdir.resolve().name)
  yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
  yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
  yield f"<style>{_CSS}</style></head><body><h1>{name}</h1>"
  shown = list(responses(workdir))  # first, as a damaged file ends it all
  drawn = list(figures(workdir))
  yield f"<pre>{html.escape(summary.text(records))}</pre>"
  yield "<h2>Curves, and the last rollout</h2>"
  yield from drawn
  if any("rollout/acceptance_rate_pos_1" in r for r in records):
    yield "<h2>Acceptance</h2>"
    yield image(
      "acceptance", "Share of drafts that stand, by position", acceptance(records)
    )
  yield from shown
  yield "<h2>Configuration</h2>"
  config = workdir / "config.json"
  raw = json_objects.parse(config.read_bytes()) if config.exists() else {}
  yield f"<details><pre>{html.escape(json.dumps(raw, indent=2))}</pre></details>"
  yield "<h2>All metrics of the last step</h2>"
  yield table(next((r for r in reversed(records) if "step/seconds_s" in r), records[-1]))
  yield "</body></html>"


def figures(workdir: pathlib.Path) -> Iterator[str]:
  """Yields the figures of the run."""
  for drawing in plot.drawings(workdir):
    if drawing.name in _ALT:
      with drawing.told(), mpl.rc_context(style.STYLE):
        made = drawing.draw(drawing.data)
      yield image(drawing.name.removesuffix(".png"), _ALT[drawing.name], made)


def image(name: str, alt: str, drawn: figure.Figure) -> str:
  """A figure, inside of the page."""
  content = io.BytesIO()
  with mpl.rc_context(style.STYLE):
    drawn.savefig(content, format="png")
  encoded = base64.b64encode(content.getvalue()).decode()
  return f'<img id="{name}" alt="{alt}" src="data:image/png;base64,{encoded}">'


def acceptance(records: Sequence[Mapping]) -> figure.Figure:
  """Draws, by step, the share of speculative passes whose k-th draft stood."""
  with mpl.rc_context(style.STYLE):
    fig = figure.Figure(figsize=(6, 3.4), layout="constrained")
    ax, k = fig.subplots(), 1
    while at := [r for r in records if f"rollout/acceptance_rate_pos_{k}" in r]:
      rates = [r[f"rollout/acceptance_rate_pos_{k}"] for r in at]
      ax.plot([r["step"] for r in at], rates, marker="o", markersize=3, label=f"draft {k}")
      k += 1
    ax.set(title="Drafts that stand", xlabel="RL step", ylabel="share of passes")
    ax.set_ylim(0, 1)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  return fig


def responses(workdir: pathlib.Path) -> Iterator[str]:
  """Yields some responses of the last step and of the last evaluation."""
  for title, pattern in (
    ("Last step", "train_*.jsonl"),
    ("Last evaluation", "eval_*.jsonl"),
  ):
    files = sorted((workdir / "samples").glob(pattern))
    if files:
      yield f"<h2>{title}: some responses</h2>"
      yield from samples(files[-1])


def samples(file: pathlib.Path) -> Iterator[str]:
  """Yields the responses in a file of WORKDIR/samples.

  Raises:
    ValueError: it is damaged; names it
  """
  for number, line in enumerate(file.read_bytes().splitlines(), 1):
    try:
      sample = json_objects.parse(line)
    except ValueError as e:
      raise ValueError(f"{file}, line {number} {e}; delete the file") from e
    about = ", ".join(
      f"{key} {sample[key]}"
      for key in ("reward", "solved", "length", "finish_reason")
      if key in sample
    )
    parts = [str(sample.get(key, "")) for key in ("prompt", "response")]
    shown = "".join(f"<pre>{html.escape(part)}</pre>" for part in parts)
    yield f'<section class="sample"><p>{html.escape(about)}</p>{shown}</section>'


def table(record: Mapping[str, Any]) -> str:
  """The metrics of a step."""
  rows = (
    f"<tr><td>{html.escape(key)}</td><td>{html.escape(f'{value:.6g}')}</td></tr>"
    for key, value in sorted(record.items())
  )
  return f"<table>{''.join(rows)}</table>"


def main():
  workdir = pathlib.Path(_WORKDIR.value)
  output = pathlib.Path(_OUTPUT.value or workdir / "report.html")
  write(workdir, output)
  print(output)


if __name__ == "__main__":
  launch.run(main)
