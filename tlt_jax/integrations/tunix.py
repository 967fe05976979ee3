"""A rollout engine for google-tunix: lossless speculation in its runs of RL.

    from tlt_jax.integrations import tunix as tlt

    engine = functools.partial(tlt.Rollout, drafter="DIR/drafter")
    ClusterConfig(rollout_engine=engine, ...)  # in place of "vanilla"

`Rollout` runs on the devices of tunix's rollout mesh and receives the actor's parameters
after every step of the learner. With `spot` the drafter trains during rollouts. Tokens
depend on parameters, prompts, the seed and the number of responses sampled before. See
docs/tunix.md.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import axes
from tlt_jax import processes
from tlt_jax.integrations import tunix_params
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import target
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

try:
  from tunix.rl.rollout import base_rollout
except ImportError as e:
  raise ImportError(
    "tlt_jax.integrations.tunix needs tunix 0.1.7: pip install google-tunix==0.1.7, in a "
    f"separate environment because of its many dependencies ({e})"
  ) from e


class Rollout(base_rollout.BaseRollout):
  def __init__(
    self,
    rollout_actor: nnx.Module,
    tokenizer: Any,
    mesh: jax.sharding.Mesh,
    rollout_config: base_rollout.RolloutConfig,
    *,
    drafter: str | pathlib.Path | None = None,
    strategies: str | None = None,
    spot: spot_lib.Options | None = None,
    spot_loss: loss_lib.Loss | None = None,
    spot_optimizer: optax.GradientTransformation | None = None,
    slots: int = 16,
    tensor_parallel: int = 1,
    max_prompt: int | None = None,
    max_tokens: int | None = None,
    **options: Any,
  ):
    """Makes the engine; tunix passes the first four arguments.

    Args:
      drafter: folder of a drafter, or "eagle2" or "eagle3" for a new one, which needs
        `spot`; None: n-grams
      strategies: see `levels`; "" for plain decoding; None: automatic
      spot: how the drafter trains during rollouts; None: it is frozen
      slots: concurrent responses per slice
      tensor_parallel: devices per copy of the policy
      max_prompt, max_tokens: longest prompt and response, in tokens, if evaluations need
        more than `rollout_config`
      options: see `rollout.Options`
    Raises:
      ValueError: incompatible arguments
    """
    dtype = rollout_config.data_type and jnp.dtype(rollout_config.data_type).name
    self._config = tunix_params.model_config(rollout_actor, dtype)
    self._mesh = axes.make_mesh(tensor_parallel, list(mesh.devices.flat))
    self._tokenizer, self._rollout_config = tokenizer, rollout_config
    max_prompt = max_prompt or rollout_config.max_prompt_length
    length = max_prompt + (max_tokens or rollout_config.max_tokens_to_generate)
    lengths = dict(max_length=length, max_prompt=max_prompt)
    sizes = rollout_lib.Options(slots=slots, **lengths, **options)
    self._params = self._place(nnx.state(rollout_actor, nnx.Param))
    self._drafter = _load_drafter(
      drafter, self._config, self._mesh, trains=spot is not None
    )
    selector = self._selector(strategies, spot)
    if spot is not None:
      trainer = self._trainer(spot, spot_loss, spot_optimizer, length)
      self._drafter = spot_lib.Spot(trainer, spot, self._drafter.params)
    self._trains = spot is not None
    drafting = (self._drafter, selector) if selector else ()
    self._engine = rollout_lib.make(self._config, self._mesh, sizes, *drafting)
    self._drawn = 0  # responses so far, which offsets the noise
    self.samples: samples_lib.Samples | None = None  # of the latest call, for metrics

  def prepare(self) -> None:
    """Compiles all programs and times the strategies ahead of their first use."""
    stop_tokens = len(self._stop_tokens(self._rollout_config)) + 1
    self._engine.compile(self._params, stop_tokens)
    self._engine.measure(self._params, stop_tokens)

  def generate(
    self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
  ) -> base_rollout.RolloutOutput:
    """Samples a response to each prompt.

    A response keeps its stop token, as in tunix's vLLM engine, so that the policy is
    trained to stop. A sampled pad token also ends a response, and is removed: the learner
    could not distinguish it from padding. Equal consecutive prompts share their prefill.

    Raises:
      ValueError: a prompt is too long, or an option is not supported
    """
    first = [i for i, p in enumerate(prompts) if not i or p != prompts[i - 1]]
    prompt_idx = np.searchsorted(first, np.arange(len(prompts)), side="right") - 1
    tokens = [self._encode(prompts[i]) for i in first]
    ends = self._stop_tokens(rollout_config)
    padded = _left_padded(tokens, rollout_config.max_prompt_length, self.pad_id())
    self._check_room(tokens, rollout_config.max_tokens_to_generate)
    requests = requests_lib.make_requests(
      [tokens[i] for i in prompt_idx],
      first_request=self._drawn,
      stop_tokens=ends,
      **_sampling(rollout_config),
    )
    requests = dataclasses.replace(
      requests, prompts=tokens, prompt_idx=prompt_idx.astype(np.int32)
    )
    samples = self._engine(self._params, requests, train=self._trains)
    self.samples, self._drawn = samples, self._drawn + len(prompts)
    kept = [_before(samples.response(i), [self.pad_id()]) for i in range(len(prompts))]
    logp = [samples.logp[i, : len(x)] for i, x in enumerate(kept)]
    return base_rollout.RolloutOutput(
      text=[self._tokenizer.decode(_before(x, ends).tolist()) for x in kept],
      logits=[],
      tokens=kept,
      left_padded_prompt_tokens=padded[prompt_idx],
      logprobs=logp if rollout_config.return_logprobs else None,
    )

  def get_per_token_logps(
    self, prompt_tokens: jax.Array, completion_tokens: jax.Array
  ) -> jax.Array:
    """Log-probabilities f32[B C] at the temperature of training, undefined at padding.

    Prompts i32[B P] are padded on the left, completions i32[B C] on the right.
    """
    even = prompt_tokens.shape[0] % self._mesh.shape[axes.DATA] == 0
    rows = axes.sharding(self._mesh, axes.DATA if even else None)
    tokens = processes.fetch((prompt_tokens, completion_tokens))
    logp = self._score(self._params, *(processes.place(x, rows) for x in tokens))
    return jnp.asarray(processes.fetch(logp))  # on the learner's devices

  @functools.cached_property
  def _score(self) -> Callable:
    model, pad = target.Target(self._config), self.pad_id()
    temperature = self._rollout_config.temperature or 1.0

    def score(params, prompts, completions):
      tokens = jnp.concatenate([prompts, completions], 1)
      real, T = tokens != pad, tokens.shape[1]
      positions = jnp.maximum(jnp.cumsum(real, 1) - 1, 0)
      seen = jnp.tril(jnp.ones((T, T), bool)) & real[:, None, :]
      features, _ = model.apply({"params": params}, tokens, positions, seen)
      before = features[:, prompts.shape[1] - 1 : -1]
      logits = model.apply({"params": params}, before, method=target.Target.logits)
      logp = jax.nn.log_softmax(logits / temperature)
      return jnp.take_along_axis(logp, completions[..., None], -1)[..., 0]

    return jax.jit(score)

  def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
    self._params = self._place(params)

  def _place(self, params: Any) -> dict:
    mine = tunix_params.from_tunix(self._config, params)

    def copy(x, sharding):
      return jax.device_put(x.astype(self._config.dtype), sharding, may_alias=False)

    # CPU devices exchange arrays through the host, which tunix's transfer guard forbids.
    with jax.transfer_guard("allow"):
      return jax.tree.map(copy, mine, self._shardings)

  @functools.cached_property
  def _shardings(self) -> dict:
    abstract = target.abstract_params(self._config)
    return axes.shardings(self._mesh, axes.ROLLOUT, abstract)

  def pad_id(self) -> int:
    return self._tokenizer.pad_id()

  def eos_id(self) -> int:
    return self._tokenizer.eos_id()

  def model(self) -> None:
    """None makes tunix call `update_params`."""

  def save_drafter(self, folder: str | pathlib.Path) -> None:
    """Writes the current drafter, for another run or for serving."""
    if self._drafter is None:
      raise ValueError("no drafter to save: give Rollout one, as drafter='eagle2'")
    drafter_files.save(folder, self._drafter.config, self._drafter.params)

  def _selector(
    self, strategies: str | None, spot: spot_lib.Options | None
  ) -> selector_lib.Selector | None:
    has_drafter = self._drafter is not None
    if strategies is None:
      strategies = levels.automatic(self._drafter.config if has_drafter else None)
    selector = selector_lib.make(strategies, "predictive", has_drafter)
    if spot is not None and not (has_drafter and selector):
      raise ValueError(
        "spot training needs a drafter in use: give drafter='eagle2' or a folder, and "
        "strategies that are not empty"
      )
    return selector

  def _trainer(
    self,
    options: spot_lib.Options,
    loss: loss_lib.Loss | None,
    rule: optax.GradientTransformation | None,
    longest: int,
  ) -> trainer_lib.Trainer:
    return spot_lib.make_trainer(
      self._config,
      self._drafter.config,
      self._mesh,
      optimizer=rule or optimizer.make("adamw", 3e-4, b2=0.99),
      longest=longest,
      loss=loss or loss_lib.Loss(temperature=self._rollout_config.temperature or 1.0),
      options=options,
    )

  def _stop_tokens(self, config: base_rollout.RolloutConfig) -> list[int]:
    if not config.eos_tokens and self.eos_id() is None:
      raise ValueError("the tokenizer has no eos token: set RolloutConfig.eos_tokens")
    return [*(config.eos_tokens or [self.eos_id()]), self.pad_id()]

  def _check_room(self, prompts: Sequence[np.ndarray], max_tokens: int) -> None:
    sizes, longest = self._engine.options, max(map(len, prompts))
    if longest > sizes.max_prompt or longest + max_tokens > sizes.max_length:
      raise ValueError(
        f"the engine was made for prompts of {sizes.max_prompt} tokens and responses of "
        f"{sizes.max_length - sizes.max_prompt}, not of {longest} and {max_tokens}: give "
        "it the larger sizes, as functools.partial(Rollout, max_prompt=..., max_tokens=...)"
      )

  def _encode(self, prompt: str) -> np.ndarray:
    start = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
    tokens = self._tokenizer.dedup_bos_ids(start + list(self._tokenizer.encode(prompt)))
    return np.asarray(tokens, np.int32)


def _load_drafter(
  name: str | pathlib.Path | None,
  config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  trains: bool,
) -> spot_lib.Frozen | None:
  if name is None:
    return None
  if not drafters.is_kind(str(name)):
    return spot_lib.Frozen(*drafter_files.load(name, config, mesh))
  if not trains:
    raise ValueError(
      f"drafter={name!r} has random parameters: add spot=spot.Options() to train it, or "
      "give the folder of a trained one"
    )
  drafter = drafter_lib.of_target(config, str(name))
  return spot_lib.Frozen(drafter, drafter_lib.new_params(drafter, mesh, seed=0))


def _sampling(config: base_rollout.RolloutConfig) -> dict[str, Any]:
  """Arguments of `make_requests`; raises ValueError where tunix's engines differ."""
  if config.top_p is None and config.temperature:
    raise ValueError(
      "top_p=None is greedy in tunix's vanilla engine and unfiltered in its others: set "
      "temperature=0 or top_p=1.0"
    )
  seed = 0 if config.seed is None else config.seed
  if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
    seed = jax.random.key_data(seed)
  words = np.atleast_1d(np.asarray(seed)).astype(np.uint32)  # a key has several
  return {
    "max_tokens": config.max_tokens_to_generate,
    "seed": np.bitwise_xor.reduce(words),
    "temperature": config.temperature,
    "top_k": max(config.top_k or 0, 0),
    "top_p": 1.0 if config.top_p is None else config.top_p,
  }


def _left_padded(prompts: Sequence[np.ndarray], width: int, pad: int) -> np.ndarray:
  longest = max(map(len, prompts))
  if longest > width:
    raise ValueError(
      f"a prompt has {longest} tokens, max_prompt_length is {width}: raise it in the "
      "RolloutConfig, or leave such prompts out of the data"
    )
  padded = np.full((len(prompts), width), pad, np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[width - len(prompt) :] = prompt
  return padded


def _before(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
  found = np.flatnonzero(np.isin(tokens, ends))
  return tokens[: found[0]] if len(found) else tokens
