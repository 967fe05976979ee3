"""A rule that takes the arms in turn."""

from tlt_jax.spec_decode.speculation import selector


class InTurn(selector.Arms):
  """Chooses all arms of a live batch equally often."""

  learnt = ("count",)

  def __init__(self, steps):
    super().__init__(steps)
    self.count = 0

  def choose(self, live, step_s):
    here = self.ready(live, step_s)
    self.count += 1
    return here[(self.count - 1) % len(here)]


make = InTurn
