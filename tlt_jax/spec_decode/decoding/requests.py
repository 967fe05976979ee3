"""What goes into a rollout and what comes out; host arrays, in request order."""

from collections.abc import Sequence
import dataclasses

import numpy as np

STOP, LENGTH = 0, 1  # finish reasons: a stop token was drawn, or the limit met


class RequestError(ValueError):
  """A request that no rollout can serve; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Requests:
  """P prompts and the B requests that continue them."""

  prompts: Sequence[np.ndarray]  # i32[...] each
  prompt_idx: np.ndarray  # i32[B]
  request: np.ndarray  # u32[B]  id, unique over the whole run
  seed: np.ndarray  # u32[B]
  temperature: np.ndarray  # f32[B]
  top_k: np.ndarray  # i32[B]
  top_p: np.ndarray  # f32[B]
  min_p: np.ndarray  # f32[B]
  max_tokens: np.ndarray  # i32[B]  of the response
  stop_tokens: np.ndarray  # i32[B E]  filled up with -1

  def __len__(self) -> int:
    return len(self.request)

  def prompt(self, i: int) -> np.ndarray:
    """The prompt of request i."""
    return self.prompts[self.prompt_idx[i]]

  def subset(self, index: np.ndarray) -> "Requests":
    """The requests i32[b], in that order; their noise stays their own."""
    fields = {
      f.name: getattr(self, f.name)[index]
      for f in dataclasses.fields(self)
      if f.name != "prompts"
    }
    return Requests(prompts=self.prompts, **fields)

  @property
  def total_length(self) -> np.ndarray:
    """i32[B]: prompt and longest possible response."""
    sizes = np.array([len(p) for p in self.prompts], np.int32)
    return sizes[self.prompt_idx] + self.max_tokens

  @property
  def last_token(self) -> np.ndarray:
    """i32[B]: of the prompt."""
    return np.array([p[-1] for p in self.prompts], np.int32)[self.prompt_idx]


def make_requests(
  prompts: Sequence[np.ndarray],
  responses: int = 1,
  *,
  max_tokens,
  seed=0,
  first_request: int = 0,
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  min_p=0.0,
  stop_tokens: Sequence[int] | np.ndarray = (),
) -> Requests:
  """P x R requests, the responses of a prompt side by side.

  Args:
    prompts: i32[...] token ids
    responses: R, per prompt
    first_request: id of the first request; the rest count up from it
    max_tokens, seed, temperature, top_k, top_p, min_p: a number, or one per request
    stop_tokens: ids that end a response (kept as its last token), or i32[B E]
  Raises:
    RequestError: an empty prompt, or a parameter out of its range
  """
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise RequestError(f"prompt {i} has no tokens")
  B = len(prompts) * responses
  spread = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), (B,))
  checks = {
    "max_tokens >= 1": np.asarray(max_tokens) >= 1,
    "temperature >= 0": np.asarray(temperature) >= 0,
    "top_k >= 0 (0 is off)": np.asarray(top_k) >= 0,
    "0 < top_p <= 1": (np.asarray(top_p) > 0) & (np.asarray(top_p) <= 1),
    "0 <= min_p <= 1": (np.asarray(min_p) >= 0) & (np.asarray(min_p) <= 1),
  }
  for rule, holds in checks.items():
    if not np.all(holds):
      raise RequestError(f"sampling needs {rule}")
  stop = np.asarray(stop_tokens, np.int32)
  stop = np.append(stop, -1) if stop.ndim == 1 else stop  # never of size zero
  return Requests(
    prompts=[np.asarray(p, np.int32) for p in prompts],
    prompt_idx=np.repeat(np.arange(len(prompts), dtype=np.int32), responses),
    request=(first_request + np.arange(B)).astype(np.uint32),
    seed=spread(seed, np.uint32),
    temperature=spread(temperature, np.float32),
    top_k=spread(top_k, np.int32),
    top_p=spread(top_p, np.float32),
    min_p=spread(min_p, np.float32),
    max_tokens=spread(max_tokens, np.int32),
    stop_tokens=np.broadcast_to(stop, (B, stop.shape[-1])),
  )


@dataclasses.dataclass(frozen=True)
class Chunk:
  """What a chunk did; seconds count from the rollout's start."""

  start_s: float
  end_s: float
  batch: int  # of its bucket: slots per slice
  length: int  # of its bucket: tokens that a step attends over
  strategy: str  # "off" for plain decoding
  live: list[int]  # per slice, requests at its start
  steps: list[int]  # per slice, iterations
  trained: list[int]  # per slice, micro-batches of the drafter's training
  tokens: int = 0  # drawn in all
  passes: int = 0  # of the target over a live request that they took


