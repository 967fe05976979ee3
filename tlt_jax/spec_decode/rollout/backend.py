"""What the loop of a rollout asks of the devices.

`Backend` is implemented twice: by `devices`, which runs programs, and by `simulate`, where
they only take time. A backend runs one rollout at a time; who sits in which slot is up to
the host (`running`), and the backend follows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import few_rows
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import chooser as chooser_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The arrays of a rollout on the devices, as shapes and shardings."""

  config: config_lib.ModelConfig
  mesh: jax.sharding.Mesh
  options: options_lib.Options
  layout: features_lib.Layout | None  # of the features that are kept
  room: strategy_lib.Room
  most_rows: int  # of a pass that draws tokens
  drafter: drafter_lib.DrafterConfig | None = None
  training_chunk: int = 0  # most tokens per slot in a chunk that also trains; 0: none does

  @classmethod
  def of(
    cls,
    config: config_lib.ModelConfig,
    mesh: jax.sharding.Mesh,
    options: options_lib.Options,
    selector: selector_lib.Selector | None,
    drafter: drafter_lib.DrafterConfig | None,
    training_chunk: int,
  ) -> "Shapes":
    """Training the drafter takes further features."""
    layout = features_lib.Layout(config.width) if options.features else None
    if drafter is not None:
      layout = features_lib.of_drafter(drafter, train=training_chunk > 0)
    strategies = selector.strategies if selector is not None else ()
    block = drafter.block.size if drafter is not None and drafter.block else 0
    room = strategy_lib.Room.of(strategies, block)
    most_rows = chooser_lib.most_rows(selector, options)
    return cls(config, mesh, options, layout, room, most_rows, drafter, training_chunk)

  def fits(self, rows: int) -> bool:
    """Whether passes of so many rows run by `models.few_rows`."""
    kv = self.slots(bucket=1, stops=1).kv
    with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
      return few_rows.fits(self.config, kv, rows)

  @functools.cached_property
  def exact(self) -> bool:
    """Whether tokens have the same bits in whatever batch, strategy or engine.

    Then all passes run by `models.few_rows`, those of prompts, too.
    """
    return self.fits(self.most_rows)

  @property
  def slices(self) -> int:
    return self.mesh.shape[axes.DATA]

  @functools.cached_property
  def pages(self) -> pages_lib.Sizes:
    kinds = (self.config.layer_kind(i) for i in range(self.config.num_layers))
    window = max((kind.window for kind in kinds if kind.window), default=None)
    return self.options.page_sizes(self.room.behind, window, self.chunk_tokens)

  @property
  def chunk_tokens(self) -> int:
    """Most that a slot may draw in a chunk."""
    return max(self.options.chunk, self.training_chunk)

  def free_pages(self) -> pages_lib.Pages:
    """The pages of a rollout before any is taken."""
    return pages_lib.Pages(self.slices, self.pages, self.room.behind)

  def slots(self, bucket: int, stops: int) -> slots_lib.Slots:
    """Slots of a bucket, for `stops` stop tokens per request."""
    return slots_lib.abstract_slots(
      self.mesh,
      self.config,
      batch=bucket,
      stops=stops,
      layout=self.layout,
      sizes=self.pages,
      kernels=self.options.kernels,
      filters=self.options.filters,
    )

  def prefill_args(self) -> tuple:
    """The arguments of a prefill after the weights; see `prompts.make_prefill`."""
    rows, sizes = self.options.prefill_rows, self.pages
    kv = slots_lib.abstract_kv(self.mesh, self.config, rows, sizes)
    features = slots_lib.abstract_features(self.mesh, self.config, self.layout, sizes)
    tokens = self.rows(rows, self.prefill_block)
    return kv.pools, features, (kv.pages, kv.near), tokens, self.rows(rows)

  def rows(self, count: int, *shape: int) -> jax.ShapeDtypeStruct:
    """Integers, `count` rows a slice."""
    return slices.abstract(self.mesh, count, np.int32, *shape)

  @property
  def prefill_block(self) -> int:
    """Tokens of a prompt that are computed at a time."""
    return min(self.options.prefill_block, self.options.max_prompt)


