"""Making an engine on real devices from a model, a drafter and options."""

import dataclasses
import functools
import logging

import jax

from tlt_jax import programs as pool_lib
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import tree_attention
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import chooser as chooser_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import devices as devices_lib
from tlt_jax.spec_decode.rollout import engine as engine_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib


def make(
  config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  options: options_lib.Options,
  drafter: engine_lib.Drafter | None = None,
  selector: selector_lib.Selector | None = None,
  pool: pool_lib.Pool | None = None,
) -> engine_lib.Engine:
  """An engine on real devices.

  Args:
    config: of the target
    mesh: its axis `data` counts the slices
    options: sizes
    drafter: for speculative decoding; without one n-grams can draft, or custom sources
    selector: how and when it drafts; None: plain decoding
    pool: of another engine of the same arguments, whose compiled programs this one shares
  Raises:
    ValueError: these do not go together
  """
  spot = None if drafter is None else drafter.spot
  shape = None if drafter is None else drafter.config
  shapes = backend_lib.Shapes.of(
    config, mesh, options, selector, shape, spot.options.chunk_tokens if spot else 0
  )
  _check_parts(shapes, selector, drafter, spot)
  if shapes.fits(1) and not shapes.exact:
    _log_once(_inexact(options, selector, shapes.most_rows))
  if pool is None:  # an empty one is false
    pool = pool_lib.Pool()
  sources = devices_lib.make_sources(selector, shapes, pool)
  devices = devices_lib.Devices(
    shapes,
    pool,
    sources,
    spot and spot.trainer,
  )
  return engine_lib.Engine(devices, selector, drafter, clock_lib.Clock())


@functools.cache
def _log_once(line: str) -> None:
  logging.info("%s", line)


def _inexact(options: options_lib.Options, selector, rows: int) -> str:
  """That some passes have too many rows to be exact, and what helps."""
  most, rows_of = few_rows.MOST, functools.partial(chooser_lib.most_rows, selector)
  fitting = [
    n for n in options.buckets if rows_of(dataclasses.replace(options, slots=n)) <= most
  ]
  nodes = max((s.verify for s in selector.strategies), default=1) if selector else 1
  slots = max(fitting, default=most // nodes)
  remedy = f"rollout.slots={slots}" if slots else f"strategies of at most {most} nodes"
  return (
    f"the largest passes have {rows} rows (slots times nodes of a strategy): in bfloat16 "
    f"those of more than {most} round by their size, so that a strategy or another batch "
    f"can change tokens; {remedy} keeps them the same, bit for bit"
  )


def _check_parts(shapes: backend_lib.Shapes, selector, drafter, spot) -> None:
  options, strategies = shapes.options, selector.strategies if selector else ()
  if implementations.choose(options.kernels) != "ref":
    tree_attention.check_page(options.page_tokens)
  options.page_sizes(shapes.room.behind)
  if drafter is not None and selector is None:
    raise ValueError(
      "there is a drafter, and no strategy that drafts: give strategies, as in 'up to 4 "
      "live: off or 3_1_4', or no drafter"
    )
  deepest = max((s.depth for s in strategies), default=0)
  if deepest + 1 > options.chunk:
    raise ValueError(
      f"rollout.chunk={options.chunk} has no room for a strategy of depth {deepest}; take "
      f"{deepest + 1} or more"
    )
  if spot is not None and spot.trainer.longest < options.max_length:
    raise ValueError(
      f"spot training needs positions for {options.max_length} tokens, not "
      f"{spot.trainer.longest}"
    )
