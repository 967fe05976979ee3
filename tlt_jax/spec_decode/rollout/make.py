"""Making a rollout from a model, a drafter and options."""

import jax

from tlt_jax import programs as pool_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import tree_attention
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import drafting as drafting_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import parts as parts_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import rollout
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib


def make(
  config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  options: options_lib.Options,
  drafter: drafter_lib.DrafterConfig | None = None,
  selector: selector_lib.Selector | None = None,
  spot: spot_lib.Spot | None = None,
  pool: pool_lib.Pool | None = None,
) -> rollout.Rollout:
  """A rollout function `(params, requests, draft_params) -> samples`.

  Programs are compiled by its `compile`, or when a bucket is first used.

  Args:
    config: of the target
    mesh: its axis `data` counts the slices
    options: sizes
    drafter, selector: for speculative decoding: what drafts, and how and when. Without
      a drafter n-grams can, or custom sources.
    spot: what trains the drafter meanwhile; its parameters are the drafter's where none
      are given
    pool: of another rollout of the same arguments, whose compiled programs this one shares
  Raises:
    ValueError: these do not go together
  """
  strategies = selector.strategies if selector is not None else ()
  _check(options, strategies, drafter, selector, spot)
  shapes = programs_lib.Shapes.of(
    config, mesh, options, drafter, strategies, train=spot is not None
  )
  if pool is None:  # an empty one is false
    pool = pool_lib.Pool(options.budget)
  trainer = spot and spot.trainer
  programs = programs_lib.Programs(shapes, pool, trainer)
  longest_chunk = max(options.chunk, spot.options.chunk_tokens if spot else 0)
  chunks = chunks_lib.Chunks(shapes, pool, trainer, tokens=longest_chunk)
  sources = drafting_lib.make_sources(selector, shapes, pool, drafter)
  drafting = drafting_lib.Drafting(selector, sources, clock_lib.Clock())
  return rollout.Rollout(parts_lib.Parts(programs, chunks, drafting, spot))


def _check(options, strategies, drafter, selector, spot) -> None:
  impl = implementations.choose(options.kernels)
  if impl != "ref":
    tree_attention.check_page(options.page_tokens)
  options.page_sizes(strategy_lib.Room.of(strategies).behind)
  if drafter is not None and selector is None:
    raise ValueError("a drafter needs a selector that says when it drafts")
  deepest = max((s.depth for s in strategies), default=0)
  if deepest + 1 > options.chunk:
    raise ValueError(
      f"a chunk of {options.chunk} tokens has no room for a strategy of depth {deepest}"
    )
  if spot is not None and (drafter is None or spot.trainer.longest < options.max_length):
    raise ValueError(
      f"spot training needs a drafter, and positions for {options.max_length} tokens"
    )
