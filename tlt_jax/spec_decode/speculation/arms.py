"""The arms of each live batch: what selectors that learn have in common."""

from collections.abc import Sequence
import copy
import logging
from typing import ClassVar

from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


class Arms(selector.Selector):
  """Several arms for every live batch, plain decoding among them if it may be chosen."""

  # The attributes that a checkpoint keeps.
  learnt: ClassVar[tuple[str, ...]] = ()

  def __init__(
    self, steps: Sequence[tuple[int, Sequence[selector.Arm]]], window: int = 16
  ):
    """Knows the arms of each live batch.

    Args:
      steps: (most live requests, arms) each; above the last only plain decoding
      window: chunks that an arm remembers
    """
    self._steps = tuple((most, tuple(arms)) for most, arms in steps)
    self._steps = tuple(sorted(self._steps, key=lambda step: step[0]))
    self._window = window
    if any(not arms for _, arms in self._steps):
      raise ValueError("every live batch needs an arm, were it 'off'")
    if len({most for most, _ in self._steps}) < len(self._steps):
      raise ValueError(f"the arms of a live batch are named twice: {self._steps}")

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    arms = (arm for _, arms in self._steps for arm in arms)
    return tuple(dict.fromkeys(arm for arm in arms if arm is not None))

  def arms(self, live: int) -> tuple[selector.Arm, ...]:
    return self.step(live)[1]

  def step(self, live: int) -> tuple[int, tuple[selector.Arm, ...]]:
    """The most live requests that share these arms, and the arms."""
    return next((step for step in self._steps if live <= step[0]), (0, (None,)))

  def key(self, live: int, arm: selector.Arm) -> str:
    """A name of an arm, the same for all live batches that share their arms."""
    return f"{self.step(live)[0]} {strategy_lib.name(arm)}"

  def state(self) -> dict:
    learnt = {name: getattr(self, name) for name in self.learnt}
    return copy.deepcopy({"rule": type(self).__name__, **learnt})

  def restore(self, state: dict | None) -> None:
    """Goes on from what `state` gave; of another rule, or None: starts anew."""
    if not state or state["rule"] != type(self).__name__:
      logging.info("what strategies are worth is learnt anew")
      return
    for name in self.learnt:
      if name in state:  # an earlier version may not have kept it
        setattr(self, name, copy.deepcopy(state[name]))
