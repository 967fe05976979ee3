"""The configs of commands, as typed trees.

`RunConfig` is an RL run's, `DrafterConfig` a drafter's training offline,
`WarmStartConfig` supervised training. Sections are the library's own dataclasses of
options where it has one; the library takes plain arguments, so the trees are here.
`trees` fills them.
"""

import datetime
from typing import Annotated, Any, Literal

from experiments import trees
from tlt_jax import data
from tlt_jax import prompt_checks
from tlt_jax import ranges
from tlt_jax import wandb_board
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.ranges import field
from tlt_jax.ranges import options
from tlt_jax.rl import algorithm
from tlt_jax.rl import carry as carry_lib
from tlt_jax.rl import judge
from tlt_jax.rl import optimizer
from tlt_jax.rl import reward as reward_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

# What both entries of this name say.
_VOCAB_SIZE = "; 0: all; None: 32,768 of a policy with 100,000 or more, else all"
Buckets = tuple[tuple[ranges.Count, ranges.Tokens], ...]

Source = Annotated[
  dict[str, Any],
  trees.Arguments(
    data.find,
    "source",
    "package.module.name of a function or class that makes prompts; its arguments follow",
  ),
]
Algorithm = Annotated[
  dict[str, Any],
  trees.Arguments(
    algorithm.find, "name", "module of tlt_jax.rl, or of your own; its arguments follow"
  ),
]
Optimizer = Annotated[dict[str, Any], trees.Arguments(lambda _: optimizer.make)]


@options
class Learner:
  """How the policy is trained; see `rl.learner.make`."""

  buckets: Buckets | None = field(
    None,
    "(rows, tokens per row) of micro-batches, by increasing tokens; rows are rounded up to "
    "a multiple of the slices; None: follows from the longest sequence",
  )
  updates: ranges.Count = field(1, "optimizer updates per batch")
  remat: bool | None = field(
    None,
    "whether layers are computed again in the backward pass, to save memory; None: if an "
    "update does not fit without",
  )
  only: str = field(
    "",
    "regular expression of the paths ('layer_0/mlp/up_proj') of the parameters that are "
    "trained; '': all",
  )
  offload: bool = field(
    False,
    "whether float32 weights, moments, critic and reference wait in the host's memory "
    "while they are not used, as in rollouts",
  )
  balance_coef: ranges.NotNegative = field(
    0.0,
    "weight of the loss that balances the load of experts, as `router_aux_loss_coef` of "
    "config.json",
  )


@options
class DraftLearner:
  """How a drafter is trained offline; see `spot.offline.make`."""

  buckets: Buckets | None = field(
    None,
    "(rows, tokens per row) of micro-batches, by increasing tokens; rows are rounded up to "
    "a multiple of the slices; None: follows from the longest sequence",
  )


@options
class Spot(spot_lib.Settings):
  """The drafter's training in rollouts."""

  train: bool = field(True, "whether the drafter trains, for as long as it pays")
  learning_rate: ranges.NotNegative = field(
    spot_lib.OPTIMIZER["learning_rate"], "peak of the drafter's learning rate"
  )
  loss: loss_lib.Settings = field(loss_lib.Settings(), "what the drafter is trained for")

  @property
  def options(self) -> spot_lib.Options:
    """What the library takes."""
    names = spot_lib.Settings.__dataclass_fields__
    return spot_lib.Options(**{name: getattr(self, name) for name in names})


@options
class Rollout(rollout.Settings):
  """Sizes of rollouts; those that are None are filled in by `sizes`."""

  max_prompt: ranges.Tokens | None = field(
    None, "longest prompt, in tokens; None: follows from the prompts"
  )
  slots: ranges.Count | None = field(
    None,
    "requests that run at a time, per slice; None: follows from the prompts and the memory",
  )
  buckets: tuple[ranges.Count, ...] | None = field(
    None,
    "numbers of slots that programs are compiled for; (): `slots` alone; None: halves of "
    "`slots`",
  )
  carry: carry_lib.Options = field(
    carry_lib.Options(), "responses that go on in the next step"
  )

  @property
  def sizes(self) -> dict[str, Any]:
    """What `rollout.Options` takes."""
    return {name: value for name, value in vars(self).items() if name != "carry"}


@options
class Chat:
  """What a model that chats is asked."""

  apply: bool | None = field(
    None,
    "whether plain prompts are wrapped in the chat template; None: where the policy's "
    "folder has one",
  )
  system: str = field("", "system message of the chat template; '' for none")
  date: Annotated[str | None, trees.read_by(datetime.date.fromisoformat)] = field(
    None,
    "day that the chat template sees, as in 2026-01-31; None: if it asks for one, the day "
    "on which the run begins",
  )


