"""The configs of commands: typed trees, filled from a file and from the command line.

`RunConfig` is an RL run's, `DrafterConfig` a drafter's training offline,
`WarmStartConfig` supervised training. Sections are the library's own dataclasses of
options where it has one. Where a section chooses a function by name (`Arguments`), its
other entries are that function's arguments, checked against its annotations, so that an
algorithm of a fork is checked like ours. What is wrong is a `ConfigError` of one line.

They are here and not in the library, which takes plain arguments.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib.util
import inspect
import json
import pathlib
import re
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple

from absl import flags
import ml_collections
import pydantic
from pydantic_core import InitErrorDetails
from pydantic_core import PydanticCustomError
from pydantic_core import core_schema

from tlt_jax import data
from tlt_jax import named
from tlt_jax import prompt_checks
from tlt_jax import ranges
from tlt_jax import wandb_board
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.ranges import field
from tlt_jax.ranges import options
from tlt_jax.rl import algorithm
from tlt_jax.rl import judge
from tlt_jax.rl import optimizer
from tlt_jax.rl import reward as reward_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import source
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

FOLDER = pathlib.Path(__file__).parent / "configs"
_HELP = ("help", "helpshort", "helpfull", "?")
Buckets = tuple[tuple[ranges.Count, ranges.Tokens], ...]


class ConfigError(ValueError):
  """An entry of a config that cannot be; the message names its key and what can."""


class Arguments(NamedTuple):
  """A section of arguments, as a mapping: `Annotated[dict[str, Any], Arguments(...)]`."""

  find: Callable[[str], Callable]  # the function of a name; ValueError if there is none
  by: str = ""  # the entry that names it; "": `find` needs no name
  meaning: str = ""  # of that entry

  def function(self, values: Mapping[str, Any]) -> Callable:
    """The function that a section names.

    Raises:
      pydantic.ValidationError: it names none
    """
    if not self.by:
      return self.find("")
    if self.by not in values:
      raise _error("missing", self.by, values)
    name = values[self.by]
    if not isinstance(name, str):
      raise _error("string_type", self.by, name)
    try:
      return self.find(name)
    except ValueError as e:
      raise _error(_custom(e), self.by, name) from e

  def validate(self, values: Any) -> dict[str, Any]:
    """The section with the defaults of arguments that it leaves out."""
    if not isinstance(values, Mapping):
      raise PydanticCustomError("section", "takes a section")
    model = ranges.arguments(self.function(values))
    given = {k: ranges.tuples(x) for k, x in values.items() if k != self.by}
    made = model.model_validate(given).model_dump(by_alias=True)
    chosen = {self.by: values[self.by]} if self.by else {}
    # Any other default is left to the function.
    return chosen | {k: x for k, x in made.items() if k in given or _is_json(x)}

  def __get_pydantic_core_schema__(self, _, handler):
    return core_schema.no_info_plain_validator_function(self.validate)


def _error(kind: Any, name: str, value: Any) -> pydantic.ValidationError:
  """The error of one entry of a section."""
  details = InitErrorDetails(type=kind, loc=(name,), input=value)
  return pydantic.ValidationError.from_exception_data("section", [details])


def _custom(e: Exception) -> PydanticCustomError:
  return PydanticCustomError("not_found", "{reason}", {"reason": str(e)})


def _is_json(value: Any) -> bool:
  try:
    json.dumps(value)
  except (TypeError, ValueError):
    return False
  return True


def _read_by(parse: Callable[[str], Any]) -> pydantic.AfterValidator:
  """A check of a text: that `parse` reads it. An empty one is none."""

  def check(text: str) -> str:
    if text:
      parse(text)
    return text

  return pydantic.AfterValidator(check)


Source = Annotated[
  dict[str, Any],
  Arguments(
    data.find,
    "source",
    "package.module.name of a function or class that makes prompts; its arguments follow",
  ),
]
Algorithm = Annotated[
  dict[str, Any],
  Arguments(
    algorithm.find, "name", "module of tlt_jax.rl, or of your own; its arguments follow"
  ),
]
Optimizer = Annotated[dict[str, Any], Arguments(lambda _: optimizer.make)]


@options
class Learner:
  """How the policy is trained; see `rl.learner.make`."""

  buckets: Buckets | None = field(
    None,
    "(rows, tokens per row) of micro-batches, by increasing tokens; rows are rounded up to "
    "a multiple of the slices; None: follows from the longest sequence",
  )
  updates: ranges.Count = field(1, "optimizer updates per batch")
  remat: bool = field(
    True, "whether layers are computed again in the backward pass, to save memory"
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


@options
class DraftLearner:
  """How a drafter is trained offline; see `spot.offline.make`."""

  buckets: Buckets | None = field(
    None,
    "(rows, tokens per row) of micro-batches, by increasing tokens; rows are rounded up to "
    "a multiple of the slices; None: follows from the longest sequence",
  )


@options
class Spot(spot_lib.Options):
  """The drafter's training in rollouts."""

  train: bool = field(True, "whether the drafter trains, for as long as it pays")
  learning_rate: ranges.NotNegative = field(
    spot_lib.OPTIMIZER["learning_rate"], "peak of the drafter's learning rate"
  )
  loss: loss_lib.Settings = field(loss_lib.Settings(), "what the drafter is trained for")

  @property
  def options(self) -> spot_lib.Options:
    """What the library takes."""
    names = spot_lib.Options.__dataclass_fields__
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
  buckets: Buckets | None = field(
    None,
    "(slots, tokens) that programs are compiled for; (): only the largest; None: follows "
    "from slots and the longest sequence",
  )
  prompt_rows: ranges.Count | None = field(
    None, "prompts per slice whose KV is kept at a time; None: follows from the prompts"
  )
  prefill_rows: ranges.Count | None = field(
    None, "prompts per slice and prefill call; None: follows from the prompts"
  )
  prefill_block: ranges.Tokens | None = field(
    None, "tokens of each prompt per prefill call; None: follows from the prompts"
  )


