"""Declares every key of the configs: type, range, meaning.

Three kinds of config: `RUN`, an RL run; `DRAFTER`, a drafter's training offline;
`WARM_START`, supervised training of a policy. What goes to the library is declared there,
where it is taken; see `declarations`.
"""

from typing import Literal

from experiments.declarations import Chosen
from experiments.declarations import Key
from experiments.declarations import of
from tlt_jax import data
from tlt_jax import programs
from tlt_jax import prompt_checks
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.rl import algorithm
from tlt_jax.rl import learner
from tlt_jax.rl import optimizer
from tlt_jax.rl import reward
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import source
from tlt_jax.spec_decode.spot import loss
from tlt_jax.spec_decode.spot import offline
from tlt_jax.spec_decode.spot import spot

_SEED = Key(ranges.Seed, "of all noise")
_STEPS = Key(ranges.StepsOrZero, "of the whole run; a resumed run may go further")
_SOURCE = Chosen(
  "source", "package.module.name of what makes prompts; its arguments follow", data.find
)
_OPTIMIZER = of(optimizer.make)
_LEARNER = of(learner.make, without=("config", "algorithm", "optimizer", "mesh"))
_LOSS = of(loss.Loss, without=("temperature",))
_CHECKPOINT = {
  "every": Key(ranges.Count, "steps from one to the next; the last has one too"),
  "keep": Key(ranges.Count, "latest ones that stay"),
}

RUN = {
  "seed": _SEED,
  "steps": _STEPS,
  "policy": Key(str, "Hugging Face folder of the model that is trained"),
  "tensor_parallel": Key(ranges.Count, "devices per slice; the other devices are slices"),
  "drafter": Key(
    str, "folder of train_drafter; 'eagle2' or 'eagle3' for a new drafter; '' for none"
  ),
  "strategies": Key(
    str, "ways to decode by live requests per slice, see the README", find=levels.parse
  ),
  "strategy_rule": Key(
    str,
    "what chooses among them: predictive, epsilon_greedy, or a module of your own",
    find=selector.find,
  ),
  "verification": Key(
    Literal[source.VERIFICATIONS], "of drafts; rejection keeps only the distribution"
  ),
  "spot": {
    "every": Key(
      ranges.CountOrZero, "in every n-th rollout idle slices train the drafter; 0: never"
    ),
    **of(spot.Options),
    "loss": _LOSS,
    "optimizer": _OPTIMIZER,
  },
  "prompts": _SOURCE,
  "held_out": _SOURCE,
  "unusable_prompts": of(prompt_checks.Unusable),
  "chat": {
    "apply": Key(bool, "whether plain prompts are wrapped in the chat template"),
    "system": Key(str, "the system message of that template; '' for none"),
  },
  "reward": Key(str, "package.module.function that scores a response", find=reward.make),
  "solved_at": Key(
    ranges.Real, "least reward of a solved response, where the function does not say"
  ),
  "batch": {
    "prompts": Key(ranges.Count, "of a step"),
    "responses": Key(ranges.Count, "of each prompt"),
  },
  "sampling": {
    "temperature": Key(ranges.NotNegative, "0 takes the likeliest token"),
    "top_k": Key(ranges.CountOrZero, "likeliest tokens that are kept; 0: all"),
    "top_p": Key(ranges.ShareAboveZero, "mass of the likeliest tokens kept; 1: all"),
    "min_p": Key(ranges.Share, "least probability, of the likeliest's; 0 is off"),
    "max_tokens": Key(ranges.Tokens, "of a response"),
  },
  "rollout": {
    **of(rollout.Options, without=("max_length", "features")),
    "budget": of(programs.Budget),
  },
  "algorithm": Chosen(
    "name", "a module of tlt_jax.rl, or of your own; its arguments follow", algorithm.find
  ),
  "optimizer": _OPTIMIZER,
  "learner": _LEARNER,
  "evaluation": {
    "every": Key(
      ranges.StepsOrZero, "steps from one to the next; 0: only the last has one"
    ),
    "samples": Key(ranges.Count, "responses per held-out prompt"),
  },
  "checkpoint": _CHECKPOINT,
}

DRAFTER = {
  "seed": _SEED,
  "steps": _STEPS,
  "sequences": Key(ranges.Count, "of a step"),
  "init": Key(str, "folder of a drafter to start from; '': from scratch"),
  "responses": {
    "prompts": Key(ranges.Count, "that the policy answers, to train on"),
    "samples": Key(ranges.Count, "responses of each"),
  },
  "drafter": {
    "kind": Key(str, "eagle2, eagle3 or a module of your own"),
    "vocab_size": Key(
      ranges.CountOrZero, "most frequent tokens that it may predict; 0: all"
    ),
  },
  "loss": _LOSS,
  "optimizer": _OPTIMIZER,
  "learner": of(
    offline.make, without=("config", "drafter", "loss", "optimizer", "mesh")
  ),
  "evaluation": {
    "prompts": Key(ranges.Count, "held-out prompts"),
    "samples": Key(ranges.Count, "responses of each"),
    "strategies": Key(tuple[str, ...], "that are measured"),
  },
  "checkpoint": _CHECKPOINT,
}

WARM_START = {
  "seed": _SEED,
  "steps": _STEPS,
  "sequences": Key(ranges.Count, "of a step"),
  "max_response": Key(ranges.Tokens, "characters of a written search"),
  "checkpoint": _CHECKPOINT,
  "export": Key(str, "folder of the exported policy; '': WORKDIR/policy"),
  "problems": {
    "four_share": Key(ranges.Share, "share of problems with four numbers"),
    "seed": Key(ranges.Seed, "of the problems"),
  },
  "model": of(config_lib.ModelConfig, without=("rope_scaling",)),
  "optimizer": _OPTIMIZER,
  "learner": _LEARNER,
}
