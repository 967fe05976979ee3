"""Tells what every slice did in a rollout, as spans of time and as a trace.

`trace` is in the Trace Event Format: a file of it opens in https://ui.perfetto.dev
(Open trace file) and in chrome://tracing. All of it is made from one record of
rollouts.jsonl; see `metrics.Writer.write_rollout`.
"""

from collections.abc import Mapping, Sequence
import dataclasses

# Kinds of spans.
PLAIN, SPECULATIVE = "decode", "speculate"
TRAIN = "train drafter"
IDLE = "idle"
OUTSIDE = "outside chunks"  # the host, prefills, moves to another bucket, compilation


@dataclasses.dataclass(frozen=True)
class Span:
  """A time that a slice spent on one thing; seconds count from the rollout's start."""

  start_s: float
  end_s: float
  chunk: int  # its index; outside of chunks, that of the next
  kind: str
  strategy: str = ""  # of a SPECULATIVE span


def split(chunk: Mapping, micro_batch_s: float, index: int = 0) -> list[list[Span]]:
  """The spans of each slice within a chunk: gapless, from its start to its end.

  A chunk is timed as a whole and takes as long as its busiest slice, so that a
  slice decodes for its share of that slice's iterations. Then it trains, as long
  as its micro-batches take but not beyond the chunk, and then it idles. Of 2 s,
  with steps [10, 4], trained [0, 3] and 0.3 s a micro-batch, slice 1 decodes for
  0.8 s, trains for 0.9 s and idles for 0.3 s.

  Args:
    chunk: the fields of `samples.ChunkRecord`
    micro_batch_s: seconds of one micro-batch of the drafter, 0 if unknown
    index: of the chunk, noted in the spans
  """
  start, end, strategy = chunk["start_s"], chunk["end_s"], chunk["strategy"]
  decode = (PLAIN, "") if strategy == "off" else (SPECULATIVE, strategy)
  most = max(*chunk["steps"], 1)
  slices = []
  for steps, trained in zip(chunk["steps"], chunk["trained"], strict=True):
    share = steps / most
    decoded = start * (1 - share) + end * share  # exact at both ends
    idle = min(decoded + trained * micro_batch_s, end)
    parts = [
      Span(start, decoded, index, *decode),
      Span(decoded, idle, index, TRAIN),
      Span(idle, end, index, IDLE),
    ]
    slices.append([part for part in parts if part.start_s < part.end_s])
  return slices


def spans(rollout: Mapping) -> list[list[Span]]:
  """The spans of each slice, gapless from 0 to the end of the last chunk."""
  chunks = rollout["chunks"]
  slices = [[] for _ in chunks[0]["live"]]
  now = 0.0
  for i, chunk in enumerate(chunks):
    parts = split(chunk, rollout["micro_batch_s"], i)
    for slice_spans, part in zip(slices, parts, strict=True):
      if now < chunk["start_s"]:
        slice_spans.append(Span(now, chunk["start_s"], i, OUTSIDE))
      slice_spans += part
    now = chunk["end_s"]
  return slices


def trace(rollout: Mapping) -> dict:
  """The rollout as a process, with a thread and a counter of live requests per slice.

  Spans are "complete" events (X), named by their kind or strategy; counters (C) are
  given where they change. Times are whole microseconds, rounded at the boundaries,
  so that spans meet exactly.
  """
  chunks, events = rollout["chunks"], []
  for s, slice_spans in enumerate(spans(rollout)):
    where = {"pid": 1, "tid": s + 1}  # from 1: viewers take 0 for the idle task
    for name, args in (
      ("process_name", {"name": f"rollout of step {rollout['step']}"}),
      ("thread_name", {"name": f"slice {s}"}),
      ("thread_sort_index", {"sort_index": s}),
    ):
      events.append({"name": name, "ph": "M", "ts": 0, **where, "args": args})
    events += [_complete(span, chunks[span.chunk], s, where) for span in slice_spans]
    events += _counter(chunks, s, where)
  kept = [e for e in events if e["ph"] != "X" or e["dur"] > 0]
  return {"displayTimeUnit": "ms", "traceEvents": kept}


def _complete(span: Span, chunk: Mapping, s: int, where: Mapping) -> dict:
  """A span as an event, with what the chunk knows about it."""
  args = {"chunk": span.chunk}
  if span.kind in (PLAIN, SPECULATIVE):
    args |= {"live": chunk["live"][s], "steps": chunk["steps"][s]}
    args |= {"slots": chunk["batch"], "bucket_length": chunk["length"]}
  elif span.kind == TRAIN:
    args["micro_batches"] = chunk["trained"][s]
  start, end = _microseconds(span.start_s), _microseconds(span.end_s)
  return {
    "name": span.strategy or span.kind,
    "cat": span.kind,
    "ph": "X",
    "ts": start,
    "dur": end - start,
    **where,
    "args": args,
  }


def _counter(chunks: Sequence[Mapping], s: int, where: Mapping) -> list[dict]:
  """Live requests of a slice, 0 at the end; a counter's name is its identity."""
  readings = [(c["start_s"], c["live"][s]) for c in chunks]
  readings.append((chunks[-1]["end_s"], 0))
  common = {"name": f"live requests, slice {s}", "ph": "C", **where}
  events, last = [], None
  for time, live in readings:
    if live != last:
      events.append({**common, "ts": _microseconds(time), "args": {"live": live}})
    last = live
  return events


def _microseconds(seconds: float) -> int:
  return round(seconds * 1e6)
