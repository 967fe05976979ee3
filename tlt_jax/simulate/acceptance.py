"""How many drafted tokens a pass of the target accepts: from rates, or replayed."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from tlt_jax.spec_decode.speculation import strategy as strategy_lib


class Acceptance(Protocol):
  def ahead(
    self,
    request: np.ndarray,
    drawn: np.ndarray,
    tokens: int,
    strategy: strategy_lib.Strategy,
  ) -> np.ndarray:
    """i64[n T]: drafts accepted in a pass that begins 0, 1, ... T-1 tokens from now.

    Of requests u32[n], by their ids, each with `drawn` i32[n] response tokens.
    """


def children(strategy: strategy_lib.Strategy) -> float:
  """Mean children of a node on the accepted path, if nodes are spread evenly over depth."""
  return min(float(strategy.width), (strategy.verify - 1) / strategy.depth)


@dataclasses.dataclass(frozen=True)
class Rates:
  """Independent draws: the k-th drafted token is accepted with a given probability.

  Deeper drafts than are known are accepted like the deepest of them.
  The draw for a token depends on (seed, request, position) alone, so neither schedule nor
  slices change what is accepted, and higher rates never accept less.

  A tree is approximated: with w children per node of its path (`children`), each
  independently right as often as a chain's single one, level k is accepted with
  1 - (1 - rate_k)^w, which flatters wide trees. `trees` has rates measured with trees.
  """

  rates: Sequence[float]
  trees: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
  seed: int = 0

  def __post_init__(self):
    for rates in (self.rates, *self.trees.values()):
      if not len(rates) or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(
          f"acceptance is a share from 0 to 1 for each drafted position, not {rates}"
        )

  def of(self, strategy: strategy_lib.Strategy) -> np.ndarray:
    known = self.trees.get(str(strategy))
    rates = np.asarray(self.rates if known is None else known, float)
    rates = np.append(rates, np.full(strategy.depth, rates[-1]))[: strategy.depth]
    return rates if known is not None else 1 - (1 - rates) ** children(strategy)

  def ahead(self, request, drawn, tokens, strategy) -> np.ndarray:
    rates = self.of(strategy)
    at = drawn[:, None] + np.arange(tokens + len(rates))
    chance = _uniform(request[:, None], at, self.seed)
    is_accepted, accepted = np.ones((len(request), tokens), bool), 0
    for k, rate in enumerate(rates):
      is_accepted &= chance[:, k : k + tokens] < rate
      accepted = accepted + is_accepted
    return accepted

  def length(self, strategy: strategy_lib.Strategy) -> float:
    """The expected acceptance length: tokens per pass, its own included."""
    return 1.0 + float(np.cumprod(self.of(strategy)).sum())


def conditional(shares: Sequence[float]) -> list[float]:
  """Rates from `rollout/acceptance_rate_pos_k`: shares of all passes, k = 1, 2, ..."""
  above = np.append(1.0, shares)
  known = above[:-1] > 0
  return (above[1:][known] / above[:-1][known]).tolist()


@dataclasses.dataclass(frozen=True)
class Replay:
  """Drafts accepted in a real rollout, by (request, tokens drawn before the pass)."""

  accepted: Mapping[tuple[int, int], int]

  def ahead(self, request, drawn, tokens, strategy) -> np.ndarray:
    at = drawn[:, None] + np.arange(tokens)
    rows = zip(request.tolist(), at.tolist(), strict=True)
    return np.array([[self.accepted.get((i, t), 0) for t in row] for i, row in rows])


def _uniform(request: np.ndarray, position: np.ndarray, seed: int) -> np.ndarray:
  x = (request.astype(np.uint64) << np.uint64(32)) + position.astype(np.uint64)
  x = x + np.uint64(1 + seed) * np.uint64(0x9E3779B97F4A7C15)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  return (x ^ (x >> np.uint64(31))) / 2.0**64
