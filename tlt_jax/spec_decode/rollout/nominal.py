"""A clock that counts instead of measuring: what rollouts decide follows from tokens alone.

In bfloat16 a program of another shape rounds differently, and may draw another token. So
two runs are identical only if they choose the same buckets, strategies and chunks, and
train the drafter as much. All of that is decided by a clock. This one computes how long
steps would take on a nominal machine, from two figures: the numbers (weights and KV) that
it reads per second, and the tokens that it multiplies a weight with in the time of reading
one. The closer these are to the real machine, the better are the choices.
"""

from typing import NamedTuple

from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


class Machine(NamedTuple):
  """The nominal speed of a slice: memory bandwidth, and compute relative to it."""

  numbers_per_s: float  # weights and cached keys and values that it reads
  # Tokens that a weight is multiplied with in the time that it takes to read one weight
  # (the machine balance of a roofline): a pass over so many takes as long again as reading.
  tokens_per_read: float

  @classmethod
  def like(cls, platform: str, devices: int) -> "Machine":
    """The rounded figures of so many devices of a platform: "cpu", or any accelerator."""
    if platform == "cpu":
      return cls(5e9 * devices, 4.0)
    return cls(1e12 * devices, 256.0)


class Clock(clock_lib.Clock):
  """Knows what everything takes from the start, and learns nothing.

  Each rollout begins with the same ledger, so that a resumed run decides as one that was
  not interrupted. What it reports, `now`, is still the time.
  """

  measures = False

  def __init__(
    self,
    machine: Machine,
    target: config_lib.ModelConfig,
    layer: config_lib.ModelConfig | None = None,
    trained_tokens: int = 0,
  ):
    """Starts a ledger.

    Args:
      machine: a slice
      target: the model that decodes
      layer: the shape of the drafter's layer; None: there is no drafter
      trained_tokens: passes of the drafter over a token, in a micro-batch of its training
    """
    self._machine = machine
    head = target.width * target.vocab_size
    self._target = target.num_layers * _of_layer(target) + head
    self._kv = 2 * target.num_layers * target.num_kv_heads * target.head_dim
    self._drafter = _of_layer(layer) + head if layer else 0
    super().__init__()
    computed = 3 * trained_tokens * self._drafter  # with the gradient
    read = computed / machine.tokens_per_read
    self.micro_batch_s = read / machine.numbers_per_s

  def begin_rollout(self) -> None:
    super().begin_rollout()
    for ledger in (self._step_tokens, self._arm_tokens):
      ledger.clear()

  def step_s(self, bucket: int, arm: clock_lib.Arm) -> float:
    nodes = 1 if arm is None else arm.verify
    numbers = self._weights(self._target, bucket * nodes)
    numbers += bucket * self._kv
    if strategy_lib.uses_drafter(arm):
      numbers += arm.depth * self._weights(self._drafter, bucket * arm.width)
    return numbers / self._machine.numbers_per_s

  def _weights(self, count: int, tokens: int) -> float:
    """The time of a pass through so many weights, in numbers read."""
    return count * (1 + tokens / self._machine.tokens_per_read)

  def decoding_s(
    self, bucket: int, arm: clock_lib.Arm, steps: int
  ) -> float:
    return steps * self.step_s(bucket, arm)

  def chunk_took(
    self, bucket: int, arm: clock_lib.Arm, steps: int, seconds: float
  ) -> float:
    return self.decoding_s(bucket, arm, steps)

  def training_took(self, micro_batches: int, seconds: float) -> float:
    return micro_batches * self.micro_batch_s

  def trained(self, micro_batch_s: float) -> None:
    """Learns nothing."""

  def exchanged(self, seconds: float) -> None:
    """Learns nothing."""

  def rollout_took(self, seconds: float) -> float:
    return self.seconds


def _of_layer(config: config_lib.ModelConfig) -> int:
  """Weights of a decoder layer."""
  heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
  return config.width * (heads + 3 * config.mlp_width)
