"""Declares every key of the configs: type, range, meaning.

Three kinds of config: `RUN`, an RL run; `DRAFTER`, a drafter's training offline;
`WARM_START`, supervised training of a policy. What goes to the library is declared there,
where it is taken; see `declarations`.
"""

from typing import Literal

from experiments import sizes
from experiments.declarations import Chosen
from experiments.declarations import Key
from experiments.declarations import of
from tlt_jax import data
from tlt_jax import programs
from tlt_jax import prompt_checks
from tlt_jax import ranges
from tlt_jax import wandb_board
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.rl import algorithm
from tlt_jax.rl import judge
from tlt_jax.rl import learner
from tlt_jax.rl import optimizer
from tlt_jax.rl import reward
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.spot import loss
from tlt_jax.spec_decode.spot import offline
from tlt_jax.spec_decode.spot import spot

_SEED = Key(ranges.Seed, "seed of sampling, initialisation and data order")
_STEPS = Key(ranges.StepsOrZero, "steps of the whole run; a resumed run may ask for more")
_SEQUENCES = Key(ranges.Count, "sequences per step")
_SOURCE = Chosen(
  "source",
  "package.module.name of a function or class that makes prompts; its arguments follow",
  data.find,
)
_OPTIMIZER = of(optimizer.make)
_LEARNER = of(learner.make, without=("config", "algorithm", "optimizer", "mesh"))
_DRAFT_LEARNER = of(
  offline.make, without=("config", "drafter", "loss", "optimizer", "mesh")
)
_LOSS = of(loss.Loss, without=("temperature",))
_CHECKPOINT = {
  "every": Key(ranges.Steps, "steps between checkpoints; the last step always has one"),
  "keep": Key(ranges.Count, "number of the latest checkpoints that are kept"),
}


def _sizes(section: str, declared: dict) -> dict:
  """The keys of a section, in which sizes may be left open; see `sizes`."""
  follows = "; None: follows from prompts, model and memory"
  left = {
    name: declared[name]._replace(
      type=declared[name].type | None,
      meaning=declared[name].meaning + follows,
      default=None,
    )
    for name in sizes.OPEN[section]
  }
  return declared | left


RUN = {
  "seed": _SEED,
  "steps": _STEPS,
  "policy": Key(str, "folder of the model that is trained, in Hugging Face's format"),
  "tensor_parallel": Key(
    ranges.Count,
    "devices that share one copy of the model (a slice); divides the number of devices",
  ),
  "drafter": Key(
    str,
    "folder of a drafter (of train_drafter, of export, or a published EAGLE-2 or EAGLE-3 "
    "one), 'eagle2', 'eagle3' or a module of your own for a new one, '' for none",
  ),
  "strategies": Key(
    str,
    "which decoding strategies to use at how many live requests per slice, see "
    "docs/drafters.md",
    find=levels.parse,
  ),
  "strategy_rule": Key(
    str,
    "how one of several strategies is chosen: predictive, epsilon_greedy, or a module of "
    "your own",
    find=selector.find_rule,
  ),
  "spot": {
    "train": Key(bool, "whether the drafter trains, for as long as it pays", default=True),
    **of(spot.Options),
    "loss": _LOSS,
    "optimizer": {
      name: key._replace(default=spot.OPTIMIZER.get(name, key.default))
      for name, key in _OPTIMIZER.items()
    },
  },
  "prompts": _SOURCE,
  "held_out": _SOURCE,
  "unusable_prompts": of(prompt_checks.Unusable),
  "chat": {
    "apply": Key(bool, "whether plain prompts are wrapped in the chat template"),
    "system": Key(str, "system message of the chat template; '' for none"),
  },
  "reward": Key(
    str,
    "package.module.name of the function that scores a response; with (ARGUMENT=VALUE) "
    "what it returns does; several are added up, as in 'a.score + 0.1 * b.score'",
    find=reward.parse,
  ),
  "solved_at": Key(
    ranges.Real,
    "reward from which on a response counts as solved, unless the reward function says "
    "so itself",
  ),
  "verifier": of(judge.Options),
  "batch": {
    "prompts": Key(ranges.Count, "prompts per step"),
    "most_prompts": Key(
      ranges.CountOrZero,
      "prompts that a step may ask at most, to replace those that the algorithm does not "
      "keep; 0: none is replaced",
      default=0,
    ),
    "responses": Key(ranges.Count, "responses per prompt"),
  },
  "sampling": {
    "temperature": Key(
      ranges.NotNegative, "temperature of sampling; 0: always the most likely token"
    ),
    "top_k": Key(ranges.CountOrZero, "number of most likely tokens to sample from; 0: all"),
    "top_p": Key(
      ranges.ShareAboveZero,
      "total probability of the most likely tokens to sample from; 1: all",
    ),
    "min_p": Key(
      ranges.Share,
      "least probability of a token to be sampled, relative to that of the most likely "
      "one; 0: off",
    ),
    "max_tokens": Key(ranges.Tokens, "longest response, in tokens"),
  },
  "rollout": {
    **_sizes("rollout", of(rollout.Options, without=("max_length", "features"))),
    "budget": of(programs.Budget),
  },
  "algorithm": Chosen(
    "name", "module of tlt_jax.rl, or of your own; its arguments follow", algorithm.find
  ),
  "optimizer": _OPTIMIZER,
  "learner": _sizes("learner", _LEARNER),
  "compare": {
    "every": Key(
      ranges.StepsOrZero,
      "steps between rollouts that are repeated without drafts and training, to say what "
      "these gain and, in float32, that no token differs; 0: none",
      default=0,
    ),
  },
  "evaluation": {
    "every": Key(ranges.StepsOrZero, "steps between evaluations; 0: only at the end"),
    "samples": Key(ranges.Count, "responses per held-out prompt"),
    "examples": Key(
      ranges.CountOrZero,
      "responses of each step, and of each evaluation, that are written to WORKDIR/samples "
      "for people to read; 0: none",
      default=8,
    ),
  },
  "checkpoint": _CHECKPOINT,
  "wandb": of(wandb_board.Options),
}

