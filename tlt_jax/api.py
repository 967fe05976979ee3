"""The stable Python API: load a policy and a drafter, draw responses.

    policy = api.load("DIR/policy", "DIR/drafter", max_prompt=512, max_tokens=1024)
    requests = api.make_requests(prompts, responses=8, max_tokens=1024, seed=step)
    samples = policy.rollout(policy.params, requests)

`rollout` takes any parameters of the policy's shape: a trainer passes its own after
`policy.place(params)`, and those of the drafter after `place_drafter`. Nothing is compiled
again when they change. The tokens are a function of parameters and requests, not of the
drafter. What takes longer than ten seconds, such as compiling, is logged (`logging`, INFO).

Stable are the names and meanings in this file; `Requests`, and of `Samples` the fields
`tokens`, `length`, `logp`, `logp_filtered` and `finish_reason`, `response` and
`mean_acceptance_length`. They change with a new major version only; all else may change at
any time.
"""

from collections.abc import Sequence
import dataclasses
import functools
import inspect
import logging
import pathlib
from typing import Any

import jax

from tlt_jax import axes
from tlt_jax import named
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

Requests, Samples = requests_lib.Requests, samples_lib.Samples
make_requests = requests_lib.make_requests  # prompts as token ids -> Requests


@dataclasses.dataclass(frozen=True)
class Policy:
  config: config_lib.ModelConfig
  mesh: jax.sharding.Mesh
  params: dict  # nested, as `rollout` takes them
  folder: pathlib.Path  # it was read from
  drafter: drafter_lib.DrafterConfig | None
  draft_params: dict | None
  engine: rollout_lib.Engine  # not stable

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
      params: of `place`
      requests: of `make_requests`, within the lengths given to `load`
      draft_params: of `place_drafter`; None: those that were loaded
    Raises:
      RequestError: a request is too long
    """
    if self.engine.drafter is not None:
      given = draft_params is not None
      self.engine.drafter.params = draft_params if given else self.draft_params
    return self.engine(params, requests)

  def place(self, params: dict) -> dict:
    """Copies a trainer's parameters to the devices and dtypes of `Policy.params`.

    The trainer may donate its own to the next update.

    Args:
      params: nested as `Policy.params`, of any dtype, on any devices
    """
    return jax.tree.map(_copy_like, params, self.params)

  def place_drafter(self, draft_params: dict) -> dict:
    """As `place`, for a drafter's parameters, nested as `Policy.draft_params`.

    Raises:
      ValueError: no drafter was loaded
    """
    if self.draft_params is None:
      raise ValueError("place_drafter: there is no drafter; give one to `load`")
    return jax.tree.map(_copy_like, draft_params, self.draft_params)


def _copy_like(x: jax.Array, like: jax.Array) -> jax.Array:
  return jax.device_put(x.astype(like.dtype), like.sharding, may_alias=False)


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
    policy: Hugging Face folder of an architecture in `models.families`
    drafter: folder of `experiments.train_drafter`, of `experiments.export`, or a published
      EAGLE-2 or EAGLE-3 one; None: n-grams draft
    max_prompt, max_tokens: tokens of the longest prompt and response
    slots: responses drawn at a time, per slice
    strategies: how to decode by live requests per slice, as "up to 8 live: off or 3_1_4";
      "" for plain decoding; None: the fastest of a built-in choice
    tensor_parallel: devices that share one copy of the policy
    devices: None: all. Several CPU devices need the jax option
      `jax_cpu_enable_async_dispatch` off, or can deadlock
    dtype: of parameters and computation; None: config.json's
    options: further sizes, see `rollout.Options`; none of them changes a token
  Raises:
    ValueError: an invalid folder or option; names the cause and the remedy
  """
  _check_options(options)
  mesh = axes.make_mesh(tensor_parallel, devices)
  _warn_of_queues(mesh)
  stored = hf.load_config(policy)
  stored.check_split(tensor_parallel)
  dtype = dtype or stored.dtype
  config, params = hf.load(policy, mesh, axes.ROLLOUT, dtype)
  config = dataclasses.replace(config, dtype=dtype)
  draft, draft_params = None, None
  if drafter is not None:
    draft, draft_params = drafter_files.load(drafter, config, mesh)
  if strategies is None:
    strategies = levels.automatic(draft)
  selector = selector_lib.make(strategies, "predictive", draft is not None)
  frozen = spot_lib.Frozen(draft, draft_params) if draft and selector else None
  engine = rollout_lib.make(
    config,
    mesh,
    rollout_lib.Options(
      max_length=max_prompt + max_tokens, max_prompt=max_prompt, slots=slots, **options
    ),
    drafter=frozen,
    selector=selector,
  )
  return Policy(config, mesh, params, pathlib.Path(policy), draft, draft_params, engine)


def _check_options(options: dict[str, Any]) -> None:
  sizes = {field.name for field in dataclasses.fields(rollout_lib.Options)}
  sizes -= {"max_length", "features"}  # follow from others
  known = sizes | inspect.signature(load).parameters.keys() - {"options"}
  for name in options:
    if name not in known:
      raise ValueError(f"load takes no {name!r:.60}" + named.nearest(name, known))


def _warn_of_queues(mesh: jax.sharding.Mesh) -> None:
  cpus = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
  if cpus and jax.config.values["jax_cpu_enable_async_dispatch"]:
    logging.warning(
      "several CPU devices can deadlock with programs queued ahead: before anything "
      "touches a device, jax.config.update('jax_cpu_enable_async_dispatch', False)"
    )
