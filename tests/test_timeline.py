"""What slices did in a rollout: spans, the trace made of them, the figure."""

import json

import pytest

from experiments import plot
from experiments import timeline


def chunk(start_s, end_s, strategy="off", live=(4, 4), steps=(10, 10), trained=(0, 0)):
  return {
    "start_s": start_s,
    "end_s": end_s,
    "batch": 4,
    "length": 64,
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


def test_training_ends_with_the_chunk_and_takes_no_time_if_it_is_unknown():
  """Nine micro-batches of 0.3 s do not fit in 0.75 s."""
  last = ROLLOUT["chunks"][2]
  first, second = timeline.split(last, 0.3)
  assert parts(first) == [("speculate", "3_1_4", 0.75)]
  assert parts(second) == [("train drafter", "", 0.75)]
  assert parts(timeline.split(last, 0.0)[1]) == [("idle", "", 0.75)]
  stopped = chunk(0.0, 1.0, steps=(0, 0))
  assert [parts(s) for s in timeline.split(stopped, 0.3)] == [[("idle", "", 1.0)]] * 2


def test_spans_have_no_gap():
  """From 0 to the end of the last chunk; what is outside of chunks is a span too."""
  for spans in timeline.spans(ROLLOUT):
    assert spans[0].start_s == 0 and spans[-1].end_s == 4.5
    for one, following in zip(spans, spans[1:], strict=False):
      assert one.start_s < one.end_s == following.start_s
    outside = [s for s in spans if s.kind == timeline.OUTSIDE]
    assert parts(outside) == [("outside chunks", "", 0.5), ("outside chunks", "", 0.25)]


def test_the_trace_is_valid():
  """Fields of every event; a slice's spans meet, and sum to the wall time."""
  trace = json.loads(json.dumps(timeline.trace(ROLLOUT)))
  events = trace["traceEvents"]
  for event in events:
    assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event)
    assert event["ph"] in "XCM" and isinstance(event["ts"], int)
    assert event["pid"] > 0 and event["tid"] > 0
  for tid in (1, 2):
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
    assert all(isinstance(e["dur"], int) and e["dur"] > 0 for e in spans)
    ends = [e["ts"] + e["dur"] for e in spans]
    assert [e["ts"] for e in spans] == [0, *ends[:-1]]
    assert sum(e["dur"] for e in spans) == 4_500_000
  assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 2] == [
    *("outside chunks", "decode", "decode", "train drafter", "idle"),
    *("outside chunks", "train drafter"),
  ]
  threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
  assert threads == ["slice 0", "slice 1"]


def test_counters_are_given_where_they_change():
  """A counter per slice: its name is what tells it from another."""
  events = timeline.trace(ROLLOUT)["traceEvents"]
  counters = [(e["name"], e["ts"], e["args"]["live"]) for e in events if e["ph"] == "C"]
  assert counters == [
    ("live requests, slice 0", 500_000, 4),
    ("live requests, slice 0", 3_750_000, 2),
    ("live requests, slice 0", 4_500_000, 0),
    ("live requests, slice 1", 500_000, 4),
    ("live requests, slice 1", 1_500_000, 1),
    ("live requests, slice 1", 3_750_000, 0),
  ]


def test_no_span_is_lost_or_doubled_by_rounding():
  """Chunks of odd lengths, some below a microsecond."""
  times = [1e-7 * i**3 / 7 for i in range(200)]
  pairs = zip(times, times[1:], strict=False)
  chunks = [chunk(a, b, steps=(3, i % 4), trained=(0, 2)) for i, (a, b) in enumerate(pairs)]
  rollout = {"step": 0, "micro_batch_s": 1e-4 / 3, "chunks": chunks}
  for tid in (1, 2):
    events = timeline.trace(rollout)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
    assert all(
      a["ts"] + a["dur"] == b["ts"] for a, b in zip(spans, spans[1:], strict=False)
    )
    assert sum(e["dur"] for e in spans) == round(times[-1] * 1e6)


@pytest.mark.parametrize("slices", [1, 2, 64])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_figure_has_a_lane_and_a_line_per_slice(slices, chunks):
  """The legend tells what took which share, and only that."""
  wide = lambda c: {k: v[-1:] * slices if isinstance(v, list) else v for k, v in c.items()}
  shown = [wide(c) for c in ROLLOUT["chunks"][:chunks]]
  fig = plot.plot_timeline({**ROLLOUT, "chunks": shown})
  (ax,) = fig.axes
  assert len(ax.images) == len(ax.lines) == slices
  labels = [text.get_text() for text in fig.legends[0].get_texts()]
  if chunks == 1:
    assert labels == [
      *("decoding plainly (67%)", "outside chunks (33%)"),
      "live requests (4 fill a lane)",
    ]


def test_a_column_of_the_figure_blends_by_share():
  """The whole rollout of slice 1 in one column; colours of what never ran are unused."""
  spans = timeline.spans(ROLLOUT)[1]
  activities = [
    (timeline.PLAIN, ""),
    (timeline.TRAIN, ""),
    (timeline.SPECULATIVE, "3_1_4"),
  ]
  (share,) = plot._shares(spans, activities, [0.0, 4.5])
  assert share == pytest.approx([1.8 / 4.5, (0.9 + 0.75) / 4.5, 0.0])


@pytest.mark.parametrize("with_chunks", [False, True])
def test_the_last_rollout_that_has_chunks_is_drawn(tmp_path, with_chunks):
  """None in a run of an earlier version: its other figures are drawn."""
  earlier = {
    "step": 0,
    "length": [3, 4],
    "outcome": ["solved", "wrong"],
    "live_time_s": [0.0, 1.0],
    "live_requests": [2, 0],
  }
  rollouts = [earlier, {**earlier, "step": 8, "chunks": [], "micro_batch_s": 0.0}]
  if with_chunks:
    rollouts.insert(1, {**earlier, **ROLLOUT})
  for name, records in (
    ("metrics.jsonl", [{"step": 0, "reward/mean": 0.5}]),
    ("rollouts.jsonl", rollouts),
  ):
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / name).write_text("".join(lines))
  names = [path.name for path in plot.plot_all(tmp_path)]
  assert names[:3] == ["reward.png", "lengths.png", "live_requests.png"]
  assert names[3:] == (["timeline.png", "rollout_trace.json"] if with_chunks else [])
  if with_chunks:
    trace = json.loads((tmp_path / "figures" / "rollout_trace.json").read_text())
    assert trace == timeline.trace(ROLLOUT)
