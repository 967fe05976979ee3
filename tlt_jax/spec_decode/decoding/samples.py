"""What a rollout returns: host arrays, in request order."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib

# Finish reasons: none yet, a stop token was drawn, or the limit met.
UNFINISHED, STOP, LENGTH = -1, 0, 1


@dataclasses.dataclass(frozen=True)
class ChunkRecord:
  """Statistics of a chunk; seconds count from the rollout's start."""

  start_s: float
  end_s: float
  batch: int  # slots per slice
  strategy: str  # "off" for plain decoding
  live: list[int]  # per slice, requests at its start
  steps: list[int]  # per slice, iterations
  trained: list[int]  # per slice, micro-batches of the drafter's training
  tokens: int = 0  # drawn in all
  passes: int = 0  # of the target over a live request that they took


@dataclasses.dataclass
class Samples:
  tokens: np.ndarray  # i32[B T]  the response; 0 beyond its length
  length: np.ndarray  # i32[B]  of what is drawn so far, if a response still runs
  logp: np.ndarray  # f32[B T]  under logits / T, before filters
  logp_filtered: np.ndarray  # f32[B T]  of the distribution drawn from
  finish_reason: np.ndarray  # i32[B]  STOP, LENGTH or UNFINISHED
  exact: bool = False  # whether other exact rollouts draw the same bits
  features: list[np.ndarray] | None = None  # f[prompt + length - 1, E] each, on request
  # (seconds since the start, live requests per slice) after each chunk
  timeline: list[tuple[float, list[int]]] = dataclasses.field(default_factory=list)
  accepted: np.ndarray | None = None  # i64[A]  speculative passes of more than a tokens
  # Where it speculated: "predicted_gain", the speed-up that the selector expected;
  # "realised_gain"; and "saved_s", the seconds that this made of a difference. Where a
  # selector chose among arms: "lost_s", the seconds that the best of them, in hindsight
  # and for each live batch, would have saved.
  gain: dict[str, float] = dataclasses.field(default_factory=dict)
  computed_tokens: int = 0  # slots times iterations; what exceeds `kept_tokens` is waste
  dropped_tokens: int = 0  # drawn, but not kept: of a request that starts over, or `cut`
  peak_bytes: int = 0  # memory per device in the fullest chunk
  kv_tokens: list[int] = dataclasses.field(default_factory=list)  # that each chunk held
  chunks: list[ChunkRecord] = dataclasses.field(default_factory=list)
  decisions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  # Of the drafter, by program that trained it: "updates", "skipped", and what
  # `trainer.Account.metrics` has.
  training: list[dict] | None = None
  training_s: float = 0.0  # that it went on after the last token
  # Of the whole run until now, see `spot.investment`: seconds of training after rollouts,
  # and an estimate of the seconds that all training has saved.
  invested_s: float = 0.0
  saved_s: float = 0.0
  micro_batch_s: float = 0.0  # of it, in slices that only train

  def response(self, i: int) -> np.ndarray:
    return self.tokens[i, : self.length[i]]

  def first(self, count: int) -> "Samples":
    """The samples of the first requests."""
    names = ("tokens", "length", "logp", "logp_filtered", "finish_reason")
    cut = {name: getattr(self, name)[:count] for name in names}
    features = None if self.features is None else self.features[:count]
    return dataclasses.replace(self, **cut, features=features)

  def extend(self, i: int, start: int, emitted: slots_lib.Emitted, row: int) -> None:
    """Appends row `row` of a chunk's tokens to response `i`, from its token `start` on."""
    count = int(emitted.count[row])
    self.tokens[i, start : start + count] = emitted.tokens[row, :count]
    self.logp[i, start : start + count] = emitted.logp[row, :count]
    self.logp_filtered[i, start : start + count] = emitted.logp_filtered[row, :count]
    self.length[i] = start + count

  def end(self, i: int, length: int, stop_tokens: np.ndarray) -> None:
    self.length[i] = length
    stopped = self.tokens[i, length - 1] in stop_tokens
    self.finish_reason[i] = STOP if stopped else LENGTH

  def cut(self, bound: np.ndarray) -> None:
    """Drops the tokens of responses beyond i32[B]; those that had more are unfinished."""
    over = self.length > bound
    self.dropped_tokens += int((self.length - bound)[over].sum())
    self.length[over] = bound[over]
    self.finish_reason[over] = UNFINISHED
    beyond = np.arange(self.tokens.shape[1]) >= self.length[:, None]
    for x in (self.tokens, self.logp, self.logp_filtered):
      x[beyond] = 0

  def note(self, chunk: ChunkRecord, live: np.ndarray) -> None:
    """Adds a chunk's record, and the live requests i32[slices] after it."""
    self.chunks.append(chunk)
    self.timeline.append((chunk.end_s, live.tolist()))

  def count_chunk(self, emitted: slots_lib.Emitted, batch: int) -> None:
    self.computed_tokens += int(emitted.steps.sum()) * batch
    if emitted.accepted is not None:
      self.accepted += emitted.accepted.sum(0)

  @property
  def passes(self) -> int:
    """Passes of the target over live rows; each draws a token or more."""
    return sum(chunk.passes for chunk in self.chunks)

  @property
  def harvested_s(self) -> float:
    """Seconds of idle slices in which the drafter was trained."""
    return self.micro_batch_s * sum(sum(chunk.trained) for chunk in self.chunks)

  @property
  def updates(self) -> int:
    return sum(stats["updates"] for stats in self.training or ())

  def training_metrics(self) -> dict[str, float]:
    """`drafter/*` of the drafter's training, means over its updates; none without it."""
    if self.training is None:
      return {}
    means = training_means(self.training)
    return {
      "rollout/harvested_s": self.harvested_s,
      "drafter/training_s": self.training_s,
      "drafter/invested_s": self.invested_s,
      "drafter/saved_s": self.saved_s,
      "drafter/updates": self.updates,
      "drafter/skipped": sum(m["skipped"] for m in self.training),
      **{f"drafter/{name}": x for name, x in means.items()},
    }

  @property
  def drawn_tokens(self) -> int:
    return sum(chunk.tokens for chunk in self.chunks)

  @property
  def kept_tokens(self) -> int:
    """Tokens of responses that this rollout has drawn."""
    return self.drawn_tokens - self.dropped_tokens

  @property
  def useful_share(self) -> float:
    """Kept tokens over all that the slots' iterations could have drawn."""
    return self.kept_tokens / max(self.computed_tokens, 1)

  @property
  def mean_acceptance_length(self) -> float:
    """Tokens drawn per pass of the target; 1 without speculation."""
    return self.drawn_tokens / max(self.passes, 1)

  @property
  def acceptance_rate(self) -> list[float]:
    """Share of speculative passes whose k-th drafted token was accepted, k = 1.."""
    if self.accepted is None or not self.accepted[0]:
      return []
    return (self.accepted[1:] / self.accepted[0]).tolist()

  @property
  def speculating_s(self) -> float:
    return sum(c.end_s - c.start_s for c in self.chunks if c.strategy != "off")

  @property
  def idle_s(self) -> float:
    """Seconds of chunks in which slices had no request left, summed over slices.

    What they trained meanwhile is part of it. A chunk takes as long as its busiest slice,
    so that a slice is idle for the share of that slice's steps which it did not do.
    """
    return sum(
      (chunk.end_s - chunk.start_s) * sum(1 - n / max(*chunk.steps, 1) for n in chunk.steps)
      for chunk in self.chunks
    )