class ChunkResult(NamedTuple):
  """The result of a chunk."""

  emitted: slots_lib.Emitted  # on the host
  trained: trainer_lib.Account | None
  slice_s: np.ndarray  # f[slices]  seconds until each had decoded, and trained
  stop: bool = False  # whether the job was asked to stop meanwhile

  @property
  def seconds(self) -> float:
    """Until the last slice was done."""
    return float(self.slice_s.max())

  @property
  def steps(self) -> int:
    """Iterations of the busiest slice."""
    return int(self.emitted.steps.max())

  @property
  def tokens(self) -> int:
    """Tokens that all slots drew."""
    return int(self.emitted.count.sum())

  @property
  def accepted(self) -> list[int]:
    """Passes that drew more than 0, 1, ... tokens; none without speculation."""
    by_slice = self.emitted.accepted
    return [] if by_slice is None else by_slice.sum(0).tolist()

  @property
  def passes(self) -> int:
    """Passes of the target over a live request; each gives a token, or more if drafted."""
    return self.accepted[0] if self.accepted else self.tokens


class Backend(Protocol):
  """The devices of a rollout."""

  shapes: Shapes

  def samples(self, requests: requests_lib.Requests) -> samples_lib.Samples:
    """Empty samples, for what will be drawn."""

  def begin(self, running: running_lib.Running) -> None:
    """Begins a rollout, and from here on reads `running`."""

  def free(self) -> None:
    """Frees everything that requests have on the devices."""

  def weights(self, target: Any, draft: Any) -> chunk_lib.Weights:
    """All that chunks read of models with these parameters; of shapes, shapes."""

  def compute(self, weights: chunk_lib.Weights, work: running_lib.Work) -> None:
    """Computes prompts into their pages, and copies pages, with the target's weights."""

  def place(self, moved: bool) -> None:
    """Gives the devices the pages of `running`; where requests moved, the slots, too."""

  def run(
    self,
    weights: chunk_lib.Weights,
    arm: clock_lib.Arm,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> ChunkResult:
    """Runs a chunk.

    Args:
      arm: how it decodes
      training: for slices that become idle; None: the program does not train
    """

  def finished(self, prompt: np.ndarray, response: np.ndarray) -> None:
    """Lets sources of drafts learn from a finished request, i32[...] each."""

  def features_of(self, request: int) -> np.ndarray:
    """The features of a request that has just ended, f[prompt + length - 1, E]."""

  def store(self, spot: spot_lib.Spot, pieces: np.ndarray, count: np.ndarray) -> None:
    """Adds features of requests that have just ended to the drafter's training rows.

    Args:
      pieces, count: see `spot.rows.make_store`
    """

  def train(self, params: Any, training: trainer_lib.Training) -> trainer_lib.Account:
    """Trains the drafter on all slices, outside of a chunk."""

  def exchange(self, states: Any, updates: Any) -> tuple[Any, Any]:
    """Lets slices exchange what they have learnt; see `Trainer.make_exchange`."""

  def peak_bytes(self) -> int:
    """Bytes in use on a device, scratch memory of the largest program included."""

  def time_step(
    self,
    weights: chunk_lib.Weights,
    bucket: int,
    arm: clock_lib.Arm,
    stops: int,
    training: trainer_lib.Training | None,
    slices: int | None = None,
    length: int | None = None,
  ) -> float:
    """Seconds of a step, over a chunk with all slots of a bucket live, none ending.

    Args:
      stops: stop tokens per request
      slices: how many decode, while the others have nothing to do; None: all
      length: tokens of each request; None: a quarter of the longest, as far as there
        are pages
    """

  def state(self) -> dict:
    """What sources of drafts have learnt, as JSON for a checkpoint."""

  def restore(self, state: dict) -> None:
    """Continues from a `state`."""
