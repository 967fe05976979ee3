"""A rollout: what answers requests, again and again."""

import jax
import numpy as np

from tlt_jax import memory
from tlt_jax import programs as pool_lib
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import loop
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import parts as parts_lib
from tlt_jax.spec_decode.rollout import ready
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


class Rollout:
  """Draws the responses to requests; `make` puts one together.

  Call `compile`, then `measure`, before the first rollout; else programs are compiled
  when a bucket is first used, and strategies are learnt from nothing.
  """

  def __init__(self, parts: parts_lib.Parts):
    """Takes its parts."""
    self.parts = parts
    # What was asked for; from `compile` on, the buckets that are ready.
    self.options: options_lib.Options = parts.shapes.options
    self._ready = ready.Ready(parts)
    self._announced = False  # whether the log tells what is allocated

  def __call__(
    self,
    params,
    requests: requests_lib.Requests,
    draft_params=None,
    train: bool = False,
    decide: clock_lib.Decisions | None = None,
    ask: samples_lib.Ask | None = None,
    watch: samples_lib.Watch | None = None,
    score: samples_lib.Score | None = None,
  ) -> samples_lib.Samples:
    """Runs all requests to their end.

    A bucket whose program runs out of memory is not used again by this rollout;
    its requests start over in smaller ones, and draw the same tokens.

    Args:
      params: the target's, laid out by `axes.ROLLOUT`
      draft_params: the drafter's, if there is one; None: with spot training those that
        it trains
      train: whether idle slices train the drafter (see `spot`)
      decide: to follow the `Samples.decisions` of an earlier rollout, whose drafter was
        trained the same
      ask: says at the start and after every chunk how many of the prompts, from the
        first on, are asked by now; None: all. Responses to the others stay empty
      watch: called after every chunk with the samples so far, and the requests that ended
        in it; where memory ran out, a response may be shorter than it was
      score: called with the samples once all is drawn; begins to score them, and returns
        what says whether that continues: the drafter trains meanwhile
    Raises:
      RequestError: a request does not fit the options
      MemoryError: not even the smallest bucket fits
      processes.Stopped: the job was asked to stop
      ValueError: the decisions to follow are of another rollout; or what trains is
        missing, or given twice
    """
    self._check(requests, draft_params, train)
    self._announce(requests.stop_tokens.shape[1])
    return loop.Loop(
      self.parts,
      self.options,
      params,
      draft_params,
      requests,
      train=train,
      decide=decide or clock_lib.Decisions(),
      ask=ask,
      watch=watch,
      score=score,
    ).run()

  def compile(self, params, stop_tokens: int, draft_params=None) -> None:
    """Compiles every program that a rollout of these options can need, ahead of time.

    Buckets for which the budget is too small are left out; larger ones serve. Programs
    that speculate in the others are beyond it.

    Args:
      params: the target's, or their shapes and shardings; draft_params likewise
      stop_tokens: per request (the second dimension of `Requests.stop_tokens`)
    """
    weights = self.parts.weights(params, draft_params)
    self._announce(stop_tokens)
    what = f"the rollout's programs (buckets: {len(self.options.buckets)})"
    memory.announce_programs(what, inputs=(params, draft_params))
    self.options = self._ready.compile(weights, stop_tokens, self.options)

  def measure(self, params, stop_tokens: int, draft_params=None) -> None:
    """Times the steps of strategies, if the selector wants to know; see `compile`."""
    weights = self.parts.weights(params, draft_params)
    self._ready.measure(weights, stop_tokens, self.options)

  def time_step(
    self,
    params,
    bucket: int,
    draft_params=None,
    strategy: strategy_lib.Strategy | None = None,
    stop_tokens: int = 1,
    slices: int | None = None,
    length: int | None = None,
  ) -> float:
    """Seconds of a step with all slots of a bucket live; see `Ready.time_step`.

    Args:
      params, draft_params: of the target and of the drafter
      bucket: slots per slice, and tokens of the cache
      strategy: None: plain decoding
      stop_tokens: per request
      slices: how many decode, while the others have nothing to do; None: all
    """
    weights = self.parts.weights(params, draft_params)
    return self._ready.time_step(weights, bucket, strategy, stop_tokens, slices, length)

  def time_switch(
    self,
    params,
    bucket: int,
    draft_params,
    strategy: strategy_lib.Strategy,
    stop_tokens: int = 1,
  ) -> float:
    """Seconds per token of a slice that it takes to switch a strategy on.

    Args:
      params, bucket, draft_params, strategy, stop_tokens: as for `time_step`
    """
    weights = self.parts.weights(params, draft_params)
    return self._ready.time_switch(weights, bucket, strategy, stop_tokens)

  @property
  def config(self) -> config_lib.ModelConfig:
    """The target's shape."""
    return self.parts.shapes.config

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The devices."""
    return self.parts.shapes.mesh

  @property
  def pool(self) -> pool_lib.Pool:
    """The compiled programs."""
    return self.parts.programs.pool

  @property
  def selector(self) -> selector_lib.Selector | None:
    """The selector, if it speculates."""
    return self.parts.drafting.selector

  def state(self) -> dict:
    """Its knowledge of strategies and machine, for a checkpoint; JSON can hold it."""
    return {
      "selector": self.selector.state() if self.selector else {},
      "sources": {n: s.state() for n, s in self.parts.drafting.sources.items()},
      "micro_batch_s": self.parts.clock.micro_batch_s,
      "exchange_s": self.parts.clock.exchange_s,
    }

  def restore(self, state: dict | None, same_drafter: bool = True) -> None:
    """Continues from what `state` gave; None, of a run that kept none: learns again.

    Args:
      state: of `state`
      same_drafter: whether it knows this drafter; of another, what strategies are worth
        and what a micro-batch takes are learnt again
    """
    if state is None:
      return
    if self.selector:
      self.selector.restore(state["selector"] if same_drafter else None)
    for name, source in self.parts.drafting.sources.items():
      if name in state["sources"]:
        source.restore(state["sources"][name])
    self.parts.clock.micro_batch_s = state["micro_batch_s"] if same_drafter else 0.0
    self.parts.clock.exchange_s = state["exchange_s"]

  def _announce(self, stop_tokens: int) -> None:
    """Logs, once, what a rollout allocates at most."""
    if self._announced:
      return
    self._announced = True
    memory.announce(
      "KV cache and kept features",
      self.parts.shapes.slots(self.options.slots, stop_tokens),
      smaller="rollout.slots, rollout.cache_tokens, sampling.max_tokens",
    )

  def _check(self, requests: requests_lib.Requests, draft_params, train: bool) -> None:
    """Raises for what cannot be run."""
    if train and self.parts.spot is None:
      raise ValueError("this rollout has no spot training; see `rollout.make`")
    if train and draft_params is not None:
      raise ValueError(
        "spot training has the drafter's parameters: start it from these, and give none "
        "to a rollout that trains"
      )
    o = self.options
    for i, prompt in enumerate(requests.prompts):
      if len(prompt) > o.max_prompt:
        raise requests_lib.RequestError(
          f"prompt {i} has {len(prompt)} tokens, the rollout takes at most "
          f"{o.max_prompt}; raise max_prompt or drop the prompt"
        )
    over = np.flatnonzero(requests.total_length > o.max_length)
    if len(over):
      i = int(over[0])
      raise requests_lib.RequestError(
        f"prompt {requests.prompt_idx[i]} and its response need "
        f"{requests.total_length[i]} tokens, the KV cache holds {o.max_length}; "
        "raise max_length or lower the response limit"
      )
