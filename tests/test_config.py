"""Configs are typed trees: every entry has a type, a range and a meaning."""

import json
import re
import sys
import typing

from absl import app
from absl import flags
import jax
import pytest

from experiments import config as config_lib
from experiments import launch
from experiments import trees
from tests import commands
from tlt_jax import named
from tlt_jax import ranges
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.spot import spot

TREES = {
  "countdown": config_lib.RunConfig,
  "drafter": config_lib.DrafterConfig,
  "warm_start": config_lib.WarmStartConfig,
}
ENTRIES = [
  (name, key, entry)
  for name, tree in TREES.items()
  for key, entry in trees.entries(tree, trees.read(name)).items()
]
NAMES = [f"{name}:{key}" for name, key, _ in ENTRIES]


@pytest.mark.parametrize(("name", "key", "entry"), ENTRIES, ids=NAMES)
def test_an_entry_refuses_what_it_cannot_be_by_its_name(name, key, entry):
  """Another type, and a key beside it; numbers have a range, beyond which is a slip."""
  config = trees.load(name, TREES[name])
  wrong = [object(), {"a": 1}, ((0,),)]
  words = ranges.words(entry.annotation)
  if re.match("a (whole )?number", words):
    assert re.search("from|above|at least", words)
    wrong += ["1", True, 1e30, -1e30, float("nan")]
  for value in wrong:
    with pytest.raises(trees.ConfigError) as e:
      trees.change(config, {key: value})
    assert str(e.value).startswith(f"--config.{key}=") and "\n" not in str(e.value)
  with pytest.raises(trees.ConfigError, match=rf"--config\.{key}_: .*no such key"):
    trees.change(config, {f"{key}_": 1})
  assert len(entry.meaning.split()) > 1 or key.startswith("model.")


def test_a_run_has_few_entries():
  """Without the arguments of what it names: sources of prompts, and an algorithm."""
  named_ones = ("prompts.", "held_out.", "algorithm.", "optimizer.")
  own = [key for name, key, _ in ENTRIES if name == "countdown"]
  assert len([key for key in own if not key.startswith(named_ones)]) <= 80


@pytest.fixture
def command_line(monkeypatch):
  """What a command gets of a command line: its config, or the line it ends with."""

  def given(*args: str):
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    app.FLAGS.mark_as_parsed()  # its own, which it looks at
    monkeypatch.setattr(sys, "argv", ["train", *args])
    taken = {}
    read = trees.from_flags("countdown", config_lib.RunConfig)
    with pytest.raises(SystemExit) as e:
      launch.run(lambda config: taken.update(config=config), config=read)
    if "config" in taken:
      return taken["config"]
    assert "\n" not in e.value.code and e.value.code.startswith("error: ")
    return e.value.code

  return given


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["rollout.slotz=3"], "config.rollout.slotz: .* did you mean 'rollout.slots'"),
    (["rollout.slots=0"], "rollout.slots=0: takes a whole number from 1 to 1,048,576"),
    (["rollout.slots=x"], "rollout.slots='x': takes a whole number"),
    (["steps="], "config.steps='': takes a whole number"),
    (["steps=1e30"], r"config.steps=1e\+30: takes a whole number"),
    (["optimizer.name=adamvv"], "optimizer.name='adamvv': takes one of 'adamw', 'muon'"),
    (["strategies=off"], "config.strategies='off': "),
    (["strategy_rule=predictve"], "'predictive'"),
    (["reward=tlt_jax.tasks.gsm8k.scor"], "did you mean 'score'"),
    (["prompts.source=tlt_jax.data.load_promts"], "prompts.source=.*'load_prompts'"),
    (["algorithm.name=grpoo"], "algorithm.name='grpoo': .*did you mean 'grpo'"),
    (["algorithm.name=grpo", "algorithm.clip_lo=1"], "did you mean 'algorithm.clip_low'"),
    (["algorithm.clip_low=2"], "clip_low=2: takes a number from 0 to 1 .how far below"),
    (["prompts.source=tlt_jax.data.load_prompts"], "prompts.path is missing; it takes"),
  ],
)
def test_a_mistake_on_the_command_line_is_one_line(command_line, args, message):
  line = command_line(*(f"--config.{arg}" for arg in args))
  assert re.search(message, line), line


def test_a_value_is_read_as_what_its_entry_takes(command_line):
  """Not as what the config file has there; a switch needs no value."""
  config = command_line(
    "--config=countdown:smoke",
    "--config.algorithm.name=grpo",
    "--config.algorithm.kl_coef=0.25",
    "--config.optimizer.total=None",
    "--config.rollout.cache_tokens",
    "5000",
    "--config.rollout.kernels=ref",
    "--config.learner.buckets=[[2, 64]]",
    "--noconfig.spot.train",
    "--config.chat.apply",
  )
  assert config.algorithm["kl_coef"] == 0.25 and config.algorithm["name"] == "grpo"
  assert "trace_decay" not in config.algorithm  # of another algorithm, in the file
  assert config.optimizer["total"] is None and config.rollout.cache_tokens == 5000
  assert config.rollout.kernels == "ref" and config.learner.buckets == ((2, 64),)
  assert config.chat.apply and not config.spot.train


