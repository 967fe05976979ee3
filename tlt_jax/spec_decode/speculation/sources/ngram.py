"""Drafts by lookup of n-grams: see `ngram`."""

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.speculation import ngram
from tlt_jax.spec_decode.speculation import source as source_lib


class NGram(source_lib.Source):
  def __init__(self, setting: source_lib.Setting):
    super().__init__(setting)
    if trees := [s for s in setting.strategies if s.width > 1]:
      raise ValueError(f"{trees[0]}: n-grams draft chains only")
    self.memory = ngram.Memory(setting.memory_tokens)
    rows = axes.sharding(setting.mesh, axes.DATA)
    self.state_shardings = ngram.Corpus(rows, rows, rows)

  def ready(self, weights, slots):
    own = slots.pending.shape[0] // self.setting.mesh.shape[axes.DATA]
    rows = own + self.setting.memory_rows
    row = slices.abstract(self.setting.mesh, rows, jnp.int32)
    tokens = slices.abstract(self.setting.mesh, rows, jnp.int32, slots.length)
    return ngram.Corpus(tokens, row, row)

  def prepare(self, weights, slots, running):
    corpora = [self._corpus(row, slots.length) for row in running]
    stacked = jax.tree.map(lambda *x: np.stack(x), *corpora)
    return jax.tree.map(lambda x: slices.place(self.setting.mesh, x), stacked)

  def _corpus(self, row, length: int) -> ngram.Corpus:
    prompts = {r.prompt_idx: r.prompt for r in row if r is not None}
    nothing = (-1, np.zeros(0, np.int32))
    own = [nothing if r is None else (r.prompt_idx, r.tokens) for r in row]
    others = self.memory.rows_for(prompts, self.setting.memory_rows, length)
    mine = ngram.make_rows(own, len(own), length)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), mine, others)

  def bind(self, strategy, weights, length):
    def propose(slots, state, depth):
      tree = ngram.propose(state, slots.pending, depth, strategy.verify)
      return source_lib.Proposal(tree, state)

    def absorb(state, output):
      return ngram.append(state, output.tokens, output.count)

    return propose, absorb

  def finished(self, prompt, response):
    self.memory.add(prompt, response)

  def state(self):
    return self.memory.state()

  def restore(self, state):
    self.memory.restore(state)


def make(setting: source_lib.Setting) -> NGram:
  return NGram(setting)
