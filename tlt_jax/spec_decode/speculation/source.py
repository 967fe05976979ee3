"""Sources of drafts: they guess the target's next tokens.

`make` imports a module of `sources/` by name, or any by its dotted name
("my_package.my_source_5"), and calls its `make(setting)`. No guess changes a token.

On the host a source prepares, before a chunk, a *state*: arrays that are donated to it. On
the devices, once per slice, it proposes a tree of guesses in each iteration, and absorbs
the accepted tokens.
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
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib
from tlt_jax.spec_decode.speculation import verify


@dataclasses.dataclass(frozen=True)
class Setting:
  config: config_lib.ModelConfig  # of the target
  mesh: jax.sharding.Mesh
  pool: programs.Pool  # for its own programs
  room: strategy_lib.Room
  strategies: tuple[strategy_lib.Strategy, ...]  # those that name this source
  pages: pages_lib.Sizes  # of KV and features
  drafter: drafter_lib.DrafterConfig | None = None
  layout: features_lib.Layout | None = None  # of the features that are kept
  fill_rows: int = 8  # requests whose drafter KV is computed at a time
  fill_block: int = 128  # tokens of each
  memory_tokens: int = 0  # of earlier responses, at most
  memory_rows: int = 0  # rows of them that a chunk may look up
  kernels: str | None = None  # of its programs, see `rollout.Options`


class Progress(NamedTuple):
  request: int
  prompt_idx: int  # equal for the responses to one prompt
  prompt: np.ndarray  # i32[...]
  response: np.ndarray  # i32[...]  the last one is pending
  pages: np.ndarray  # i32[M]  of its slice, then the sink

  @property
  def tokens(self) -> np.ndarray:
    return np.concatenate([self.prompt, self.response])


# Per slice and slot the request that runs there; None: the slot is free.
Running = abc.Sequence[abc.Sequence[Progress | None]]


class Proposal(NamedTuple):
  tree: tree_lib.Tree
  state: Any  # for `absorb`


Propose = abc.Callable[[slots_lib.Slots, Any, jax.Array], Proposal]  # slots, state, depth
Absorb = abc.Callable[[Any, verify.Output], Any]


class Source:
  reads_drafter = False  # whether `bind` needs the drafter's weights
  state_shardings: Any = None  # of the result of `end`

  def __init__(self, setting: Setting):
    self.setting = setting

  def program(self, strategy: strategy_lib.Strategy) -> str:
    """The name of the program that runs a strategy, at any depth."""
    return f"{strategy.source}_{strategy.width}_{strategy.verify}"

  def ready(self, weights: chunk_lib.Weights, slots: slots_lib.Slots) -> Any:
    """Compiles what `prepare` runs; returns the shapes and shardings of its state."""
    return None

  def prepare(
    self, weights: chunk_lib.Weights, slots: slots_lib.Slots, running: Running
  ) -> Any:
    """Makes the state of the next chunk; `running` is the host's view of `slots`."""
    return None

  def begin(self, slots: slots_lib.Slots, state: Any) -> Any:
    """On the devices, at a chunk's start: from `prepare`'s state to the loop's."""
    return state

  def end(self, state: Any) -> Any:
    """On the devices, at a chunk's end: from the loop's state to `release`'s."""
    return state

  def release(self, state: Any, known: abc.Mapping[int, int]) -> None:
    """Takes the state after a chunk, and the tokens of each request that continues."""

  def reset(self) -> None:
    """Frees its device arrays: no request is running any more."""

  def bind(
    self, strategy: strategy_lib.Strategy, weights: chunk_lib.Weights, length: int
  ) -> tuple[Propose, Absorb]:
    """The functions that propose and absorb in a chunk of one slice; S = `length`."""
    raise NotImplementedError

  def finished(self, prompt: np.ndarray, response: np.ndarray) -> None:
    """Learns from a finished request."""

  def state(self) -> dict:
    return {}

  def restore(self, state: dict) -> None:
    """Resumes from a `state`."""


def make(name: str, setting: Setting) -> Source:
  """ValueError: no such module, or it cannot draft in this setting."""
  try:
    found = named.module(name, f"{__package__}.sources", "make")
  except named.NameNotFound as e:
    raise ValueError(f"no source of drafts {name!r}: {e}") from e
  return found.make(setting)
