"""A rollout engine for google-tunix: lossless speculation in its runs of RL.

    from tlt_jax.integrations import tunix as tlt

    engine = functools.partial(tlt.Rollout, drafter="DIR/drafter")
    ClusterConfig(rollout_engine=engine, ...)  # in place of "vanilla"

Nothing else of the run changes. `Rollout` answers prompts on the devices of tunix's rollout
mesh and takes the actor's parameters after every step of the learner. With `spot` the
drafter trains in the same rollouts. None of this changes a token: they are a function of
parameters, prompts, the seed and the number of responses drawn before.

docs/tunix.md says how, and what differs from tunix's own engines.
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
    "tlt_jax.integrations.tunix needs tunix 0.1.7: pip install google-tunix==0.1.7, in an "
    f"environment of its own since it brings much along ({e})"
  ) from e


class Rollout(base_rollout.BaseRollout):
  """Answers prompts for tunix with this project's rollouts; see `generate`."""

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
    """Takes the actor's parameters; tunix hands in the first four arguments.

    Args:
      rollout_actor: Qwen2, Qwen3 or Llama3 of tunix, without LoRA
      tokenizer: tunix's adapter of one
      mesh: whose devices it runs on
      rollout_config: the one of training
      drafter: folder of a drafter, or "eagle2" or "eagle3" for a new one, which needs
        `spot`; None: n-grams draft
      strategies: see `levels`; "" for plain decoding; None: a choice, of which the fastest
        is used
      spot: how the drafter trains in rollouts; None: it stays as it is
      spot_loss, spot_optimizer: of that training; None: the project's
      slots: responses that are drawn at a time, per slice
      tensor_parallel: devices that share one copy of the policy
      max_prompt, max_tokens: tokens of the longest prompt and response, where evaluations
        need more than `rollout_config` has; None: as there
      options: further sizes, see `rollout.Options`; none of them changes a token
    Raises:
      ValueError: what cannot be; names the cause and the remedy
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
    made = _load_drafter(drafter, self._config, self._mesh, trains=spot is not None)
    self._drafter, self._draft_params = made
    selector = self._selector(strategies, spot)
    self._spot = None
    if spot is not None:
      trainer = self._trainer(spot, spot_loss, spot_optimizer, length)
      self._spot = spot_lib.Spot(trainer, spot, self._draft_params)
      self._draft_params = None  # the trainer has them
    self._rollout = rollout_lib.make(
      self._config,
      self._mesh,
      sizes,
      drafter=self._drafter if selector else None,
      selector=selector,
      spot=self._spot,
    )
    self._drawn = 0  # responses so far: each has noise of its own
    self.samples: samples_lib.Samples | None = None  # of the latest call, for metrics

  def prepare(self) -> None:
    """Compiles every program and times the strategies now, not when they are first used."""
    stop_tokens = len(self._stop_tokens(self._rollout_config)) + 1
    self._rollout.compile(self._params, stop_tokens, self._draft_params)
    self._rollout.measure(self._params, stop_tokens, self._draft_params)

  def generate(
    self,
    prompts: list[str],
    rollout_config: base_rollout.RolloutConfig,
    **kwargs: Any,
  ) -> base_rollout.RolloutOutput:
    """Draws a response to each prompt.

    A response keeps the token that ends it, as of tunix's vLLM engine, so that the policy
    is trained to stop. A sampled pad token ends a response too and is cut: the learner
    could not tell it from padding.

    Args:
      prompts: equal ones side by side share their prefill
      rollout_config: of this call
      kwargs: of tunix; none has a meaning here
    Raises:
      ValueError: a prompt or an option that cannot be; names the cause and the remedy
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
    samples = self._rollout(
      self._params, requests, self._draft_params, train=self._spot is not None
    )
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
    """The log-probability of each token of the completions at the training's temperature.

    Args:
      prompt_tokens: i32[B P]  padded on the left
      completion_tokens: i32[B C]  padded on the right
    Returns:
      f32[B C]; of padding, something
    """
    even = prompt_tokens.shape[0] % self._mesh.shape[axes.DATA] == 0
    rows = axes.sharding(self._mesh, axes.DATA if even else None)
    tokens = processes.fetch((prompt_tokens, completion_tokens))
    logp = self._score(self._params, *(processes.place(x, rows) for x in tokens))
    return jnp.asarray(processes.fetch(logp))  # where the learner has the tokens

  @functools.cached_property
  def _score(self) -> Callable:
    """The program of `get_per_token_logps`."""
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
    """Takes the actor's parameters, in a copy: the learner may donate its own.

    Args:
      params: all of them, `nnx.state(actor, nnx.Param)`
      filter_types: of tunix; has no meaning here
    Raises:
      ValueError: they are not those of the model at hand
    """
    self._params = self._place(params)

  def _place(self, params: Any) -> dict:
    """The actor's parameters laid out for rollouts."""
    mine = tunix_params.from_tunix(self._config, params)
    dtype = self._config.dtype
    copy = lambda x, to: jax.device_put(x.astype(dtype), to, may_alias=False)
    # On CPUs, devices exchange arrays by way of the host, which tunix has forbidden here.
    with jax.transfer_guard("allow"):
      return jax.tree.map(copy, mine, self._shardings)

  @functools.cached_property
  def _shardings(self) -> dict:
    """Where parameters lie in rollouts."""
    abstract = target.abstract_params(self._config)
    return axes.shardings(self._mesh, axes.ROLLOUT, abstract)

  def pad_id(self) -> int:
    """The tokenizer's token for padding."""
    return self._tokenizer.pad_id()

  def eos_id(self) -> int:
    """The tokenizer's token that ends a text."""
    return self._tokenizer.eos_id()

  def model(self) -> None:
    """No model of tunix: this is how it knows that parameters have to be handed over."""

  def save_drafter(self, folder: str | pathlib.Path) -> None:
    """Writes the drafter as it is now, for another run or for serving.

    Raises:
      ValueError: there is none
    """
    if self._drafter is None:
      raise ValueError("no drafter to save: give Rollout one, as drafter='eagle2'")
    params = self._draft_params if self._spot is None else self._spot.params
    drafter_files.save(folder, self._drafter, params)

  def _selector(
    self, strategies: str | None, spot: spot_lib.Options | None
  ) -> selector_lib.Selector | None:
    """The selector of strategies; None if only plain decoding is left."""
    has_drafter = self._drafter is not None
    strategies = levels.automatic(has_drafter) if strategies is None else strategies
    selector = selector_lib.make(strategies, "predictive", has_drafter)
    if spot is not None and not (has_drafter and selector):
      raise ValueError(
        "spot training trains a drafter that drafts: give drafter='eagle2' or a folder, "
        "and strategies that are not empty"
      )
    return selector

  def _trainer(
    self,
    options: spot_lib.Options,
    loss: loss_lib.Loss | None,
    rule: optax.GradientTransformation | None,
    longest: int,
  ) -> trainer_lib.Trainer:
    """What trains the drafter, for sequences of so many tokens; see `__init__`."""
    return spot_lib.make_trainer(
      self._config,
      self._drafter,
      self._mesh,
      optimizer=rule or optimizer.make("adamw", 3e-4, b2=0.99),
      longest=longest,
      loss=loss or loss_lib.Loss(temperature=self._rollout_config.temperature or 1.0),
      options=options,
    )

  def _stop_tokens(self, config: base_rollout.RolloutConfig) -> list[int]:
    """The tokens that end a response, with that of padding."""
    if not config.eos_tokens and self.eos_id() is None:
      raise ValueError("the tokenizer has no end of a text: set RolloutConfig.eos_tokens")
    return [*(config.eos_tokens or [self.eos_id()]), self.pad_id()]

  def _check_room(self, prompts: Sequence[np.ndarray], max_tokens: int) -> None:
    """Raises ValueError unless such prompts and responses fit what was made."""
    sizes, longest = self._rollout.options, max(map(len, prompts))
    if longest > sizes.max_prompt or longest + max_tokens > sizes.max_length:
      raise ValueError(
        f"the engine was made for prompts of {sizes.max_prompt} tokens and responses of "
        f"{sizes.max_length - sizes.max_prompt}, not of {longest} and {max_tokens}: give "
        "it the larger sizes, as functools.partial(Rollout, max_prompt=..., max_tokens=...)"
      )

  def _encode(self, prompt: str) -> np.ndarray:
    """A prompt's tokens, i32[...], as tunix's own sampler has them."""
    start = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
    tokens = self._tokenizer.dedup_bos_ids(start + list(self._tokenizer.encode(prompt)))
    return np.asarray(tokens, np.int32)