@pytest.mark.parametrize("text", ["3_1_4", "3_1_4,5_1_6", "('3_1_4',)"])
def test_names_on_the_command_line_are_no_numbers(text, monkeypatch):
  """To Python 3_1_4 is 314."""
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
  argv = ["command", f"--config.evaluation.strategies={text}"]
  config, rest = trees.parse("drafter", config_lib.DrafterConfig, "config", argv)
  assert rest == ["command"] and config.evaluation.strategies[0] == "3_1_4"


def test_a_config_file_is_one_or_is_refused(command_line, tmp_path):
  """By its name, and by what is wrong with it."""
  path = tmp_path / "mine.py"
  assert "no such file" in command_line(f"--config={path}")
  for text, message in (
    ("", "has no attribute 'get_config'"),
    ("def get_config(", "SyntaxError"),
    ("def get_config(arg=''): return 1", "gives a int, not a ConfigDict"),
    ("import sys; sys.exit()", "SystemExit"),
    ("def get_config(arg=''): raise RuntimeError('two\\nlines')", "two lines"),
    ("def get_config(arg=''): return dict(steps=1)", "is missing"),
    (
      "from experiments.configs import countdown\n"
      "def get_config(arg=''):\n"
      "  config = countdown.get_config(arg)\n"
      "  config.rollout.slotz = 3\n"
      "  return config\n",
      "--config.rollout.slotz: the config has no such key",
    ),
  ):
    path.write_text(text)
    assert message in command_line(f"--config={path}")


MODULE = '''
from tlt_jax import ranges


def make(
  scale: ranges.Share = 0.5, *rest, table: tuple[float, ...] = (), free=3, must: int, **more
):
  """Makes nothing.

  Args:
    scale: of it,
      in two lines
    table, free: the rest
  """
'''


def test_a_function_of_a_fork_is_checked_by_its_own_signature(
  command_line, tmp_path, monkeypatch
):
  """Its defaults, ranges and meanings; what cannot be read as a type may be anything."""
  (tmp_path / "below").mkdir()
  (tmp_path / "below" / "inner.py").write_text(MODULE)
  text = "def make(x: 'Nobody' = 1, y: float = 0.5, z=object()): ..."
  (tmp_path / "below" / "odd.py").write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  chosen = ["--config.algorithm.name=below.inner", "--config.algorithm.must=7"]
  config = command_line(*chosen, "--config.algorithm.scale=0.25")
  own = {"name": "below.inner", "scale": 0.25, "table": (), "free": 3, "must": 7}
  assert config.algorithm == own
  assert "algorithm.must is missing" in command_line(chosen[0])
  line = command_line(*chosen, "--config.algorithm.scale=2")
  assert "algorithm.scale=2" in line and "from 0 to 1 (of it, in two lines)" in line
  line = command_line(*chosen, "--config.algorithm.scal=1")
  assert line.endswith("did you mean 'algorithm.scale'?")
  odd = command_line("--config.algorithm.name=below.odd").algorithm
  assert odd == {"name": "below.odd", "x": 1, "y": 0.5}


def test_a_tree_is_the_same_after_its_file(tmp_path):
  for name, tree in TREES.items():
    config = trees.load(name, tree)
    again = json.loads(json.dumps(trees.to_dict(config)))
    assert trees.validate(tree, again) == config


def test_help_tells_every_entry(tmp_path):
  """With its value, type, range and meaning."""

  def joined(text: str) -> str:
    return "".join(text.split())  # lines break at hyphens too

  told = joined(commands.run(tmp_path, "train", "--help").stdout)
  assert joined("per slice; None: follows from the prompts and the memory [a whole") in told
  for name, key, entry in ENTRIES:
    if name == "countdown":
      assert f"--config.{key}=" in told and joined(entry.meaning) in told


def test_a_full_device_is_told_in_one_line(monkeypatch):
  """With what makes a run smaller; any other failure of a program is a bug, and shown."""
  told = {"RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes": SystemExit}
  for text, kind in (told | {"INTERNAL: broken": jax.errors.JaxRuntimeError}).items():

    def fail(text=text):
      raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    app.FLAGS.mark_as_parsed()
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(kind) as e:
      launch.run(fail)
    if kind is SystemExit:
      assert "memory is full" in e.value.code and "\n" not in e.value.code


def test_the_library_checks_its_arguments_too():
  """By the same types, where it is called without a config."""
  for call, message in (
    (lambda: optimizer.make("adamvv", 1e-3), "name must be one of 'adamw', 'muon'"),
    (lambda: optimizer.make("adamw", -1.0), "learning_rate must be a number from 0"),
    (lambda: spot.Options(rows=0), "rows"),
    (lambda: spot.Options(row=1), "row"),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  words = ranges.words(typing.Annotated[tuple[ranges.Share, ...] | None, None])
  assert words == "a tuple, each entry a number from 0 to 1 or None"


def test_names_lead_somewhere_or_say_where_they_end(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "broken_one.py").write_text("import a_module_that_nobody_has")
  assert (
    named.load("tlt_jax.rl.grpo.make") is named.module("grpo", "tlt_jax.rl", "make").make
  )
  for path, message in (
    ("make", "not of the form package.module.name"),
    ("tlt_jax.rl.grpo.mak", "has no 'mak'; did you mean 'make'"),
    ("tlt_jax.rl.grop.make", "no module 'tlt_jax.rl.grop'; did you mean 'grpo'"),
    ("broken_one.make", "importing broken_one failed: No module named 'a_module"),
  ):
    with pytest.raises(named.NameNotFound, match=message):
      named.load(path)
