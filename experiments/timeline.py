"""Timelines of the slices of a rollout, from a record of rollouts.jsonl."""

from collections.abc import Mapping
import dataclasses

# Kinds of spans.
PLAIN, SPECULATIVE = "decode", "speculate"
TRAIN = "train drafter"
IDLE = "idle"
OUTSIDE = "outside chunks"  # the host, prefills, moves to another bucket, compilation


@dataclasses.dataclass(frozen=True)
class Span:
  """A time in which a slice does one thing; seconds are from the rollout's start."""

  start_s: float
  end_s: float
  chunk: int  # its index; outside of chunks, that of the next
  kind: str
  strategy: str = ""  # of a SPECULATIVE span


def split(chunk: Mapping, micro_batch_s: float, index: int = 0) -> list[list[Span]]:
  """The spans of each slice within a chunk: gapless, from its start to its end.

  Only chunks are timed. A chunk takes as long as its busiest slice, so a slice decodes for
  its share of that slice's steps. Then it trains, for as long as its micro-batches take but
  not beyond the chunk, and then it is idle. Of 2 s,
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
