"""Rollouts: requests in, responses out; `make` is where to begin."""

from tlt_jax.spec_decode.rollout.rollout import Options as Options
from tlt_jax.spec_decode.rollout.rollout import Rollout as Rollout
from tlt_jax.spec_decode.rollout.rollout import grid as grid
from tlt_jax.spec_decode.rollout.rollout import ladder as ladder
from tlt_jax.spec_decode.rollout.rollout import make as make
