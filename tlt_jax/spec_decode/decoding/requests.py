"""Requests: what goes into a rollout. Host arrays, in request order."""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np


class RequestError(ValueError):
  """A request that no rollout can serve."""


@dataclasses.dataclass(frozen=True)
class Requests:
  prompts: Sequence[np.ndarray]  # i32[...] each
  prompt_idx: np.ndarray  # i32[B]
  request: np.ndarray  # u32[B]  id, unique over the whole run
  seed: np.ndarray  # u32[B]
  temperature: np.ndarray  # f32[B]
  top_k: np.ndarray  # i32[B]
  top_p: np.ndarray  # f32[B]
  min_p: np.ndarray  # f32[B]
  max_tokens: np.ndarray  # i32[B]  of the response
  stop_tokens: np.ndarray  # i32[B stops]  filled up with -1
  # i32[...] each: tokens of the response that were drawn before; None: of no request
  begun: Sequence[np.ndarray] | None = None

  def __len__(self) -> int:
    return len(self.request)

  def prompt(self, i: int) -> np.ndarray:
    return self.prompts[self.prompt_idx[i]]

  def subset(self, index: np.ndarray) -> "Requests":
    """The requests i32[b], in that order, with their own noise."""
    fields = {
      f.name: getattr(self, f.name)[index]
      for f in dataclasses.fields(self)
      if f.name not in ("prompts", "begun")
    }
    begun = None if self.begun is None else [self.begun[i] for i in index]
    return Requests(prompts=self.prompts, begun=begun, **fields)

  @property
  def total_length(self) -> np.ndarray:
    sizes = np.array([len(p) for p in self.prompts], np.int32)
    return sizes[self.prompt_idx] + self.max_tokens

  @functools.cached_property
  def last_token(self) -> np.ndarray:
    """i32[B]: the last one that is known of each at the start."""
    begun = self.begun_length
    last = [self.begun[i] if begun[i] else self.prompt(i) for i in range(len(self))]
    return np.array([tokens[-1] for tokens in last], np.int32)

  @functools.cached_property
  def begun_length(self) -> np.ndarray:
    """i32[B]: tokens of each response that are known at the start."""
    if self.begun is None:
      return np.zeros(len(self), np.int32)
    return np.array([len(tokens) for tokens in self.begun], np.int32)

  @functools.cached_property
  def prefix_idx(self) -> np.ndarray:
    """i32[B]: what is computed before each request can draw: its prompt, or more."""
    own = len(self.prompts) + np.arange(len(self), dtype=np.int32)
    return np.where(self.begun_length > 0, own, self.prompt_idx)

  def prefix(self, k: int) -> np.ndarray:
    """The tokens of a prompt, or of a request's prompt and begun response."""
    if not self.is_own(k):
      return self.prompts[k]
    i = k - len(self.prompts)
    return np.concatenate([self.prompt(i), self.begun[i]])

  def is_own(self, k: int) -> bool:
    """Whether a prefix is that of a single request, which has begun before."""
    return k >= len(self.prompts)


def make_requests(
  prompts: Sequence[np.ndarray],
  responses: int = 1,
  *,
  max_tokens: int | np.ndarray,
  seed: int | np.ndarray = 0,
  first_request: int = 0,
  temperature: float | np.ndarray = 1.0,
  top_k: int | np.ndarray = 0,
  top_p: float | np.ndarray = 1.0,
  min_p: float | np.ndarray = 0.0,
  stop_tokens: Sequence[int] | np.ndarray = (),
) -> Requests:
  """Makes P x R requests, the responses of a prompt side by side.

  Parameters (see `sampling.Sampling`) are one for all, or one per request.
  `stop_tokens` end a response, of which they are part; ids, or i32[B stops].

  Raises:
    RequestError: an empty prompt, or a parameter out of its range
  """
  for i, prompt in enumerate(prompts):
    if not len(prompt):
      raise RequestError(f"prompt {i} has no tokens")
  B = len(prompts) * responses

  def spread(x, dtype):
    return np.broadcast_to(np.asarray(x, dtype), (B,))

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
