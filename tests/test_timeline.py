"""What slices did in a rollout: spans, and the figure."""

import pytest

from experiments import plot
from experiments import timeline


def chunk(start_s, end_s, strategy="off", live=(4, 4), steps=(10, 10), trained=(0, 0)):
  return {
    "start_s": start_s,
    "end_s": end_s,
    "batch": 4,
    "strategy": strategy,
    "live": list(live),
    "steps": list(steps),
    "trained": list(trained),
  }


# From 0.5 s to 4.5 s, with a pause between the second chunk and the third.
ROLLOUT = {
  "step": 7,
  "micro_batch_s": 0.3,
  "chunks": [
    chunk(0.5, 1.5),
    chunk(1.5, 3.5, live=(4, 1), steps=(10, 4), trained=(0, 3)),
    chunk(3.75, 4.5, "3_1_4", live=(2, 0), steps=(5, 0), trained=(0, 9)),
  ],
}


def parts(spans):
  """(kind, strategy, seconds) of each."""
  return [(s.kind, s.strategy, pytest.approx(s.end_s - s.start_s)) for s in spans]


def test_a_slice_decodes_then_trains_then_idles():
  """The worked row of the docstring; the busiest slice decodes all the time."""
  first, second = timeline.split(ROLLOUT["chunks"][1], 0.3)
  assert parts(first) == [("decode", "", 2.0)]
  assert parts(second) == [
    ("decode", "", 0.8),
    ("train drafter", "", 0.9),
    ("idle", "", 0.3),
  ]


def test_spans_have_no_gap():
  """From 0 to the end of the last chunk; what is outside of chunks is a span too."""
  for spans in timeline.spans(ROLLOUT):
    assert spans[0].start_s == 0 and spans[-1].end_s == 4.5
    for one, following in zip(spans, spans[1:], strict=False):
      assert one.start_s < one.end_s == following.start_s
    outside = [s for s in spans if s.kind == timeline.OUTSIDE]
    assert parts(outside) == [("outside chunks", "", 0.5), ("outside chunks", "", 0.25)]


@pytest.mark.parametrize("slices", [1, 2, 64])
def test_the_figure_has_a_line_per_slice(slices):
  """And a legend of what the slices did."""

  def wide(c):
    return {k: v[-1:] * slices if isinstance(v, list) else v for k, v in c.items()}

  fig = plot.plot_timeline({**ROLLOUT, "chunks": [wide(c) for c in ROLLOUT["chunks"]]})
  assert len(fig.axes[0].lines) == slices
  assert fig.axes[0].get_title() == "What the slices did in the rollout of step 8"
  labels = {text.get_text() for text in fig.legends[0].get_texts()}
  assert {"decoding plainly", "training the drafter"} <= labels