@options
class Batch:
  """What one step asks."""

  prompts: ranges.Count = field(..., "prompts per step")
  most_prompts: ranges.CountOrZero = field(
    0,
    "prompts that a step may ask at most, to replace those that the algorithm does not "
    "keep; 0: none is replaced",
  )
  responses: ranges.Count = field(..., "responses per prompt")


@options
class Sampling:
  """How tokens are drawn."""

  temperature: ranges.NotNegative = field(
    1.0, "temperature of sampling; 0: always the most likely token"
  )
  top_k: ranges.CountOrZero = field(
    0, "number of most likely tokens to sample from; 0: all"
  )
  top_p: ranges.ShareAboveZero = field(
    1.0, "total probability of the most likely tokens to sample from; 1: all"
  )
  min_p: ranges.Share = field(
    0.0,
    "least probability of a token to be sampled, relative to that of the most likely one; "
    "0: off",
  )
  max_tokens: ranges.Tokens = field(..., "longest response, in tokens")


@options
class Compare:
  """Rollouts that are repeated to measure the gain."""

  every: ranges.StepsOrZero = field(
    0,
    "steps between rollouts that are repeated without drafts and training, to say what "
    "these gain and, in float32, that no token differs; 0: none",
  )


@options
class Evaluation:
  """When held-out prompts are asked."""

  every: ranges.StepsOrZero = field(..., "steps between evaluations; 0: only at the end")
  samples: ranges.Count = field(..., "responses per held-out prompt")


@options
class Checkpoint:
  """What is kept of a run."""

  every: ranges.Steps = field(
    ..., "steps between checkpoints; the last step always has one"
  )
  keep: ranges.Count = field(2, "number of the latest checkpoints that are kept")


@options
class RunConfig:
  """An RL run."""

  seed: ranges.Seed = field(0, "seed of sampling, initialisation and data order")
  steps: ranges.StepsOrZero = field(
    ..., "steps of the whole run; a resumed run may ask for more"
  )
  policy: str = field(..., "folder of the model that is trained, in Hugging Face's format")
  tensor_parallel: ranges.Count = field(
    1,
    "devices that share one copy of the model (a slice); divides the number of devices",
  )
  drafter: str = field(
    "",
    "folder of a drafter (of train_drafter, of export, or a published one of EAGLE-2, "
    "EAGLE-3, DFlash or DSpark), 'eagle2', 'eagle3', 'block' or a module of your own for "
    "a new one, '' for none",
  )
  drafter_vocab_size: ranges.CountOrZero | None = field(
    None,
    "number of the policy's tokens that a new drafter may predict, the most frequent of "
    f"the prompts and gold answers{_VOCAB_SIZE}",
  )
  strategies: Annotated[str, trees.read_by(levels.parse)] = field(
    ...,
    "which decoding strategies to use at how many live requests per slice, see "
    "docs/drafters.md",
  )
  strategy_rule: Annotated[str, trees.read_by(selector.find_rule)] = field(
    "predictive",
    "how one of several strategies is chosen: predictive, epsilon_greedy, or a module of "
    "your own",
  )
  spot: Spot = field(Spot(), "the drafter's training in rollouts")
  prompts: Source = field(..., "what the policy is asked")
  held_out: Source = field(
    ..., "what it is evaluated on; with path='' a share of the file of prompts"
  )
  unusable_prompts: prompt_checks.Unusable = field(
    prompt_checks.Unusable(), "what is done with prompts that cannot be used"
  )
  chat: Chat = field(Chat(), "what a model that chats is asked")
  reward: Annotated[str, trees.read_by(reward_lib.parse)] = field(
    ...,
    "package.module.name of the function that scores a response; with (ARGUMENT=VALUE) "
    "what it returns does; several are added up, as in 'a.score + 0.1 * b.score'",
  )
  solved_at: ranges.Real = field(
    1.0,
    "reward from which on a response counts as solved, unless the reward function says so "
    "itself",
  )
  verifier: judge.Options = field(judge.Options(), "where rewards are computed")
  batch: Batch = field(..., "what one step asks")
  sampling: Sampling = field(..., "how tokens are drawn")
  rollout: Rollout = field(Rollout(), "sizes of rollouts")
  algorithm: Algorithm = field(..., "how advantages and loss are computed")
  optimizer: Optimizer = field(..., "the policy's optimizer")
  learner: Learner = field(Learner(), "how the policy is trained")
  compare: Compare = field(Compare(), "rollouts that are repeated")
  evaluation: Evaluation = field(..., "when held-out prompts are asked")
  checkpoint: Checkpoint = field(..., "what is kept")
  wandb: wandb_board.Options = field(wandb_board.Options(), "a board of metrics")

  def __post_init__(self):
    sources = data.held_out_share(self.prompts, self.held_out)
    for name, source in zip(("prompts", "held_out"), sources, strict=True):
      object.__setattr__(self, name, source)

  @property
  def asked_prompts(self) -> int:
    """Prompts that a rollout asks, of those that are not replaced."""
    return max(self.batch.prompts, self.rollout.carry.prompts)

  @property
  def max_length(self) -> int:
    """Tokens of the longest sequence."""
    return self.rollout.max_prompt + self.sampling.max_tokens


