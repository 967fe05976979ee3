"""The device programs of a rollout but its chunks, and the shapes that they take."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import prompts
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The arrays of a rollout on the devices, as shapes and shardings."""

  config: config_lib.ModelConfig
  mesh: jax.sharding.Mesh
  options: options_lib.Options
  layout: features_lib.Layout | None  # of the features that are kept
  room: strategy_lib.Room

  @classmethod
  def of(
    cls,
    config: config_lib.ModelConfig,
    mesh: jax.sharding.Mesh,
    options: options_lib.Options,
    drafter: drafter_lib.DrafterConfig | None,
    strategies: Sequence[strategy_lib.Strategy],
    train: bool,
  ) -> "Shapes":
    """The arrays of a rollout; training the drafter takes further features."""
    layout = features_lib.Layout(config.width) if options.features else None
    if drafter is not None:
      layout = features_lib.of_drafter(drafter, train)
    return cls(config, mesh, options, layout, strategy_lib.Room.of(strategies))

  @property
  def slices(self) -> int:
    return self.mesh.shape[axes.DATA]

  @functools.cached_property
  def pages(self) -> pages_lib.Sizes:
    return self.options.page_sizes(self.room.behind)

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
    )

  def prompts(self) -> tuple:
    """The arguments of a prefill after the parameters; see `prompts.make_prefill`."""
    rows, sizes = self.options.prefill_rows, self.pages
    kv = slots_lib.abstract_kv(self.mesh, self.config, rows, sizes)
    features = slots_lib.abstract_features(self.mesh, self.config, self.layout, sizes)
    tokens = self.rows(rows, self.prefill_block)
    return kv.pools, features, kv.pages, tokens, self.rows(rows)

  def rows(self, count: int, *shape: int) -> jax.ShapeDtypeStruct:
    """Integers, `count` rows a slice."""
    return slices.abstract(self.mesh, count, np.int32, *shape)

  @property
  def prefill_block(self) -> int:
    """Tokens of a prompt that are computed at a time."""
    return min(self.options.prefill_block, self.options.max_prompt)


class Programs:
  """Runs device programs by name; each is compiled once per bucket."""

  def __init__(
    self, shapes: Shapes, pool: programs.Pool, trainer: trainer_lib.Trainer | None
  ):
    self.shapes, self.pool = shapes, pool
    config, mesh, layout = shapes.config, shapes.mesh, shapes.layout
    kernels = shapes.options.kernels
    over = slots_lib.slots_shardings(mesh, config, layout, kernels)
    self._jitted = {
      "prefill": prompts.make_prefill(config, mesh, layout, kernels),
      "copy": pages_lib.make_copy(mesh, over.kv.pools, over.features),
    }
    if trainer is not None:
      self._jitted |= {
        "train": trainer.make_train(),
        "exchange": trainer.make_exchange(),
        "store": rows_lib.make_store(mesh, layout.size),
      }

  def run(self, name: str, key: tuple, *args, **static):
    """Runs a program other than a chunk.

    Args:
      name: "prefill" (see `prompts`), "copy" (`pages`), "train", "exchange" (`trainer`),
        "store" (`rows`)
      key: of the bucket
    """
    return self.pool.run(name, key, self._jitted[name], *args, **static)

  def compile(self, name: str, key: tuple, *args, **static) -> None:
    """Compiles what `run` runs for arguments of these shapes."""
    self.pool.get(name, key, self._jitted[name], *args, **static)