@options
class Chat:
  """What a model that chats is asked."""

  apply: bool = field(..., "whether plain prompts are wrapped in the chat template")
  system: str = field("", "system message of the chat template; '' for none")


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
  examples: ranges.CountOrZero = field(
    8,
    "responses of each step, and of each evaluation, that are written to WORKDIR/samples "
    "for people to read; 0: none",
  )


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
    "folder of a drafter (of train_drafter, of export, or a published EAGLE-2 or EAGLE-3 "
    "one), 'eagle2', 'eagle3' or a module of your own for a new one, '' for none",
  )
  strategies: Annotated[str, _read_by(levels.parse)] = field(
    ...,
    "which decoding strategies to use at how many live requests per slice, see "
    "docs/drafters.md",
  )
  strategy_rule: Annotated[str, _read_by(selector.find)] = field(
    "predictive",
    "how one of several strategies is chosen: predictive, epsilon_greedy, or a module of "
    "your own",
  )
  verification: Literal[source.VERIFICATIONS] = field(
    "coupled",
    "how drafts are accepted: 'coupled' and 'likeliest' keep every token that decoding "
    "without drafts would draw, 'rejection' only the distribution",
  )
  spot: Spot = field(Spot(), "the drafter's training in rollouts")
  prompts: Source = field(..., "what the policy is asked")
  held_out: Source = field(..., "what it is evaluated on")
  unusable_prompts: prompt_checks.Unusable = field(
    prompt_checks.Unusable(), "what is done with prompts that cannot be used"
  )
  chat: Chat = field(Chat(apply=False), "what a model that chats is asked")
  reward: Annotated[str, _read_by(reward_lib.parse)] = field(
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

  kind: str = field(..., "kind of drafter: eagle2, eagle3, or a module of your own")
  architecture: Annotated[str, _read_by(families.find)] = field(
    "",
    "family of the drafter's layer; '': the policy's. SGLang and vLLM load eagle3 with the "
    "layer of LlamaForCausalLM only",
  )
  vocab_size: ranges.CountOrZero = field(
    0, "number of most frequent tokens of the responses that it may predict; 0: all"
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
  seed: ranges.Seed = field(0, "seed of the sequence of problems")


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


# --- Reading ----------------------------------------------------------------------------


class Entry(NamedTuple):
  """One entry of a config."""

  annotation: Any
  meaning: str
  default: Any  # ... where it has none

  @property
  def takes(self) -> str:
    """Its type and range in words, and its meaning."""
    meaning = f" ({self.meaning})" if self.meaning else ""
    return ranges.words(self.annotation) + meaning


def entries(tree: type, values: Mapping[str, Any], path: str = "") -> dict[str, Entry]:
  """The entries of a tree by dotted key.

  Args:
    tree: a dataclass of options
    values: a config, whose names say which functions' arguments there are
    path: of the tree, with a dot behind it
  Raises:
    pydantic.ValidationError: a name leads nowhere; of the section that has it
    ConfigError: the same, with the section's path
  """
  found = {}
  for name, info in _fields(tree):
    key, here = f"{path}{name}", values.get(name, {})
    chosen = [x for x in info.metadata if isinstance(x, Arguments)]
    if chosen:
      if not isinstance(here, Mapping):
        continue  # validation says so
      try:
        function = chosen[0].function(here)
      except pydantic.ValidationError as e:
        error = e.errors()[0]
        if error["type"] != "not_found":
          found |= {f"{key}.{chosen[0].by}": Entry(str, chosen[0].meaning, ...)}
          continue  # validation says so
        raise _one_error(e, tree, values, f"--config.{key}.") from e
      found |= _of_arguments(chosen[0], function, f"{key}.")
    elif dataclasses.is_dataclass(info.annotation):
      here = here if isinstance(here, Mapping) else {}
      found |= entries(info.annotation, here, f"{key}.")
    else:
      annotation = Annotated[info.annotation, *info.metadata, None]
      found[key] = Entry(annotation, info.description or "", _default(info))
  return found


def _fields(tree: type) -> Iterator[tuple[str, Any]]:
  """Names and `FieldInfo`s of a dataclass."""
  found = getattr(tree, "__pydantic_fields__", None)
  if found is not None:
    yield from found.items()
    return
  hints = typing.get_type_hints(tree, include_extras=True)
  for f in dataclasses.fields(tree):
    required = f.default is dataclasses.MISSING
    default = pydantic.fields.PydanticUndefined if required else f.default
    info = pydantic.fields.FieldInfo.from_annotation(hints[f.name])
    info.default = default
    yield f.name, info


def _default(info: Any) -> Any:
  return ... if info.is_required() else info.default


def _of_arguments(section: Arguments, function: Callable, path: str) -> dict[str, Entry]:
  """The entries of a section that goes to a function."""
  found, meanings = {}, _described(function)
  if section.by:
    found[f"{path}{section.by}"] = Entry(str, section.meaning, ...)
  for info in ranges.arguments(function).model_fields.values():
    annotation = Annotated[info.annotation, *info.metadata, None]
    meaning = meanings.get(info.alias, "")
    found[f"{path}{info.alias}"] = Entry(annotation, meaning, _default(info))
  return found


def _described(function: Callable) -> dict[str, str]:
  """What a function's docstring, or that of its class, says under "Args:", by name."""
  called = [function, getattr(function, "__init__", None)]
  meanings = {}
  for docstring in map(inspect.getdoc, called):
    section = re.search(r"^ *Args:\n((?:(?: +.*)?\n?)*)", docstring or "", re.MULTILINE)
    text = inspect.cleandoc("\n" + section[1]) if section else ""
    for entry in re.split(r"\n(?=\w)", text.partition("\n\n")[0]):
      names, _, meaning = entry.partition(": ")
      if re.fullmatch(r"[\w, ]+", names):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
  return meanings


def validate(tree: type, values: Mapping[str, Any], flag: str = "config") -> Any:
  """The tree with a config's values.

  Raises:
    ConfigError: a wrong entry; names it, its value and what it takes
  """
  return _make(tree, ranges.tuples_in(values), "", flag)


def _make(tree: type, values: Mapping[str, Any], path: str, flag: str) -> Any:
  """A section, and those in it first, so that an error is that of one section."""
  made = dict(values)
  for name, info in _fields(tree):
    if dataclasses.is_dataclass(info.annotation) and isinstance(made.get(name), Mapping):
      made[name] = _make(info.annotation, made[name], f"{path}{name}.", flag)
  try:
    _checked(tree)(**made)
  except pydantic.ValidationError as e:
    raise _one_error(e, tree, values, f"--{flag}.{path}") from e
  return tree(**made)


@functools.cache
def _checked(tree: type) -> type:
  """The dataclass, with checks if it has none."""
  if hasattr(tree, "__pydantic_fields__"):
    return tree
  return pydantic.dataclasses.dataclass(tree, frozen=True, config=ranges.STRICT)


def _one_error(
  e: pydantic.ValidationError, tree: type, values: Mapping[str, Any], path: str
) -> ConfigError:
  """The first of pydantic's errors in a section, in our words."""
  error = e.errors(include_url=False)[0]
  key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
  known = entries(tree, values) if kind != "not_found" else {}
  # Behind an entry's key there are places in its value, and types of a union.
  own = [k for k in known if k == key or key.startswith(f"{k}.")]
  if kind in ("unexpected_keyword_argument", "extra_forbidden"):
    inside = f"{key.rpartition('.')[0]}.".lstrip(".")
    names = [k.removeprefix(inside) for k in known if k.startswith(inside)]
    there = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = named.nearest(key, known)
    return ConfigError(f"{path}{key}: the config has no such key; there are {there}{hint}")
  if kind == "missing" and key in known:
    return ConfigError(f"{path}{key} is missing; it takes {known[key].takes}")
  if kind == "missing" and not own:
    return ConfigError(f"{path}{key} is missing; it takes a section")
  if kind in ("value_error", "not_found"):
    reason = error["ctx"].get("reason") or error["ctx"]["error"]
    shown = f"{key}={value!r:.60}" if key else path.rstrip(".")
    return ConfigError(f"{path if key else ''}{shown}: {reason}")
  if not own:
    return ConfigError(f"{path}{key}={value!r:.60}: takes a section")
  given = functools.reduce(lambda x, name: x[name], own[0].split("."), values)
  return ConfigError(f"{path}{own[0]}={given!r:.60}: takes {known[own[0]].takes}")


def read(path: str) -> dict[str, Any]:
  """What the config file `FILE.py[:arg]` gives, as plain dicts.

  One of `configs/` can be named alone, as in `countdown:smoke`.

  Raises:
    ConfigError: no such file, or one that gives no config
  """
  file, _, arg = path.partition(":")
  if file.isidentifier() and (FOLDER / f"{file}.py").is_file():
    file = str(FOLDER / f"{file}.py")
  if not pathlib.Path(file).is_file():
    raise ConfigError(f"no such file (in folder {pathlib.Path.cwd()})")
  spec = importlib.util.spec_from_file_location("config", file)
  if spec is None:
    raise ConfigError("a config is a Python file, FILE.py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    made = module.get_config(*filter(None, [arg]))
    if not isinstance(made, ml_collections.ConfigDict | dict):
      raise TypeError(f"get_config gives a {type(made).__name__}, not a ConfigDict")
    return ml_collections.ConfigDict(made).to_dict()
  except (Exception, SystemExit) as e:  # whatever the file does
    raise ConfigError(f"{type(e).__name__}: {e}") from e


def load(path: str, tree: type = RunConfig, **overrides: Any) -> Any:
  """The tree of a config file; `overrides` are of sections or entries at the top."""
  values = read(path)
  for name, value in overrides.items():
    mixes = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
    values[name] = values[name] | value if mixes else value
  return validate(tree, values)


def from_flags(default: str, tree: type) -> Callable[[str, Sequence[str]], tuple]:
  """What reads a config off the command line, for `launch.run`; see `parse`."""
  return functools.partial(parse, default, tree)


def parse(
  default: str, tree: type, name: str, argv: Sequence[str]
) -> tuple[Any, list[str]]:
  """The config that `--name=FILE.py[:arg]` and `--name.a.b=value` describe.

  A function that is chosen on the command line starts from its own defaults, whatever
  arguments the file gives to another one.

  Args:
    default: file, where the command line names none
    tree: of the config
    name: of the flag
    argv: the command line
  Returns:
    the config, and the command line without these flags
  Raises:
    ConfigError: a file that is none, a key that does not exist, a value that cannot be
  """
  path, overrides, rest = split(argv, name)
  path = path or default
  try:
    values = read(path)
  except ConfigError as e:
    raise ConfigError(f"--{name}={path}: {e}") from e
  _choose(tree, values, overrides)
  try:
    known = entries(tree, values)
  except ConfigError as e:
    raise ConfigError(str(e).replace("--config.", f"--{name}.", 1)) from e
  for key, text in overrides.items():
    if key not in known:
      hint = named.nearest(key, known) or f"; see {path}"
      raise ConfigError(f"--{name}.{key}: the config has no such key{hint}")
    _put(values, key, _value(text, known[key].annotation))
  help_string = f"Config file, FILE.py[:ARG]; its entries are set by --{name}.KEY=VALUE."
  if any(arg.lstrip("-") in _HELP for arg in argv):
    help_string += "".join(f"\n{line}" for line in _help(known, values, name))
  flags.DEFINE_string(name, path, help_string, flag_values=flags.FLAGS)
  # `--help` shows the flags of the command's own file.
  flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[name])
  return validate(tree, values, name), rest


def _choose(tree: type, values: dict, overrides: Mapping[str, str]) -> None:
  """Empties sections whose function the command line replaces."""
  for name, info in _fields(tree):
    for section in info.metadata:
      if isinstance(section, Arguments) and section.by:
        chosen = overrides.get(f"{name}.{section.by}")
        if chosen and chosen != (values.get(name) or {}).get(section.by):
          values[name] = {section.by: chosen}


def _help(known: Mapping[str, Entry], values: Mapping, name: str) -> Iterator[str]:
  """A line for each entry: its value, meaning, type and range."""
  for key, entry in known.items():
    value = values
    for part in key.split("."):
      value = value.get(part, entry.default) if isinstance(value, Mapping) else value
    shown = "" if value is ... or isinstance(value, Mapping) else repr(value)
    yield f"--{name}.{key}={shown}: {entry.meaning} [{ranges.words(entry.annotation)}]"


def split(argv: Sequence[str], name: str) -> tuple[str, dict[str, str], list[str]]:
  """A config's file ("" if none is named), its overrides, and what is left for absl.

  A switch needs no value: `--name.a` is True, `--noname.a` is False.
  """
  path, overrides, rest, args = "", {}, [], list(argv)
  while args:
    arg = args.pop(0)
    before, equals, value = arg.partition("=")
    flag, _, key = before.lstrip("-").partition(".")
    if not arg.startswith("-") or flag not in (name, f"no{name}"):
      rest.append(arg)
      continue
    if flag != name:
      value = "False"
    elif not equals:
      value = "True" if not args or args[0].startswith("--") else args.pop(0)
    if key:
      overrides[key] = value
    else:
      path = value
  return path, overrides, rest


def _value(text: str, annotation: Any) -> Any:
  """What a text on the command line stands for; one that cannot be read stays a text."""
  kinds = _kinds(annotation)
  if text == "None" and type(None) in kinds:
    return None
  if str in kinds:
    return text
  if tuple[str, ...] in kinds and text[:1] not in "([":  # to Python 3_1_4 is 314
    return tuple(text.split(","))
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return {"true": True, "false": False}.get(text, text)


def _kinds(annotation: Any) -> set[Any]:
  """The types that an annotation allows, without ranges."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    return _kinds(args[0])
  if origin in (typing.Union, types.UnionType):
    return set().union(*map(_kinds, args))
  if origin is Literal:
    return set(map(type, args))
  return {annotation}


def change(config: Any, changes: Mapping[str, Any]) -> Any:
  """The tree with other values of some dotted keys."""
  values = to_dict(config)
  for key, value in changes.items():
    _put(values, key, value)
  return validate(type(config), values)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
  *sections, last = key.split(".")
  for part in sections:
    values = values.setdefault(part, {})
  values[last] = value


def to_dict(config: Any) -> dict[str, Any]:
  """A tree as plain dicts, as config.json has them."""
  return dataclasses.asdict(config)