@dataclasses.dataclass
class Samples:
  """The responses, in the order of the requests."""

  tokens: np.ndarray  # i32[B T]  the response; 0 beyond its length
  length: np.ndarray  # i32[B]
  logp: np.ndarray  # f32[B T]  under logits / T, before filters
  logp_filtered: np.ndarray  # f32[B T]  of the distribution drawn from
  finish_reason: np.ndarray  # i32[B]  STOP or LENGTH
  features: list[np.ndarray] | None  # f[prompt + length - 1, D] each, on request
  timeline: list[tuple[float, list[int]]]  # seconds since the start, live per slice
  accepted: np.ndarray | None = None  # i64[R]  speculative passes of more than r tokens
  # Where it speculated: "predicted_gain", the speed-up that the policy expected;
  # "realised_gain"; and "saved_s", the seconds that this made of a difference.
  gain: dict[str, float] = dataclasses.field(default_factory=dict)
  computed_tokens: int = 0  # slots times iterations; what exceeds `length` is waste
  peak_bytes: int = 0  # memory per device in the fullest chunk
  chunks: list[Chunk] = dataclasses.field(default_factory=list)
  decisions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  training: list[dict] | None = None  # of the drafter, per update: its means
  training_s: float = 0.0  # that it went on after the last token
  published: bool | None = None  # whether what was trained drafts; None: not asked
  micro_batch_s: float = 0.0  # of it, measured alone

  def response(self, i: int) -> np.ndarray:
    return self.tokens[i, : self.length[i]]

  @property
  def passes(self) -> int:
    """Of the target over live rows; each draws a token or more."""
    return sum(chunk.passes for chunk in self.chunks)

  @property
  def harvested_s(self) -> float:
    """Seconds of idle slices in which the drafter was trained."""
    return self.micro_batch_s * sum(sum(chunk.trained) for chunk in self.chunks)

  def training_metrics(self) -> dict[str, float]:
    """`drafter/*` of the drafter's training, means over its updates; none without it."""
    if self.training is None:
      return {}
    done = [m for m in self.training if m["updated"]]
    names = sorted(set(done[0]) - {"updated"}) if done else []
    asked = self.published is not None
    return {
      **({"drafter/published": float(self.published)} if asked else {}),
      "rollout/harvested_s": self.harvested_s,
      "drafter/training_s": self.training_s,
      "drafter/updates": len(done),
      "drafter/skipped": len(self.training) - len(done),
      **{f"drafter/{k}": float(np.mean([m[k] for m in done])) for k in names},
    }

  @property
  def useful_share(self) -> float:
    """Drawn tokens over all that the slots' iterations could have drawn."""
    return float(self.length.sum()) / max(self.computed_tokens, 1)

  @property
  def mean_acceptance_length(self) -> float:
    """Tokens drawn per pass of the target; 1 without speculation."""
    return float(self.length.sum()) / max(self.passes, 1)

  @property
  def acceptance_rate(self) -> list[float]:
    """Share of speculative passes whose k-th drafted token was accepted, k = 1.."""
    if self.accepted is None or not self.accepted[0]:
      return []
    return (self.accepted[1:] / self.accepted[0]).tolist()

  @property
  def idle_s(self) -> float:
    """Seconds of chunks in which slices had no request left, summed over slices.

    What they trained meanwhile is part of it. A chunk takes as long as its busiest slice,
    so that a slice is idle for the share of that slice's steps which it did not do.
    """
    idle = lambda chunk: sum(1 - n / max(*chunk.steps, 1) for n in chunk.steps)
    return sum((chunk.end_s - chunk.start_s) * idle(chunk) for chunk in self.chunks)
