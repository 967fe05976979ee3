"""Every key of every config has a type, a range and a meaning, and is held to them."""

import math
import re
import sys
import typing
from typing import Annotated, Literal

from absl import app
from absl import flags
import annotated_types
import jax
import pytest

from experiments import declarations
from experiments import keys
from experiments import launch
from tests import commands
from tests import test_configs as configs
from tlt_jax.models import config as config_lib
from tlt_jax.models import families

DEFAULTS = {"countdown": keys.RUN, "drafter": keys.DRAFTER, "warm_start": keys.WARM_START}


def filled(name: str, **overrides: str) -> dict:
  config = configs.load(name)
  declarations.fill_in(DEFAULTS[name], config, overrides)
  return config


ENTRIES = [
  (name, key, declared)
  for name, section in DEFAULTS.items()
  for key, _, declared in declarations.rows(section, filled(name))
]
NAMES = [f"{name}:{key}" for name, key, _ in ENTRIES]


def plain(annotation) -> tuple[type, annotated_types.Interval | None]:
  """(type, range) of an annotation, of an optional one without None."""
  if typing.get_origin(annotation) is Annotated:
    return annotation.__origin__, annotation.__metadata__[0]
  args = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
  is_union = typing.get_origin(annotation) not in (None, Literal, tuple) and len(args) == 1
  return plain(args[0]) if is_union else (annotation, None)


def wrong(annotation) -> list:
  """Values of a wrong type, below and above the range, and zero where it is neither."""
  kind, limits = plain(annotation)
  found = [object(), {"a": 1}]
  if kind in (int, float):
    found += ["1", True, None, [1], 10**30, -(10**30), math.nan, math.inf]
    found += [1.5] if kind is int else []
    found += [limits.ge - 1] if limits.ge is not None else [limits.gt]
    found += [limits.le + 1] if limits.le is not None else [limits.lt]
    found += [0] if limits.ge is not None and limits.ge > 0 else []
  elif kind is str:
    found += [1, True, ("a",)]
  elif kind is bool:
    found += [0, "yes"]
  elif typing.get_origin(kind) is tuple and plain(entry := kind.__args__[0])[0] is float:
    found += [1, "x", *((value,) for value in wrong(entry))]
  else:
    found += [1, "x", ((1,),), ((0, 0),), (1, 2)]
  if type(None) in typing.get_args(annotation):
    found = [value for value in found if value is not None]
  return found


def put(config: dict, key: str, value) -> None:
  *path, last = key.split(".")
  for name in path:
    config = config[name]
  config[last] = value


@pytest.mark.parametrize(("name", "key", "declared"), ENTRIES, ids=NAMES)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_key(name, key, declared):
  """Of another type, below and above its range, zero, huge, not a number."""
  for value in wrong(declared.type):
    config = filled(name)
    put(config, key, value)
    with pytest.raises(declarations.ConfigError) as e:
      declarations.check(DEFAULTS[name], config)
    assert str(e.value).startswith(f"--config.{key}=") and "\n" not in str(e.value)
  config = filled(name)
  put(config, f"{key}_", 1)
  with pytest.raises(declarations.ConfigError, match=rf"--config\.{key}_: .*no such key"):
    declarations.check(DEFAULTS[name], config)


@pytest.mark.parametrize(("name", "key", "declared"), ENTRIES, ids=NAMES)
def test_every_key_says_what_it_is(name, key, declared):
  """Numbers have a range, sets list what is in them; the meaning reads on its own."""
  kind, limits = plain(declared.type)
  assert kind not in (int, float) or limits is not None
  described = declarations.describe(declared)
  assert typing.get_origin(kind) is not Literal or all(
    repr(choice) in described for choice in typing.get_args(kind)
  )
  meaning = declared.meaning
  assert meaning in described and len(meaning.split()) > 2
  assert re.match(r"[a-z('\"0-9]|[A-Z][A-Z']", meaning) and meaning[-1] != "."
  assert meaning.split()[0] not in ("of", "that", "or", "per", "in", "it", "another")


CLOSED = {
  "spot.loss.distance",
  "spot.optimizer.name",
  "optimizer.name",
  "prompts.split",
  "rollout.kernels",
  "unusable_prompts.too_long",
  "algorithm.kl_estimator",
  "algorithm.aggregation",
  "model.architecture",
  "model.dtype",
}


@pytest.mark.parametrize("key", sorted(CLOSED))
def test_a_closed_set_is_refused_at_the_door_with_its_members(key):
  name = "warm_start" if key.startswith("model.") else "countdown"
  config = filled(name)
  put(config, key, "adamvv")
  with pytest.raises(declarations.ConfigError, match=rf"{key}='adamvv': takes one of '"):
    declarations.check(DEFAULTS[name], config)