@options
class Answers:
  """What the policy answers, for a drafter to train on."""

  prompts: ranges.Count = field(..., "prompts that the policy answers, to train on")
  samples: ranges.Count = field(..., "responses per prompt; at temperature 0 it is one")
  temperatures: tuple[ranges.NotNegative, ...] = field(
    (), "temperatures at each of which every prompt is answered; (): that of the run"
  )


@options
class DrafterShape:
  """A new drafter."""

  kind: str = field(
    ..., "kind of drafter: eagle2, eagle3, block, dspark, or a module of your own"
  )
  architecture: Annotated[str, trees.read_by(families.find)] = field(
    "",
    "family of the drafter's layer; '': the policy's. SGLang and vLLM load eagle3 with the "
    "layer of LlamaForCausalLM only",
  )
  vocab_size: ranges.CountOrZero | None = field(
    None,
    "number of the policy's tokens that it may predict, the most frequent of the "
    f"responses{_VOCAB_SIZE}",
  )


@options
class Acceptance:
  """How a drafter is measured."""

  prompts: ranges.Count = field(..., "number of held-out prompts")
  samples: ranges.Count = field(
    ..., "responses per held-out prompt; at temperature 0 it is one"
  )
  strategies: tuple[str, ...] = field(..., "decoding strategies that are measured")
  temperatures: tuple[ranges.NotNegative, ...] = field(
    (), "temperatures at which they are measured; (): that of the run"
  )


@options
class DrafterConfig:
  """A drafter's training offline."""

  seed: ranges.Seed = field(0, "seed of sampling, initialisation and data order")
  steps: ranges.StepsOrZero = field(
    ..., "steps of the whole run; a resumed run may ask for more"
  )
  sequences: ranges.Count = field(..., "sequences per step")
  init: str = field("", "folder of the drafter to start from; '': from scratch")
  keep_features: bool = field(
    True,
    "whether the policy's features are computed once and kept on disk, not in every step",
  )
  responses: Answers = field(..., "what it trains on")
  drafter: DrafterShape = field(..., "a new drafter")
  loss: loss_lib.Settings = field(loss_lib.Settings(), "what it is trained for")
  optimizer: Optimizer = field(..., "its optimizer")
  learner: DraftLearner = field(DraftLearner(), "how it is trained")
  evaluation: Acceptance = field(..., "how it is measured")
  checkpoint: Checkpoint = field(..., "what is kept")


@options
class DrafterTraining(DrafterConfig):
  """A drafter's training, with the run that it is for, as its workdir keeps them."""

  run: RunConfig = field(..., "the run that it is for")


@options
class Searches:
  """Countdown problems."""

  four_share: ranges.Share = field(
    ..., "share of problems with four numbers; the others have three"
  )


@options
class WarmStartConfig:
  """Supervised training of a policy."""

  seed: ranges.Seed = field(0, "seed of sampling, initialisation and data order")
  steps: ranges.StepsOrZero = field(
    ..., "steps of the whole run; a resumed run may ask for more"
  )
  sequences: ranges.Count = field(..., "sequences per step")
  max_response: ranges.Tokens = field(..., "longest written search, in characters")
  give_up: ranges.Share = field(
    0.0,
    "share of the searches that end unsolved, at a dead end drawn from theirs: what RL can "
    "then teach is to go on",
  )
  checkpoint: Checkpoint = field(..., "what is kept")
  export: str = field("", "folder of the exported policy; '': WORKDIR/policy")
  export_dtype: Literal[config_lib.DTYPES] = field(
    "float32", "number format of the exported weights"
  )
  problems: Searches = field(..., "what is searched")
  policy: str = field(
    "",
    "folder of a Hugging Face LLM that is trained, with its tokenizer, instead of a new "
    "`model`; '': a new one",
  )
  model: config_lib.ModelConfig = field(
    ..., "shape of a new model, see tlt_jax.models.config.ModelConfig"
  )
  begin_as: str = field(
    "",
    "folder of a smaller policy, which the model computes the same as at first; '': it "
    "begins at random",
  )
  optimizer: Optimizer = field(..., "its optimizer")
  learner: Learner = field(Learner(), "how it is trained")