def _load_drafter(
  name: str | pathlib.Path | None,
  config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  trains: bool,
) -> tuple[drafter_lib.DrafterConfig | None, dict | None]:
  """A drafter and its parameters, of a folder or new."""
  if name is None:
    return None, None
  if not drafters.is_kind(str(name)):
    return drafter_files.load(name, config, mesh)
  if not trains:
    raise ValueError(
      f"drafter={name!r} is a new one, whose guesses are random: add spot=spot.Options() "
      "to train it, or give the folder of one that is trained"
    )
  drafter = drafter_lib.of_target(config, str(name))
  return drafter, drafter_lib.new_params(drafter, mesh, seed=0)


def _sampling(config: base_rollout.RolloutConfig) -> dict[str, Any]:
  """How tunix's options sample, for `make_requests`.

  Raises:
    ValueError: it samples one way in one engine of tunix and another way in another
  """
  if config.top_p is None and config.temperature:
    raise ValueError(
      "top_p=None is greedy in tunix's vanilla engine and unfiltered in its others: say "
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
  """Prompts padded on the left: i32[prompts width].

  Raises:
    ValueError: one is longer
  """
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
  """The tokens before the first one that is among `ends`."""
  found = np.flatnonzero(np.isin(tokens, ends))
  return tokens[: found[0]] if len(found) else tokens