def test_a_model_may_be_of_every_family_that_can_be_saved():
  assert set(config_lib.ARCHITECTURES) == set(families.FAMILIES)


def no_flags(monkeypatch) -> None:
  """Forgets all flags; other tests import commands, and some of theirs must be given."""
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
  app.FLAGS.mark_as_parsed()  # its own, which it looks at


def never(**_):
  raise AssertionError("the command ran")


def exit_line(monkeypatch, *args: str) -> str:
  """What a command says as it ends before it begins."""
  no_flags(monkeypatch)
  monkeypatch.setattr(sys, "argv", ["train", *args])
  with pytest.raises(SystemExit) as e:
    launch.run(never, config=("countdown", keys.RUN))
  assert "\n" not in str(e.value.code)
  return e.value.code


NUMBERS = [
  key
  for name, key, declared in ENTRIES
  if name == "countdown" and plain(declared.type)[0] in (int, float)
]


@pytest.mark.parametrize("key", NUMBERS)
def test_the_command_line_is_held_to_them_too(monkeypatch, key):
  may_be_negative = key in ("solved_at", "verifier.failed_reward")  # as rewards
  negative = "-1e30" if may_be_negative else "-1"
  for value in ("x", "1e30", negative, str(10**30), ""):
    line = exit_line(monkeypatch, f"--config.{key}={value}")
    assert line.startswith("error: ") and f"config.{key}=" in line


def test_a_config_file_is_one_or_is_refused(monkeypatch, tmp_path):
  """By its name, and by what is wrong with it."""
  path = tmp_path / "mine.py"
  start = f"error: --config={path}: "
  assert exit_line(monkeypatch, f"--config={path}").startswith(start + "no such file")
  assert "no such file" in exit_line(monkeypatch, f"--config={tmp_path}")
  for text, message in (
    ("", "has no attribute 'get_config'"),
    ("def get_config(", "SyntaxError"),
    ("def get_config(arg='')\n  return 1", "SyntaxError"),
    ("def get_config(arg=''): return 1", "gives a int, not a ConfigDict"),
    ("def get_config(arg=''): pass", "gives a NoneType, not a ConfigDict"),
    ("import sys; sys.exit()", "SystemExit"),
    ("def get_config(arg=''): raise RuntimeError('two\\nlines')", "two lines"),
    ("def get_config(arg=''): return dict(steps=1)", "is missing"),
  ):
    path.write_text(text)
    line = exit_line(monkeypatch, f"--config={path}")
    assert message in line and line.startswith("error: --config"), line
  path.write_text(
    "from experiments.configs import countdown\n"
    "def get_config(arg=''):\n"
    "  config = countdown.get_config(arg)\n"
    "  config.rollout.slotz = 3\n"
    "  return config\n"
  )
  line = exit_line(monkeypatch, f"--config={path}")
  assert "--config.rollout.slotz: the config has no such key" in line and "'slots'" in line
  path.write_bytes(b"\x00\xff\x89PNG")
  assert exit_line(monkeypatch, f"--config={path}").startswith(start)


