"""Rollouts: requests in, responses out; `make` makes an `Engine`."""

from tlt_jax.spec_decode.rollout.engine import Drafter as Drafter
from tlt_jax.spec_decode.rollout.engine import Engine as Engine
from tlt_jax.spec_decode.rollout.make import make as make
from tlt_jax.spec_decode.rollout.options import Options as Options
from tlt_jax.spec_decode.rollout.options import Settings as Settings
from tlt_jax.spec_decode.rollout.options import ladder as ladder
