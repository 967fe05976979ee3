"""Sources of drafts: they guess the target's next tokens.

`make("ngram", setting)` imports `tlt_jax.spec_decode.speculation.sources.ngram` and
calls its `make(setting)`. A dotted name is imported as given, so a source may be part of
any package; a strategy names it ("my_package.my_source_5"). Whatever a source guesses,
no token changes: verification draws the target's own.

A source has two sides. On the host it prepares, before a chunk, a *state*: arrays that
are donated to the chunk. On the devices, once per slice, it proposes a tree of guesses in
each iteration, and absorbs the accepted tokens.
"""

from collections import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from tlt_jax import named
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify


@dataclasses.dataclass(frozen=True)
class Setting:
  """The rollout that a source drafts for."""

  config: config_lib.ModelConfig  # of the target
  mesh: jax.sharding.Mesh
  pool: programs.Pool  # for its own programs
  room: strategy_lib.Room
  strategies: tuple[strategy_lib.Strategy, ...]  # those that name this source
  drafter: drafter_lib.DrafterConfig | None = None
  layout: features_lib.Layout | None = None  # of the features that are kept
  fill_rows: int = 8  # requests whose drafter KV is computed at a time
  fill_block: int = 128  # tokens of each
  memory_tokens: int = 0  # of earlier responses, at most
  memory_rows: int = 0  # rows of them that a chunk may look up
  kernels: str | None = None  # of its programs, see `rollout.Options`


class Progress(NamedTuple):
  """A running request."""

  request: int
  prompt_idx: int  # equal for the responses to one prompt
  prompt: np.ndarray  # i32[...]
  response: np.ndarray  # i32[...]  the last one is pending
  pages: np.ndarray  # i32[M]  of its slice, then the sink

  @property
  def tokens(self) -> np.ndarray:
    """i32[...]: prompt and response."""
    return np.concatenate([self.prompt, self.response])


# Per slice and slot the request that runs there; None: the slot is free.
Running = abc.Sequence[abc.Sequence[Progress | None]]


class Proposal(NamedTuple):
  """The guesses of an iteration."""

  tree: tree_lib.Tree
  state: Any  # for `absorb`


Propose = abc.Callable[[slots_lib.Slots, Any, jax.Array], Proposal]  # slots, state, depth
Absorb = abc.Callable[[Any, verify.Output], Any]


class Source:
  """A source of drafts; subclasses override what they need."""

  reads_drafter = False  # whether `bind` needs the drafter's weights
  state_shardings: Any = None  # of the result of `end`

  def __init__(self, setting: Setting):
    self.setting = setting

  def program(self, strategy: strategy_lib.Strategy) -> str:
    """The name of the program that runs a strategy; equal names share a program.

    Depth is a run-time argument and no part of it.
    """
    return f"{strategy.source}_{strategy.width}_{strategy.verify}"

  def ready(self, weights: chunk_lib.Weights, slots: slots_lib.Slots) -> Any:
    """Compiles what `prepare` runs.

    Args:
      weights, slots: shapes and shardings
    Returns:
      shapes and shardings of the state that `prepare` makes
    """
    return None

  def prepare(
    self, weights: chunk_lib.Weights, slots: slots_lib.Slots, running: Running
  ) -> Any:
    """Makes the state of the next chunk, to which it is donated.

    Args:
      weights: of the target, and of the drafter if `reads_drafter`
      slots: the running requests on the devices
      running: the same on the host
    """
    return None

  def begin(self, slots: slots_lib.Slots, state: Any) -> Any:
    """On the devices, at a chunk's start: from `prepare`'s state to the loop's."""
    return state

  def end(self, state: Any) -> Any:
    """On the devices, at a chunk's end: from the loop's state to `release`'s."""
    return state

  def release(self, state: Any, running: Running) -> None:
    """Takes the state after a chunk; `running` are the requests that continue."""

  def reset(self) -> None:
    """Frees its device arrays: no request is running any more."""

  def bind(
    self, strategy: strategy_lib.Strategy, weights: chunk_lib.Weights, length: int
  ) -> tuple[Propose, Absorb]:
    """Makes the functions that propose and absorb in a chunk of one slice.

    Args:
      length: S, a bound of all positions
    Returns:
      (slots, state, depth i32[]) -> Proposal; and (state of the proposal, output) -> the
      next state
    """
    raise NotImplementedError

  def finished(self, prompt: np.ndarray, response: np.ndarray) -> None:
    """Learns from a finished request, i32[...] each."""

  def state(self) -> dict:
    """What it has learnt, as JSON for a checkpoint."""
    return {}

  def restore(self, state: dict) -> None:
    """Continues from a `state`."""


def make(name: str, setting: Setting) -> Source:
  """The source of that name.

  Raises:
    ValueError: no such module, or it cannot draft in this setting
  """
  try:
    found = named.module(name, f"{__package__}.sources", "make")
  except named.NameNotFound as e:
    raise ValueError(f"no source of drafts {name!r}: {e}") from e
  return found.make(setting)