def test_a_full_device_is_told_in_one_line(monkeypatch):
  """With what makes a run smaller; any other failure of a program is a bug, and shown."""
  told = {"RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes": SystemExit}
  for text, kind in (told | {"INTERNAL: broken": jax.errors.JaxRuntimeError}).items():

    def fail(config, text=text):
      raise jax.errors.JaxRuntimeError(text)

    no_flags(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(kind) as e:
      launch.run(fail, config=("countdown", keys.RUN))
    if kind is SystemExit:
      assert "memory is full" in e.value.code and "\n" not in e.value.code


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
  Returns:
    nothing
  """
'''


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
  """A module that is not of this project."""
  (tmp_path / "not_ours.py").write_text(MODULE)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "below").mkdir()
  (tmp_path / "below" / "inner.py").write_text(MODULE)
  return "below.inner"


def test_what_is_chosen_starts_from_its_own_defaults(package):
  """With the entries of the command line, and none of the one it replaces."""
  config = filled("countdown", **{"algorithm.name": package})
  own = {"name": package, "scale": 0.5, "table": (), "free": 3}
  assert config["algorithm"] == own
  with pytest.raises(declarations.ConfigError, match="algorithm.must is missing"):
    declarations.check(keys.RUN, config)
  overrides = {"algorithm.name": package, "algorithm.must": "3"}
  config = filled("countdown", **overrides)
  assert config["algorithm"] == own | {"must": None}
  config["algorithm"] |= {"must": 3, "table": [1.0, 2], "free": object()}
  declarations.check(keys.RUN, config)
  for key, value in (("scale", 2), ("table", (1, "x")), ("must", 0.5)):
    put(config, f"algorithm.{key}", value)
    with pytest.raises(declarations.ConfigError, match=rf"--config\.algorithm\.{key}="):
      declarations.check(keys.RUN, config)
    config["algorithm"] |= {"scale": 1, "table": (), "must": 3}
  same = filled("countdown", **{"algorithm.name": "grpo_gae"})
  assert same == filled("countdown")


def test_annotations_that_cannot_be_read_are_none(tmp_path, monkeypatch):
  (tmp_path / "below").mkdir()
  (tmp_path / "below" / "hidden.py").write_text("def make(x: 'Nobody' = 1): pass")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, "below", raising=False)
  config = filled("countdown", **{"algorithm.name": "below.hidden"})
  assert config["algorithm"] == {"name": "below.hidden", "x": 1}
  config["algorithm"]["x"] = "anything"
  declarations.check(keys.RUN, config)


def test_the_command_line_may_set_what_is_chosen(monkeypatch, package):
  chosen = [f"--config.algorithm.name={package}", "--config.algorithm.must=7"]
  taken = given(monkeypatch, *chosen, "--config.algorithm.scale=0.25")
  own = {"name": package, "scale": 0.25, "table": (), "free": 3, "must": 7}
  assert taken["algorithm"] == own
  line = exit_line(monkeypatch, "--config.reward=tlt_jax.tasks.gsm8k.scor")
  assert "--config.reward='tlt_jax.tasks.gsm8k.scor': " in line and "'score'" in line
  assert "--config.strategies='off': " in exit_line(monkeypatch, "--config.strategies=off")
  assert "'predictive'" in exit_line(monkeypatch, "--config.strategy_rule=predictve")
  line = exit_line(monkeypatch, *chosen, "--config.algorithm.scal=1")
  assert line.endswith("did you mean 'algorithm.scale'?")
  line = exit_line(monkeypatch, *chosen, "--config.algorithm.scale=2")
  assert "algorithm.scale=2" in line and "from 0 to 1 (of it, in two lines)" in line
  line = exit_line(monkeypatch, "--config.prompts.source=below.inner.mak")
  assert "--config.prompts.source='below.inner.mak'" in line and "'make'" in line


def given(monkeypatch, *args: str) -> dict:
  """The config that a command is called with."""
  taken = {}
  no_flags(monkeypatch)
  monkeypatch.setattr(sys, "argv", ["train", *args])
  with pytest.raises(SystemExit):
    launch.run(lambda config: taken.update(config), config=("countdown", keys.RUN))
  return taken


def test_a_value_is_read_as_what_its_key_is(monkeypatch, tmp_path):
  """Not as what stands in the config file: a whole number there, or a number for None."""
  path = tmp_path / "mine.py"
  path.write_text(
    "from experiments.configs import countdown\n"
    "def get_config(arg=''):\n"
    "  config = countdown.get_config(arg)\n"
    "  config.algorithm = dict(name='grpo', kl_coef=0)\n"
    "  return config\n"
  )
  taken = given(
    monkeypatch,
    f"--config={path}",
    "--config.algorithm.kl_coef=0.25",
    "--config.optimizer.total=None",
    "--config.rollout.cache_tokens=5000",
    "--config.rollout.budget.programs=None",
    "--config.rollout.kernels=ref",
  )
  assert taken["algorithm"]["kl_coef"] == 0.25
  assert taken["optimizer"]["total"] is None
  assert taken["rollout"]["cache_tokens"] == 5000
  assert taken["rollout"]["budget"]["programs"] is None
  assert taken["rollout"]["kernels"] == "ref"


def test_a_default_that_no_config_can_hold_stays_with_its_function(monkeypatch, tmp_path):
  (tmp_path / "apart").mkdir()
  (tmp_path / "apart" / "odd.py").write_text("def make(x: float = 0.5, y=object()): ...")
  monkeypatch.syspath_prepend(str(tmp_path))
  config = filled("countdown", **{"algorithm.name": "apart.odd"})
  assert config["algorithm"] == {"name": "apart.odd", "x": 0.5}
  declarations.check(keys.RUN, config)


def test_help_tells_every_key(tmp_path):
  """With its value, type, range and meaning."""
  joined = lambda text: "".join(text.split())  # lines break at hyphens too
  told = joined(commands.run(tmp_path, "train", "--help").stdout)
  assert joined("per slice [a whole number from 1 to 1,048,576]") in told
  for name, key, declared in ENTRIES:
    if name == "countdown":
      assert f"--config.{key}=" in told
      assert joined(declared.meaning) in told
