"""The Python API that stays: load a policy and a drafter, answer requests.

    policy = api.load("DIR/policy", "DIR/drafter", max_prompt=512, max_tokens=1024)
    requests = api.make_requests(prompts, responses=8, max_tokens=1024, seed=step)
    samples = policy.rollout(policy.params, requests)

`rollout` takes any parameters of the policy's shape, so that a trainer hands in its own:
`policy.place(params)` lays them out. Nothing is compiled again when they change. The
tokens that are drawn are a function of parameters and requests, not of the drafter.

Stable are the names and meanings in this file; `Requests`, and of `Samples` the fields
`tokens`, `length`, `logp`, `logp_filtered` and `finish_reason`, `response` and
`mean_acceptance_length`. They change with a new major version only. All else may change
whenever it must.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels

Requests, Samples = requests_lib.Requests, samples_lib.Samples
make_requests = requests_lib.make_requests  # prompts as token ids -> Requests


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy on its devices, with what draws from it; see `load`."""

  config: config_lib.ModelConfig
  mesh: jax.sharding.Mesh
  params: dict  # nested, as `rollout` takes them
  folder: pathlib.Path  # that it was read from
  drafter: drafter_lib.DrafterConfig | None
  draft_params: dict | None
  rollouts: rollout_lib.Rollout  # behind `rollout`; not part of what is stable

  @functools.cached_property
  def tokenizer(self) -> tokenization.Tokenizer:
    """The tokenizer of its folder: `encode`, `decode`, `stop_tokens`.

    Raises:
      data.DataError: the folder has none
    """
    return tokenization.Tokenizer.load(self.folder)

  def rollout(
    self, params: dict, requests: Requests, draft_params: dict | None = None
  ) -> Samples:
    """Draws a response to each request.

    Args:
      params: of the policy, as `place` lays them out
      requests: of `make_requests`; no longer than `load` was told
      draft_params: of the drafter; None: those that were loaded
    Raises:
      RequestError: a request is too long
    """
    draft_params = self.draft_params if draft_params is None else draft_params
    return self.rollouts(params, requests, draft_params)

  def place(self, params: dict) -> dict:
    """Lays a trainer's parameters out for `rollout`: a copy, in the dtype of `params`.

    Args:
      params: nested as `Policy.params`, of any layout and dtype
    """
    return self._copy(params)

  @functools.cached_property
  def _copy(self) -> Callable[[dict], dict]:
    """A program: a trainer may donate what it hands in to its next update."""
    layout = axes.shardings(self.mesh, axes.ROLLOUT, target.abstract_params(self.config))
    dtypes = jax.tree.map(lambda x: x.dtype, self.params)
    copy = lambda x, dtype: jnp.copy(x.astype(dtype))
    return jax.jit(lambda tree: jax.tree.map(copy, tree, dtypes), out_shardings=layout)


def load(
  policy: str | pathlib.Path,
  drafter: str | pathlib.Path | None = None,
  *,
  max_prompt: int,
  max_tokens: int,
  slots: int = 16,
  strategies: str | None = None,
  tensor_parallel: int = 1,
  devices: Sequence[jax.Device] | None = None,
  dtype: str | None = None,
  **options: Any,
) -> Policy:
  """Loads a policy, and a drafter if there is one.

  Args:
    policy: Hugging Face folder of Qwen2/2.5, Qwen3 or Llama 3.x
    drafter: folder of `experiments.train_drafter`, of `experiments.export`, or a published
      EAGLE-2 or EAGLE-3 one; None: n-grams draft
    max_prompt, max_tokens: tokens of the longest prompt and response
    slots: responses that are drawn at a time, per slice
    strategies: how to decode by live requests per slice, as "up to 8 live: off or 3_1_4";
      "" for plain decoding; None: a choice, of which the fastest is used
    tensor_parallel: devices that share one copy of the policy
    devices: None: all that there are
    dtype: of parameters and computation; None: that of config.json
    options: further sizes, see `rollout.Options`; none of them changes a token
  Raises:
    ValueError: a folder or an option that cannot be; names the cause and the remedy
  """
  mesh = axes.make_mesh(tensor_parallel, devices)
  dtype = dtype or convert.load_config(policy).dtype
  config, params = convert.load_hf(policy, mesh, axes.ROLLOUT, dtype)
  config = dataclasses.replace(config, dtype=dtype)
  draft, draft_params = None, None
  if drafter is not None:
    draft, draft_params = drafter_files.load(drafter, config, mesh)
  if strategies is None:
    strategies = levels.automatic(has_drafter=draft is not None)
  selector = levels.make(strategies, "predictive", draft is not None)
  sizes = dict(max_length=max_prompt + max_tokens, max_prompt=max_prompt, slots=slots)
  rollouts = rollout_lib.make(
    config,
    mesh,
    rollout_lib.Options(**sizes, **options),
    drafter=draft if selector else None,
    selector=selector,
  )
  return Policy(config, mesh, params, pathlib.Path(policy), draft, draft_params, rollouts)