DRAFTER = {
  "seed": _SEED,
  "steps": _STEPS,
  "sequences": _SEQUENCES,
  "init": Key(str, "folder of the drafter to start from; '': from scratch"),
  "keep_features": Key(
    bool,
    "whether the policy's features are computed once and kept on disk, not in every step",
    default=True,
  ),
  "responses": {
    "prompts": Key(ranges.Count, "prompts that the policy answers, to train on"),
    "samples": Key(ranges.Count, "responses per prompt; at temperature 0 it is one"),
    "temperatures": Key(
      tuple[ranges.NotNegative, ...],
      "temperatures at each of which every prompt is answered; (): that of the run",
      default=(),
    ),
  },
  "drafter": {
    "kind": Key(str, "kind of drafter: eagle2, eagle3, or a module of your own"),
    "architecture": Key(
      str,
      "family of the drafter's layer; '': the policy's. SGLang and vLLM load eagle3 with "
      "the layer of LlamaForCausalLM only",
      default="",
      find=lambda name: name and families.find(name),
    ),
    "vocab_size": Key(
      ranges.CountOrZero,
      "number of most frequent tokens of the responses that it may predict; 0: all",
    ),
  },
  "loss": _LOSS,
  "optimizer": _OPTIMIZER,
  "learner": _sizes("learner", _DRAFT_LEARNER),
  "evaluation": {
    "prompts": Key(ranges.Count, "number of held-out prompts"),
    "samples": Key(
      ranges.Count, "responses per held-out prompt; at temperature 0 it is one"
    ),
    "strategies": Key(tuple[str, ...], "decoding strategies that are measured"),
    "temperatures": Key(
      tuple[ranges.NotNegative, ...],
      "temperatures at which they are measured; (): that of the run",
      default=(),
    ),
  },
  "checkpoint": _CHECKPOINT,
}

# Of a drafter's training together with the run that it is for, as its workdir keeps them.
TRAINING = DRAFTER | {"run": RUN}

WARM_START = {
  "seed": _SEED,
  "steps": _STEPS,
  "sequences": _SEQUENCES,
  "max_response": Key(ranges.Tokens, "longest written search, in characters"),
  "give_up": Key(
    ranges.Share,
    "share of the searches that end unsolved, at a dead end drawn from theirs: what RL can "
    "then teach is to go on",
    default=0.0,
  ),
  "checkpoint": _CHECKPOINT,
  "export": Key(str, "folder of the exported policy; '': WORKDIR/policy"),
  "export_dtype": Key(
    Literal[config_lib.DTYPES], "number format of the exported weights", default="float32"
  ),
  "problems": {
    "four_share": Key(
      ranges.Share, "share of problems with four numbers; the others have three"
    ),
    "seed": Key(ranges.Seed, "seed of the sequence of problems"),
  },
  "policy": Key(
    str,
    "folder of a Hugging Face LLM that is trained, with its tokenizer, instead of a new "
    "`model`; '': a new one",
    default="",
  ),
  "model": of(config_lib.ModelConfig, without=("rope_scaling",)),
  "begin_as": Key(
    str,
    "folder of a smaller policy, which the model computes the same as at first; '': it "
    "begins at random",
    default="",
  ),
  "optimizer": _OPTIMIZER,
  "learner": _LEARNER,
}
