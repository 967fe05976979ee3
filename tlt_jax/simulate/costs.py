"""Cost models: from measured tables, or a roofline of a device."""

import collections
from collections.abc import Mapping
import dataclasses
import functools
from typing import Protocol

import numpy as np

from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import block_loss

Arm = strategy_lib.Strategy | None  # None: plain decoding


class Costs(Protocol):
  host_s: float  # between two chunks

  def step_s(self, bucket: int, arm: Arm, seen: float, alone: bool = False) -> float:
    """Seconds of a decoding step, with `seen` tokens in the caches of a slice's requests.

    `alone`: no other slice decodes at the same time; CPU devices share memory.
    """

  def prefill_s(self, tokens: int) -> float:
    """Seconds of a call for `tokens` of prompts."""

  def fill_s(self, tokens: int) -> float:
    """Seconds of computing a drafter's KV of `tokens` of a slice."""

  def micro_batch_s(self, tokens: int) -> float:
    """Seconds of training on a row of `tokens`, an update included."""

  def exchange_s(self, slices: int) -> float:
    """Seconds in which slices average their drafters, moments included."""


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator: its data sheet, and the shares of it that programs reach."""

  name: str
  bandwidth: float  # of its memory, bytes/s
  flops: float  # of matrix products, FLOP/s, at the precision of the weights
  launch_s: ranges.NotNegative  # overhead of a kernel
  link: float  # between the devices of a slice, bytes/s and direction
  link_s: ranges.NotNegative  # latency of an all-reduce
  bandwidth_share: ranges.ShareAboveZero = 0.8  # of the bandwidth that decoding reaches
  flops_share: ranges.ShareAboveZero = 0.5  # of the FLOP/s that large products reach

  def __post_init__(self):
    if min(self.bandwidth, self.flops, self.link) <= 0:
      raise ValueError(f"{self.name}: bandwidth, flops and link must be above 0")


@dataclasses.dataclass(frozen=True)
class Drafter:
  """A drafter's sizes; with a `block` all guesses come from one pass over its places."""

  features: ranges.Count = 3  # hidden states of the target that it reads
  vocab_size: ranges.Count = 32_000  # of its head
  unrolled: ranges.Count = 3  # drafting steps that training unrolls; not of blocks
  layers: ranges.Count = 1
  block: drafter_lib.Block | None = None

  @classmethod
  def of(cls, config: drafter_lib.DrafterConfig) -> "Drafter":
    """The sizes of a drafter, but for its head's vocabulary."""
    layers, features = config.layer.num_layers, max(len(config.taps), 1)
    return cls(features=features, layers=layers, block=config.block)


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds from bytes moved, FLOPs, kernels and all-reduces.

  A pass takes the longer of reading its bytes and computing its products, separately for
  weights and attention, plus its kernels' overhead and, where a slice has several devices,
  two all-reduces per layer. Nothing else overlaps.
  """

  model: config_lib.ModelConfig
  device: Device
  tensor: ranges.Count = 1  # devices of a slice
  drafter: Drafter = Drafter()
  weight_bytes: ranges.Positive = 2  # of a number in weights, caches and activations
  layer_kernels: ranges.Count = 10  # of a decoder layer
  step_kernels: ranges.Count = 10  # outside of the layers: sampling, bookkeeping
  host_s: ranges.NotNegative = 5e-3

  def step_s(self, bucket, arm, seen, alone=False) -> float:
    del alone
    if arm is None:
      return self.pass_s(bucket, seen)
    verified = self.pass_s(bucket * arm.verify, seen, per_row=arm.verify)
    if not strategy_lib.uses_drafter(arm):
      return verified  # lookup takes next to no time
    if self.drafter.block:
      return verified + self.block_s(bucket, seen, arm.verify - 1)
    first, later = (self.draft_s(bucket * n, seen) for n in (2, arm.width))
    return verified + first + (arm.depth - 1) * later

  def pass_s(self, tokens: float, seen: float, per_row: int = 1) -> float:
    """Seconds of a pass of the target over `tokens` of all rows.

    `seen` tokens are in their caches, which `per_row` tokens of a row read together.
    """
    m = self.model
    head = m.vocab_size * m.width
    read = m.num_layers * (self._attention + self._mlp(tokens)) + head
    weights = self._products_s(read, tokens, m.num_layers * self._layer + head)
    rows = tokens / per_row
    attention = sum(
      count * self._attention_s(min(seen, rows * window) if window else seen, per_row)
      for window, count in self._windows.items()
    )
    kernels = m.num_layers * self.layer_kernels + self.step_kernels
    logits = 2 * 4 * tokens * m.vocab_size / self.tensor / self._bandwidth
    around = kernels * self.device.launch_s + logits
    return weights + attention + around + m.num_layers * self._all_reduces_s(tokens)

  def draft_s(self, tokens: float, seen: float) -> float:
    weights = self._products_s(self.draft_weights, tokens)
    kernels = self.layer_kernels + self.step_kernels
    around = kernels * self.device.launch_s + self._all_reduces_s(tokens)
    return weights + self._attention_s(seen, 1) + around

  def block_s(self, rows: float, seen: float, guesses: int) -> float:
    """Seconds of a block's first guesses for so many rows.

    The head is read once, for all guesses; the context is that of two tokens a row.
    """
    block, layers = self.drafter.block.first(guesses), self.drafter.layers
    places = rows * block.size
    # Reading the context's projections again, after those of the block.
    weights = self._products_s(self._context_weights, 2 * rows)
    weights += self._products_s(layers * self._draft_layer, places)
    weights += self._products_s(self._draft_head, rows * min(guesses, block.guesses))
    seen = min(seen, rows * block.window) if block.window else seen
    attention = layers * self._attention_s(seen, block.size)
    kernels = layers * self.layer_kernels + self.step_kernels
    around = kernels * self.device.launch_s + layers * self._all_reduces_s(places)
    return weights + attention + around

  def prefill_s(self, tokens) -> float:
    return self.pass_s(tokens, tokens) if tokens else 0.0

  def fill_s(self, tokens) -> float:
    m = self.model
    read = self.drafter.features * m.width * self.weight_bytes * tokens
    weights = self._products_s(self._context_weights, tokens)
    return weights + read / self.tensor / self._bandwidth

  def micro_batch_s(self, tokens) -> float:
    d, judged = self.drafter, self.model.vocab_size * self.model.width
    if d.block:
      blocks = block_loss.num_anchors(d.block.size, tokens)
      products = self._context_weights * tokens
      products += d.layers * self._draft_layer * blocks * d.block.size
      guesses = blocks * d.block.guesses
      products, judged = products + self._draft_head * guesses, judged * guesses
    else:
      products, judged = d.unrolled * self.draft_weights * tokens, judged * tokens
    update_s = 7 * self._state / self._bandwidth  # reads four arrays, writes three
    # Forward, and twice backward; the target's own head judges.
    return self._compute_s(2 * (3 * products + judged)) + update_s + self.host_s

  def exchange_s(self, slices) -> float:
    moved = 2 * (slices - 1) / slices * 3 * self._state / self.device.link
    return moved + self.host_s

  def policy_update_s(self, tokens: float, slices: int, passes: float = 4.0) -> float:
    """In forward passes: 3 for the gradient, 1 for log-probabilities."""
    m = self.model
    weights = m.num_layers * self._layer + m.vocab_size * m.width
    return passes * self._compute_s(2 * weights * tokens) / slices

  def weight_sync_s(self) -> float:
    """Seconds in which every device of a rollout gets its part of new weights by its link.

    From wherever they are, once; reading and writing memory is hidden behind that.
    """
    m = self.model
    heads = (1 if m.tie_embeddings else 2) * m.vocab_size * m.width
    weights = m.num_layers * (self._attention + self._mlp(np.inf)) + heads
    return weights * self.weight_bytes / self.tensor / self.device.link

  @property
  def draft_weights(self) -> int:
    """Parameters of the drafter that a pass reads."""
    return self.drafter.layers * self._draft_layer + self._fused + self._draft_head

  @property
  def _draft_layer(self) -> int:
    m = self.model
    return self._attention + 3 * m.width * m.mlp_width  # without experts

  @property
  def _draft_head(self) -> int:
    return self.drafter.vocab_size * self.model.width

  @property
  def _fused(self) -> int:
    embedding = 0 if self.drafter.block else 1  # which is read with the features
    return (self.drafter.features + embedding) * self.model.width**2

  @property
  def _context_weights(self) -> int:
    """Parameters that map features to keys and values."""
    m = self.model
    keys_values = 2 * m.num_kv_heads * m.head_dim * m.width
    return self._fused + self.drafter.layers * keys_values

  @property
  def _state(self) -> float:
    """Bytes of the drafter's trained weights, on a device; each moment has as many."""
    frozen = self._draft_head if self.drafter.block else 0  # the target's
    return 4 * (self.draft_weights - frozen) / self.tensor

  @functools.cached_property
  def _windows(self) -> Mapping[int | None, int]:
    """How many layers have each window."""
    m = self.model
    return collections.Counter(m.layer_kind(i).window for i in range(m.num_layers))

  @property
  def _layer(self) -> float:
    """Parameters of a layer that compute a token."""
    return self._attention + self._mlp(1)

  @property
  def _attention(self) -> int:
    m = self.model
    heads = 2 * m.num_heads + 2 * m.num_kv_heads  # queries, outputs, keys, values
    return m.width * m.head_dim * heads

  def _mlp(self, tokens: float) -> float:
    """Parameters of an MLP that `tokens` read; experts are taken as chosen at random."""
    m, experts = self.model, self.model.experts
    if experts is None:
      return 3 * m.width * m.mlp_width
    unread = (1 - experts.per_token / experts.count) ** tokens
    router = experts.count * m.width
    return router + 3 * m.width * experts.width * experts.count * (1 - unread)

  @property
  def _bandwidth(self) -> float:
    return self.device.bandwidth * self.device.bandwidth_share

  def _compute_s(self, flops: float) -> float:
    return flops / self.tensor / (self.device.flops * self.device.flops_share)

  def _products_s(
    self, weights: float, tokens: float, per_token: float | None = None
  ) -> float:
    """Seconds of reading weights, of which each token uses `per_token`; None: all."""
    read_s = weights * self.weight_bytes / self.tensor / self._bandwidth
    used = weights if per_token is None else per_token
    return max(read_s, self._compute_s(2 * used * tokens))

  def _attention_s(self, seen: float, per_row: int) -> float:
    m = self.model
    read = 2 * m.num_kv_heads * m.head_dim * self.weight_bytes * seen
    flops = 4 * m.num_heads * m.head_dim * seen * per_row
    return max(read / self.tensor / self._bandwidth, self._compute_s(flops))

  def _all_reduces_s(self, tokens: float) -> float:
    if self.tensor == 1:
      return 0.0
    share = 2 * (self.tensor - 1) / self.tensor
    size = share * tokens * self.model.width * self.weight_bytes
    return 2 * (self.device.link_s + size / self.device.link)


