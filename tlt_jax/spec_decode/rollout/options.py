"""The sizes of a rollout: buckets of its programs, memory, chunks; and its kernels."""

from collections.abc import Iterable
import dataclasses
import itertools
from typing import Literal, NamedTuple

from tlt_jax import programs
from tlt_jax import ranges
from tlt_jax.pallas_kernels import implementations
from tlt_jax.spec_decode.decoding import pages as pages_lib


class Bucket(NamedTuple):
  """The shape of a compiled program, per slice."""

  batch: int  # slots
  length: int  # tokens that a step attends over


def grid(batches: Iterable[int], lengths: Iterable[int]) -> tuple[Bucket, ...]:
  """Buckets of every pair: more programs, and none larger than what runs needs."""
  return tuple(itertools.starmap(Bucket, itertools.product(batches, lengths)))


def ladder(slots: int, length: int, shortest: int = 128) -> tuple[Bucket, ...]:
  """Buckets of half the slots for twice the tokens, from `shortest` tokens up.

  Few programs. As requests end, those that still run get long; the KV takes about as
  much memory on every rung.
  """
  rungs, S = [], min(shortest, length)
  while S < length:
    rungs += [Bucket(slots, S), Bucket(slots, min(2 * S, length))]
    S, slots = min(2 * S, length), max(slots // 2, min(slots, 2))
  while slots > 2:
    rungs.append(Bucket(slots, S))
    slots //= 2
  return tuple(dict.fromkeys([*rungs, Bucket(slots, S)]))


@ranges.options
class Settings:
  """What does not follow from prompts, model and memory."""

  chunk: ranges.Count = ranges.field(
    64, "tokens per slot between two looks of the host (a chunk)"
  )
  cache_tokens: ranges.Large | None = ranges.field(
    None, "KV memory per slice, in tokens; None: for all slots at full length"
  )
  kv_page_tokens: ranges.Tokens | None = ranges.field(
    None,
    "KV in pages of so many tokens, that requests get as they grow; None: each slot has a "
    "row of the bucket's length, which is faster on a CPU",
  )
  budget: programs.Budget = ranges.field(
    programs.Budget(), "limits of what is compiled ahead"
  )
  rebalance: bool = ranges.field(
    False, "whether live requests move to slices with fewer of them"
  )
  deterministic: bool = ranges.field(
    False,
    "whether buckets, chunks, strategies and training follow from tokens alone, not from "
    "the time that anything takes: then runs are the same in bfloat16 too. "
    "budget.compile_s is no limit then",
  )
  kernels: Literal[implementations.NAMES] | None = ranges.field(
    None,
    "what attends, writes to caches and draws: 'pallas' on TPUs, 'triton' on NVIDIA GPUs, "
    "'ref' (XLA alone) or 'interpret' (as on TPUs, very slowly) anywhere; None: the "
    "fastest on this machine",
  )


@ranges.options
class Options(Settings):
  """Sizes of a rollout, and its kernels; none of them changes a token.

  Counts are per slice. The largest bucket is added if it is missing; buckets with more
  slots are dropped, longer ones are as long as it. Kept features have room for
  `cache_tokens` too, or, where that is None, for `slots` of the longest sequences.
  """

  max_length: ranges.Tokens = ranges.field(
    ..., "longest sequence, prompt included, in tokens"
  )
  max_prompt: ranges.Tokens = ranges.field(..., "longest prompt, in tokens")
  slots: ranges.Count = ranges.field(..., "requests that run at a time, per slice")
  buckets: tuple[tuple[ranges.Count, ranges.Tokens], ...] = ranges.field(
    (), "(slots, tokens) that programs are compiled for; (): only the largest"
  )
  prompt_rows: ranges.Count = ranges.field(
    8, "prompts per slice whose KV is kept at a time"
  )
  prefill_rows: ranges.Count = ranges.field(8, "prompts per slice and prefill call")
  prefill_block: ranges.Tokens = ranges.field(128, "tokens of each prompt per prefill call")
  chunk_s: ranges.Positive = ranges.field(2.0, "seconds that a chunk should last at most")
  memory_tokens: ranges.Large = ranges.field(
    2**20, "tokens of earlier responses kept for n-gram drafts"
  )
  memory_rows: ranges.Count = ranges.field(
    16, "earlier responses searched per slice and chunk"
  )
  features: bool = ranges.field(
    False, "whether the target's features are kept and returned"
  )

  def __post_init__(self):
    top = Bucket(self.slots, self.max_length)
    fitting = [bucket for bucket in self.buckets if bucket[0] <= top.batch]
    below = {Bucket(slots, min(tokens, top.length)) for slots, tokens in fitting}
    object.__setattr__(self, "buckets", tuple(sorted(below | {top}, key=_size)))
    if self.deterministic:  # which programs there are must not follow from seconds
      unlimited = dataclasses.replace(self.budget, compile_s=None)
      object.__setattr__(self, "budget", unlimited)
    if self.cache_tokens is not None and self.cache_tokens < self.max_length:
      raise ValueError(
        f"cache_tokens ({self.cache_tokens}) cannot hold one sequence of max_length "
        f"({self.max_length})"
      )
    if self.kv_page_tokens and self.rebalance:
      raise ValueError(
        "rebalance moves rows of KV between slices, and cannot move pages: set "
        "kv_page_tokens to None, or rebalance to False"
      )

  def allows(self, bucket: Bucket) -> bool:
    """Whether the memory budget has room for the KV of all its slots.

    KV in pages takes memory by the token, whatever the bucket.
    """
    budget = self.cache_tokens
    if budget is None or self.kv_page_tokens:
      return True
    return bucket.batch * bucket.length <= budget

  @property
  def page_sizes(self) -> pages_lib.Sizes:
    """Pages of features for whatever runs in a bucket that is allowed."""
    most = pages_lib.pages_for(self.max_length)
    pages, tokens = self.slots * most, self.cache_tokens
    if tokens is not None:
      if self.kv_page_tokens:  # requests share their prompts' KV, but not their features
        kv = self.kv_page_sizes(beyond=0)
        tokens = (kv.pages + 2) * kv.page + self.slots * self.max_prompt
      # Each slot's last page may be nearly empty.
      pages = min(pages, tokens // pages_lib.PAGE + self.slots)
    return pages_lib.Sizes(pages, most, pages_lib.PAGE)

  def kv_page_sizes(self, beyond: int) -> pages_lib.Sizes | None:
    """Pages of KV for the requests that may run, and for prompts; None: there are none.

    Args:
      beyond: tokens behind the longest sequence for which it has pages, too
    Raises:
      ValueError: there are fewer than a chunk takes in all slots
    """
    page = self.kv_page_tokens
    if page is None:
      return None
    pages_for = lambda tokens: pages_lib.pages_for(tokens, page)
    most = pages_for(self.max_length + beyond)
    pages = self.slots * most
    if self.cache_tokens is not None:
      pages = min(pages, max(self.cache_tokens // page, most))
    if pages < self.slots * pages_for(self.chunk + beyond):
      raise ValueError(
        f"cache_tokens ({self.cache_tokens}) in pages of kv_page_tokens ({page}) have no "
        f"room for a chunk of {self.chunk} tokens in each of {self.slots} slots; raise "
        "cache_tokens, or lower slots, chunk or kv_page_tokens"
      )
    # One more, for the copy of a prompt's last page.
    pages += 1 + self.prompt_rows * pages_for(self.max_prompt)
    return pages_lib.Sizes(pages, most, page)

  def steps_from(self, bucket: Bucket) -> list[Bucket]:
    """The next buckets with fewer slots or more tokens: none lies in between."""
    later = [b for b in self.buckets if b != bucket and _follows(b, bucket)]
    between = lambda b: any(c != b and _follows(b, c) for c in later)
    return [b for b in later if not between(b)]

  @property
  def edges(self) -> list[tuple[Bucket, Bucket]]:
    """Every resize that a draining rollout can need; none of KV in pages."""
    if self.kv_page_tokens:
      return []
    return [(a, b) for a in self.buckets for b in self.steps_from(a)]

  def path(self, start: Bucket, goal: Bucket) -> list[Bucket]:
    """Resizes that lead from one bucket to another, each of them a program.

    Fewer slots, more tokens: through the buckets between, so that few programs are
    enough. Anything else, which is rare, in one step. So is KV in pages, for which none
    is needed.
    """
    if self.kv_page_tokens:
      return [goal] if goal != start else []
    path = [start]
    while path[-1] != goal:
      steps = [b for b in self.steps_from(path[-1]) if _follows(goal, b)]
      path.append(min(steps, key=_size) if _follows(goal, path[-1]) else goal)
    return path[1:]


def _size(bucket: Bucket) -> tuple[int, int]:
  # Of as much KV, fewer slots take less time.
  return bucket.batch * bucket.length, bucket.batch


def _follows(b: Bucket, a: Bucket) -> bool:
  return b.batch <= a.batch and b.length >= a.length
