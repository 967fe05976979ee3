"""Requests: what goes into a rollout. Host arrays, in request order."""

from collections.abc import Sequence
import dataclasses

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

  def __len__(self) -> int:
    return len(self.request)

  def prompt(self, i: int) -> np.ndarray:
    return self.prompts[self.prompt_idx[i]]

  def subset(self, index: np.ndarray) -> "Requests":
    """The requests i32[b], in that order, with their own noise."""
    fields = {
      f.name: getattr(self, f.name)[index]
      for f in dataclasses.fields(self)
      if f.name != "prompts"
    }
    return Requests(prompts=self.prompts, **fields)

  @property
  def total_length(self) -> np.ndarray:
    sizes = np.array([len(p) for p in self.prompts], np.int32)
    return sizes[self.prompt_idx] + self.max_tokens

  @property
  def last_token(self) -> np.ndarray:
    return np.array([p[-1] for p in self.prompts], np.int32)[self.prompt_idx]


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
