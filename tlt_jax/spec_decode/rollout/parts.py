"""The parts of a rollout that outlive a single call."""

import dataclasses

from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import drafting as drafting_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.spot import spot as spot_lib


@dataclasses.dataclass(frozen=True)
class Parts:
  """The programs on the devices, the sources of drafts, and the drafter's training."""

  programs: programs_lib.Programs
  chunks: chunks_lib.Chunks
  drafting: drafting_lib.Drafting
  spot: spot_lib.Spot | None

  @property
  def shapes(self) -> programs_lib.Shapes:
    return self.programs.shapes

  @property
  def clock(self) -> clock_lib.Clock:
    return self.drafting.clock

  def batch(self, requests: requests_lib.Requests) -> batch_lib.Batch:
    """A batch without slots yet."""
    return batch_lib.Batch(self.programs, requests)

  def weights(self, params, draft_params) -> chunk_lib.Weights:
    """All weights; the drafter's are the trainer's, where none are given."""
    if self.spot is not None and draft_params is None:
      draft_params = self.spot.params
    return chunk_lib.Weights(params, draft_params)

  def trains(self, bucket: int) -> bool:
    """Whether slices that run dry in chunks of a bucket train."""
    return self.spot is not None and bucket > 0 and self.spot.trains_in(bucket)
