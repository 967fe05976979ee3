"""The sizes of a rollout: slots, memory, chunks; and its kernels."""

from collections.abc import Collection
from typing import Literal

from tlt_jax import ranges
from tlt_jax.models import cache as cache_lib
from tlt_jax.pallas_kernels import implementations
from tlt_jax.spec_decode.decoding import pages as pages_lib


def ladder(slots: int, least: int = 2) -> tuple[int, ...]:
  """`slots`, and halves of it, down to `least`."""
  rungs = [slots]
  while rungs[-1] // 2 >= least:
    rungs.append(rungs[-1] // 2)
  return tuple(rungs)


@ranges.options
class Settings:
  chunk: ranges.Count = ranges.field(
    64, "tokens per slot between two looks of the host (a chunk)"
  )
  cache_tokens: ranges.Large | None = ranges.field(
    None,
    "memory of KV and features per slice, in tokens; None: for all slots at full length",
  )
  kernels: Literal[implementations.NAMES] | None = ranges.field(
    None,
    "what attends, in the learner too, writes to caches and draws: 'pallas' on TPUs, "
    "'triton' on NVIDIA GPUs, 'ref' (XLA alone) or 'interpret' (as on TPUs, very slowly) "
    "anywhere; None: the fastest on this machine",
  )


@ranges.options
class Options(Settings):
  """Sizes of a rollout per slice, and its kernels; none of them changes a token."""

  max_length: ranges.Tokens = ranges.field(
    ..., "longest sequence, prompt included, in tokens"
  )
  max_prompt: ranges.Tokens = ranges.field(..., "longest prompt, in tokens")
  slots: ranges.Count = ranges.field(..., "requests that run at a time, per slice")
  buckets: tuple[ranges.Count, ...] = ranges.field(
    (),
    "numbers of slots that programs are compiled for; the smallest that holds the live "
    "requests runs; (): `slots` alone",
  )
  prompt_rows: ranges.Count = ranges.field(
    8, "most prompts per slice that keep pages at a time"
  )
  prefill_rows: ranges.Count = ranges.field(8, "most prompts per slice and prefill call")
  prefill_block: ranges.Tokens = ranges.field(128, "tokens of each prompt per prefill call")
  chunk_s: ranges.Positive = ranges.field(2.0, "seconds that a chunk should last at most")
  page_tokens: ranges.Tokens = ranges.field(
    cache_lib.PAGE, "tokens of a page of KV and features, which requests get as they grow"
  )
  memory_tokens: ranges.Large = ranges.field(
    2**20, "tokens of earlier responses kept for n-gram drafts"
  )
  memory_rows: ranges.Count = ranges.field(
    16, "earlier responses searched per slice and chunk"
  )
  filters: bool = ranges.field(
    True, "whether requests may have top_k, top_p or min_p; without, programs are smaller"
  )
  features: bool = ranges.field(
    False, "whether the target's features are kept and returned"
  )

  def __post_init__(self):
    buckets = {self.slots, *(n for n in self.buckets if n < self.slots)}
    object.__setattr__(self, "buckets", tuple(sorted(buckets)))
    prompt_rows = min(self.prompt_rows, self.slots)
    object.__setattr__(self, "prompt_rows", prompt_rows)
    object.__setattr__(self, "prefill_rows", min(self.prefill_rows, prompt_rows))
    if self.cache_tokens is not None and self.cache_tokens < self.max_length:
      raise ValueError(
        f"rollout.cache_tokens={self.cache_tokens} cannot hold one sequence of "
        f"{self.max_length} tokens (rollout.max_prompt + sampling.max_tokens)"
      )

  def bucket(self, live: int, without: Collection[int] = ()) -> int | None:
    """The smallest bucket for `live` requests, else the widest; None: none is left."""
    left = [n for n in self.buckets if n not in without]
    return min((n for n in left if n >= live), default=max(left, default=None))

  def page_sizes(
    self, beyond: int, window: int | None = None, chunk: int = 0
  ) -> pages_lib.Sizes:
    """Pages for requests (with `beyond` tokens behind each) and prompts.

    Args:
      window: widest of the model's layers; None: no layer has one
      chunk: most tokens that a request draws in a chunk, if more than `chunk` of this

    Raises:
      ValueError: there are fewer than a chunk takes in all slots
    """

    def pages_for(tokens):
      return pages_lib.pages_for(tokens, self.page_tokens)

    most = pages_for(self.max_length + beyond)
    pages = self.slots * most
    if self.cache_tokens is not None:
      pages = min(pages, max(self.cache_tokens // self.page_tokens, most))
    if pages < self.slots * pages_for(self.chunk + beyond):
      raise ValueError(
        f"rollout.cache_tokens={self.cache_tokens} in pages of rollout.page_tokens="
        f"{self.page_tokens} have no room for rollout.chunk={self.chunk} tokens in each of "
        f"rollout.slots={self.slots}; raise the first, or lower another"
      )
    # One more, for the copy of a prompt's last page.
    pages += 1 + self.prompt_rows * pages_for(self.max_prompt)
    sizes = pages_lib.Sizes(pages, most, self.page_tokens)
    if window is None:
      return sizes
    # A program overwrites as much before a row's first token of it attends. No page that is
    # in its window may be among those; it begins anywhere in one.
    written = max(self.chunk + beyond, chunk + beyond, self.prefill_block)
    ring = pages_for(window + written) + 1
    near = min(pages, (self.slots + self.prompt_rows) * ring)
    return sizes._replace(ring=ring, near=near)
