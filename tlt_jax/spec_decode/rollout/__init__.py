"""Rollouts: requests in, responses out; `make` is where to begin, `loop` tells the rest."""

from tlt_jax.spec_decode.rollout.make import make as make
from tlt_jax.spec_decode.rollout.options import Options as Options
from tlt_jax.spec_decode.rollout.options import Settings as Settings
from tlt_jax.spec_decode.rollout.options import ladder as ladder
from tlt_jax.spec_decode.rollout.rollout import Rollout as Rollout