@dataclasses.dataclass(frozen=True)
class Measured:
  """Seconds from the output of `benchmarks.rollout --only=steps`.

  Steps by strategy ("off": plain), live batch and cache length; the same of a slice that
  decodes alone, if measured; and the time to fill a drafter's caches. Linear in the
  logarithms between measurements; beyond them as the nearest one, so measure the largest
  buckets and lengths.
  """

  table: Mapping  # the last line of the benchmark
  micro_batch: ranges.NotNegative = 0.0  # seconds of a micro-batch
  prefill_token: ranges.NotNegative = 0.0  # seconds of a prompt's token
  host_s: ranges.NotNegative = 0.0
  exchange: ranges.NotNegative = 0.0  # seconds

  def __post_init__(self):
    if not self.table.get("steps"):
      raise ValueError(
        "no step times: give the last line of benchmarks.rollout --only=steps"
      )

  def step_s(self, bucket, arm, seen, alone=False) -> float:
    name = strategy_lib.name(arm)
    by_batch = {}
    for batch, row in self.table["steps"].items():
      ms = row.get("alone_ms", row["step_ms"]) if alone else row["step_ms"]
      by_batch[batch] = ms.get(name)
    found = _of_bucket(by_batch, bucket, seen / bucket)
    if found is None:
      raise ValueError(
        f"steps of {name} were not measured: give --strategies={name} to "
        "benchmarks.rollout --only=steps"
      )
    return found / 1e3

  def fill_s(self, tokens) -> float:
    return tokens * self.table.get("fill_token_s", 0.0)

  def prefill_s(self, tokens) -> float:
    return tokens * self.prefill_token

  def micro_batch_s(self, tokens) -> float:
    del tokens
    return self.micro_batch

  def exchange_s(self, slices) -> float:
    del slices
    return self.exchange


def _of_bucket(
  by_batch: Mapping[str, Mapping[str, float] | None], bucket: int, length: float
) -> float | None:
  """Interpolates by live batch and length; None: no value."""
  known = {
    int(b): _between({int(n): x for n, x in by_length.items()}, max(length, 1.0))
    for b, by_length in by_batch.items()
    if by_length
  }
  return _between(known, bucket) if known else None


def _between(known: Mapping[int, float], x: float) -> float:
  at = sorted(known)
  values = np.log([known[a] for a in at])
  return float(np.exp(np.interp(np.log(x), np.log(at), values)))
