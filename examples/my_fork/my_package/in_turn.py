"""A rule that takes the arms in turn."""

from tlt_jax.spec_decode.speculation import selector


class InTurn(selector.Arms):
  """Chooses every arm of a live batch as often as the others."""

  learnt = ("count",)

  def __init__(self, steps):
    """Starts with the first arm."""
    super().__init__(steps)
    self.count = 0

  def choose(self, live, step_s):
    here = self.arms(live)
    self.count += 1
    return here[(self.count - 1) % len(here)]


make = InTurn