# Is called after every chunk with the samples so far, and the numbers of the requests that
# ended in it; such as to show responses while they grow.
Watch = Callable[[Samples, list[int]], None]
# How many prompts are asked by now: of the samples so far, the requests that have ended
# since the last time, and whether no request is left.
Ask = Callable[[Samples, list[int], bool], int]
# The response tokens at which each request pauses, i32[B], of the samples so far and the
# requests that have ended since the last time; None: as yet all run to their end. Bounds
# are only lowered.
Until = Callable[[Samples, list[int]], np.ndarray | None]
# Begins to score the samples, all of which are drawn; what it returns says whether that
# still runs.
Score = Callable[[Samples], Callable[[], bool]]


def training_means(training: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Means over updates of `Samples.training` or a part of it; {} without any.

  "new_agreement" is a mean over new rows, and absent without any.
  """
  means = {}
  for name in sorted({name for m in training for name in m}):
    by = "new_rows" if name == "new_agreement" else "updates"
    total = sum(m.get(by, 0) for m in training)
    if total and name not in ("updates", "skipped", "new_rows"):
      means[name] = sum(m.get(by, 0) * m.get(name, 0.0) for m in training) / total
  return means


def empty(
  requests: requests_lib.Requests, *, most: int | None = None, features: bool = False
) -> Samples:
  """Samples of responses before a rollout; `most`: A of `Samples.accepted`."""
  B, T = len(requests), int(max(requests.max_tokens, default=0))
  tokens = np.zeros((B, T), np.int32)
  for row, begun in zip(tokens, requests.begun or (), strict=False):
    row[: len(begun)] = begun
  return Samples(
    tokens=tokens,
    length=requests.begun_length.copy(),
    logp=np.zeros((B, T), np.float32),
    logp_filtered=np.zeros((B, T), np.float32),
    finish_reason=np.full(B, UNFINISHED, np.int32),
    features=[None] * B if features else None,
    accepted=None if most is None else np.zeros(most, np.int64),
  )
