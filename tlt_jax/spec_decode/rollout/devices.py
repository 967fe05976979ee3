"""The devices of a rollout: the programs, and the arrays of the running requests.

Pages of KV and features outlive slots: where the number of slots changes, only tables and
small arrays do. The shapes of a program depend on its bucket, never on lengths.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import prompts as prompts_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices as slices_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.spot import fused
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


def make_sources(
  selector: selector_lib.Selector | None,
  shapes: backend_lib.Shapes,
  pool: pool_lib.Pool,
) -> dict[str, source_lib.Source]:
  """The sources of drafts of all strategies of a selector, by name.

  Args:
    pool: for programs of their own
  """
  strategies = selector.strategies if selector else ()
  sources = {}
  for name in dict.fromkeys(s.source for s in strategies):
    setting = source_lib.Setting(
      config=shapes.config,
      mesh=shapes.mesh,
      pool=pool,
      room=shapes.room,
      strategies=tuple(s for s in strategies if s.source == name),
      pages=shapes.pages,
      drafter=shapes.drafter,
      layout=shapes.layout,
      memory_tokens=shapes.options.memory_tokens,
      memory_rows=shapes.options.memory_rows,
      kernels=shapes.options.kernels,
      fill_rows=shapes.options.prefill_rows,
      fill_block=shapes.prefill_block,
    )
    sources[name] = source_lib.make(name, setting)
  return sources


def _of_target(weights: chunk_lib.Weights) -> chunk_lib.Weights:
  return weights.replace(draft=None, draft_rotations=None)


class Devices:
  """Runs programs on a mesh: the `Backend` of real rollouts."""

  def __init__(
    self,
    shapes: backend_lib.Shapes,
    pool: pool_lib.Pool,
    sources: dict[str, source_lib.Source],
    trainer: trainer_lib.Trainer | None,
  ):
    """Compiles nothing yet.

    Args:
      trainer: of the drafter; None: nothing trains
    """
    self.shapes, self.pool, self.sources = shapes, pool, sources
    self._trainer = trainer
    self._running: running_lib.Running | None = None
    self._slots: slots_lib.Slots | None = None
    self._spare: tuple | None = None  # pools and features while there are no slots
    self._chunks: dict[str, Callable] = {}  # jitted, by name
    self._has_announced = False

  # Programs.

  @functools.cached_property
  def _over(self) -> slots_lib.Slots:
    """The shardings of slots."""
    s, options = self.shapes, self.shapes.options
    return slots_lib.slots_shardings(
      s.mesh, s.config, s.layout, options.kernels, options.filters
    )

  @functools.cached_property
  def _jitted(self) -> dict[str, Callable]:
    """The programs that serve every bucket, by name."""
    s, trainer = self.shapes, self._trainer
    kernels = s.options.kernels
    made = {
      "prefill": prompts_lib.make_prefill(
        s.config, s.mesh, s.layout, kernels, few_rows=s.exact
      ),
      "copy": pages_lib.make_copy(
        s.mesh, self._over.kv.pools, self._over.features, s.config.windowed
      ),
    }
    if trainer is not None:
      made["train"] = trainer.make_train()
      made["exchange"] = trainer.make_exchange()
      made["store"] = rows_lib.make_store(s.mesh, s.layout.size)
    return made

  def _call(self, name: str, *args):
    return self.pool.run(name, (), self._jitted[name], *args)

  def shared_programs(
    self, weights: chunk_lib.Weights, spot: spot_lib.Spot | None
  ) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """What compiles the programs that serve every bucket: at the start, and later."""
    shapes, slots = self.shapes, self.shapes.options.slots
    pools, features, *prompts = shapes.prefill_args()
    args = {
      "prefill": (_of_target(weights), pools, features, *prompts),
      "copy": (pools, features, *(shapes.rows(slots),) * 2 * len(shapes.pages.kinds)),
    }
    if spot is not None:
      most = spot.most_pieces(slots, shapes.options.max_length)
      pieces = shapes.rows(most, 4 + shapes.pages.most)
      args |= {
        "train": (weights.target, spot.training(most=1)),
        "exchange": (spot.training(most=0).states, shapes.rows(1)),
        "store": (spot.features, features, pieces, shapes.rows(1)),
      }
    args = pool_lib.shapes(args)
    made = {
      name: functools.partial(self.pool.get, name, (), self._jitted[name], *x)
      for name, x in args.items()
    }
    first = {name: made.pop(name) for name in ("prefill", "copy")}
    return first, made

  def compile_chunk(
    self,
    weights: chunk_lib.Weights,
    bucket: int,
    arm: clock_lib.Arm,
    stops: int,
    training: trainer_lib.Training | None,
  ) -> Callable[[trainer_lib.Training | None], None]:
    """Compiles the chunk of a strategy in a bucket; what is returned tries it once.

    Args:
      weights: or their shapes
      stops: stop tokens per request
      training: see `run`
    """
    slots, weights = self.shapes.slots(bucket, stops), self._read(weights, arm)
    source, one, state = self._source(arm), np.int32(1), None
    limits = chunk_lib.Limits(one)
    if source is not None:
      state = source.ready(weights, slots)
      limits = chunk_lib.Limits(one, one, one)
    args = weights, slots, state, limits, training
    self._chunk(arm, (bucket, stops), *args)

    def run_once(training):
      empty = slices_lib.zeros((slots, state))
      args = weights, *empty, limits, training
      jax.block_until_ready(self._chunk(arm, (bucket, stops), *args)())

    return run_once

  def _chunk(
    self,
    arm: clock_lib.Arm,
    key: tuple[int, int],
    weights: chunk_lib.Weights,
    slots: slots_lib.Slots,
    state: Any,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> Callable[[], chunk_lib.Done]:
    """A compiled chunk, with its arguments; see `decoding.chunk`."""
    source, trains = self._source(arm), training is not None
    name = "chunk" if source is None else f"speculate_{source.program(arm)}"
    name += "+training" if trains else ""
    if name not in self._chunks:
      self._chunks[name] = self._make_chunk(arm, source, trains)
    args = weights, slots, state, limits, training
    program = self.pool.get(name, key, self._chunks[name], *args)
    return functools.partial(program, *args)

  def _make_chunk(self, arm, source, trains: bool) -> Callable:
    s, kernels = self.shapes, self.shapes.options.kernels
    if source is None:
      run = decode.decode(s.config, s.chunk_tokens, s.layout)
      shardings = chunk_lib.Done(self._over, None, None)
    else:
      run = speculate.decode(source, arm, s.chunk_tokens)
      shardings = chunk_lib.Done(self._over, source.state_shardings, None)
    if trains:
      return fused.make(self._trainer, run, shardings, kernels)
    run = chunk_lib.without_training(run)
    return chunk_lib.make(s.mesh, run, shardings, kernels=kernels)

  def _read(self, weights: chunk_lib.Weights, arm: clock_lib.Arm) -> chunk_lib.Weights:
    """Those that a chunk of a strategy reads."""
    source = self._source(arm)
    reads = source is not None and source.reads_drafter
    return weights if reads else _of_target(weights)

  def _source(self, arm: clock_lib.Arm) -> source_lib.Source | None:
    return None if arm is None else self.sources[arm.source]

  # The requests of a rollout.

  def samples(self, requests: requests_lib.Requests) -> samples_lib.Samples:
    most = self.shapes.room.longest if self.sources else None
    made = samples_lib.empty(requests, most=most, features=self.shapes.options.features)
    return dataclasses.replace(made, exact=self.shapes.exact)

  def begin(self, running: running_lib.Running) -> None:
    self._running = running

  def free(self) -> None:
    self._slots = self._spare = None
    for source in self.sources.values():
      source.reset()

  def weights(self, target: Any, draft: Any) -> chunk_lib.Weights:
    exist = isinstance(jax.tree.leaves(target)[0], jax.Array)
    tables = self._rotations if exist else self._make_rotations(abstract=True)
    return chunk_lib.Weights(target, draft, *tables)

  @functools.cached_property
  def _rotations(self) -> list[layers.Rotation | None]:
    return self._make_rotations(abstract=False)

  def _make_rotations(self, abstract: bool) -> list[layers.Rotation | None]:
    """Those of the target, and of the drafter if there is one."""
    s, make = self.shapes, functools.partial(chunk_lib.rotations, abstract=abstract)
    models = s.config, s.drafter and s.drafter.layer
    return [model and make(model, s.mesh, s.pages.length) for model in models]

  def compute(self, weights: chunk_lib.Weights, work: running_lib.Work) -> None:
    weights = _of_target(weights)
    pools, features = self._take_arrays()
    for *tables, tokens, start in self._blocks(work):
      *tables, tokens, start = map(self._place, (*tables, tokens, start))
      tables = (*tables, None)[:2]
      pools, features = self._call(
        "prefill", weights, pools, features, tables, tokens, start
      )
    # As many as there are slots at most, whatever the bucket: one program.
    shape = self.shapes.slices, self.shapes.options.slots
    sinks = np.repeat([kind.sink for kind in self.shapes.pages.kinds], 2)
    pages = np.array([np.full(shape, sink, np.int32) for sink in sinks])
    for s, of_slice in enumerate(work.copies):
      pages[:, s, : len(of_slice)] = np.array(of_slice).reshape(-1, len(sinks)).T
    self._spare = self._call("copy", pools, features, *map(self._place, pages))

  def place(self, moved: bool) -> None:
    if moved:
      self._slots = self._make_slots(*self._take_arrays())
    else:
      self._slots = self._slots.replace(kv=self._kv(self._slots.kv.pools))

  def run(
    self,
    weights: chunk_lib.Weights,
    arm: clock_lib.Arm,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> backend_lib.ChunkResult:
    running, source, state = self._running, self._source(arm), None
    weights = self._read(weights, arm)
    if source is not None:
      state = source.prepare(weights, self._slots, running.progress())
    key = running.bucket, running.requests.stop_tokens.shape[1]
    program = self._chunk(arm, key, weights, self._slots, state, limits, training)
    # Compiling, and what was queued before, is not timed.
    jax.block_until_ready((self._slots, state, weights.draft, training))
    began = time.perf_counter()
    done = program()
    self._slots = done.slots
    slice_s, stop = processes.agree(slices_lib.ready_s(done.emitted.steps, began))
    trained_totals = done.training and done.training.totals
    emitted, totals = processes.gather((done.emitted, trained_totals))
    trained = done.training and self._trainer.account(done.training.states, totals)
    if source is not None:
      source.release(done.draft_state, running.known_after(emitted))
    return backend_lib.ChunkResult(emitted, trained, slice_s, stop)

  def finished(self, prompt: np.ndarray, response: np.ndarray) -> None:
    for source in self.sources.values():
      source.finished(prompt, response)

  def features_of(self, request: int) -> np.ndarray:
    known = int(self._running.position[request])
    page, at = self._running.pages.where(request, known)
    return processes.fetch(self._slots.features[page, at])[:known]

  def store(self, spot: spot_lib.Spot, pieces: np.ndarray, count: np.ndarray) -> None:
    placed = self._place(pieces), self._place(count)
    rows = self._call("store", spot.features, self._slots.features, *placed)
    spot.take_features(rows)

  def train(self, params: Any, training: trainer_lib.Training) -> trainer_lib.Account:
    trained = self._call("train", params, training)
    return self._trainer.account(trained.states, processes.gather(trained.totals))

  def exchange(self, states: Any, updates: Any) -> tuple[Any, Any]:
    return self._call("exchange", states, updates)

  def peak_bytes(self) -> int:
    return pool_lib.live_bytes() + self.pool.temp_bytes

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
    options = self.shapes.options
    tokens = np.int32(options.chunk)
    limits = chunk_lib.Limits(tokens)
    if arm is not None:  # as many as there is room for, whatever is accepted
      steps = max(options.chunk // (arm.depth + 1), 1)
      limits = chunk_lib.Limits(tokens, np.int32(steps), np.int32(arm.depth))
    try:
      self._fill_slots(bucket, stops, slices, length)
      result = self.run(weights, arm, limits, training)
    finally:
      self.free()
    return result.seconds / max(result.steps, 1)

  def time_fill(
    self, weights: chunk_lib.Weights, bucket: int, arm: clock_lib.Arm, stops: int = 1
  ) -> float:
    """Seconds per token of a slice to switch a strategy on, as in `time_step`."""
    self._fill_slots(bucket, stops)
    progress, source = self._running.progress(), self._source(arm)

    def fill() -> float:
      began = time.perf_counter()
      jax.block_until_ready(source.prepare(weights, self._slots, progress))
      source.reset()
      return time.perf_counter() - began

    fill()  # compiling is not timed
    seconds, tokens = fill(), sum(len(request.tokens) for request in progress[0])
    self.free()
    return seconds / tokens

  def _fill_slots(
    self, bucket: int, stops: int, slices: int | None = None, length: int | None = None
  ) -> None:
    """Makes all slots of a bucket live; see `time_step`."""
    options, pages, room = self.shapes.options, self.shapes.pages, self.shapes.room
    most = min(pages.pages // bucket * pages.page - room.behind, options.max_length - 1)
    length = min(length or max(options.max_length // 4, options.chunk + 1), most)
    B = bucket * self.shapes.slices
    requests = requests_lib.make_requests(
      [[1]] * B,
      max_tokens=options.max_length - 1,
      stop_tokens=np.full((B, stops), -1, np.int32),
    )
    free, samples = self.shapes.free_pages(), self.samples(requests)
    running = running_lib.Running(requests, free, samples)
    running.drawn[:] = max(length - options.chunk, 0)
    running.seat_all(bucket, slices)
    running.take_pages(options.chunk)
    self.begin(running)
    self.place(moved=True)

  def state(self) -> dict:
    return {name: source.state() for name, source in self.sources.items()}

  def restore(self, state: dict) -> None:
    for name, source in self.sources.items():
      if name in state:
        source.restore(state[name])

  # Arrays.

  def announce(self, stops: int) -> None:
    """Logs, once, what a rollout allocates at most."""
    if not self._has_announced:
      self._has_announced = True
      memory.announce(
        "KV cache and kept features",
        self.shapes.slots(self.shapes.options.slots, stops),
        smaller="rollout.slots, rollout.cache_tokens, sampling.max_tokens",
      )

  def _take_arrays(self) -> tuple[tuple[cache_lib.Pool, ...], jax.Array | None]:
    """Gives up the slots: the pools and features that others will have."""
    if self._slots is not None:
      self._spare = self._slots.kv.pools, self._slots.features
    elif self._spare is None:
      self.announce(self._running.requests.stop_tokens.shape[1])
      self._spare = slices_lib.zeros(self.shapes.prefill_args()[:2])
    arrays, self._slots, self._spare = self._spare, None, None
    return arrays

  def _blocks(self, work: running_lib.Work) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of prompts as a prefill takes them: tables, tokens, and where they begin."""
    width, block = self.shapes.options.prefill_rows, self.shapes.prefill_block
    sizes = self.shapes.pages
    for rows in work.calls(width, block):
      shape = len(rows), width
      tables = [np.full((*shape, sizes.most), k.sink, np.int32) for k in sizes.kinds]
      tokens, start = np.zeros((*shape, block), np.int32), np.zeros(shape, np.int32)
      for s, of_slice in enumerate(rows):
        for j, row in enumerate(of_slice):
          if row is None:
            continue
          prompt, start[s, j] = row
          part = prompt.tokens[start[s, j] : start[s, j] + block]
          tokens[s, j, : len(part)] = part
          for table, own in zip(tables, prompt.tables, strict=True):
            table[s, j] = own
      yield *tables, tokens, start

  def _kv(self, pools: tuple[cache_lib.Pool, ...]) -> cache_lib.KVCache:
    running, s = self._running, self.shapes
    near = running.pages.near
    tables = [p and self._place(p.table(running.owner)) for p in (running.pages, near)]
    pages, near = tables
    return cache_lib.KVCache(pools, pages, s.options.kernels, near, s.config.windowed)

  def _make_slots(self, pools, features) -> slots_lib.Slots:
    """The slots of who has one."""
    running, r = self._running, self._running.requests
    free = running.owner < 0

    def rows(x):
      return self._place(x[np.where(free, 0, running.owner)])

    def numbers(x):
      return self._place(np.where(free, 0, x[running.owner]).astype(np.int32))

    names = [f.name for f in dataclasses.fields(sampling_lib.Sampling)]
    sampling = sampling_lib.Sampling(**{name: getattr(r, name) for name in names})
    if not self.shapes.options.filters:
      sampling = sampling.without_filters()
    return slots_lib.Slots(
      pending=rows(running.pending),
      position=numbers(running.position),
      remaining=numbers(r.max_tokens - running.drawn),
      stop_tokens=rows(r.stop_tokens),
      sampling=jax.tree.map(rows, sampling),
      kv=self._kv(pools),
      features=features,
    )

  def _place(self, x: np.ndarray) -> jax.Array:
    return slices_lib.place(self.shapes.mesh, x)
