"""Configs are typed trees: every entry has a type, a range and a meaning."""

import json
import re
import sys

from absl import app
from absl import flags
import pytest

from experiments import config as config_lib
from experiments import launch
from experiments import trees
from tlt_jax import ranges

TREES = {
  "countdown": config_lib.RunConfig,
  "drafter": config_lib.DrafterConfig,
  "warm_start": config_lib.WarmStartConfig,
}


@pytest.mark.parametrize("name", TREES)
def test_every_entry_refuses_what_it_cannot_be_by_its_name(name):
  """Another type, and numbers beyond their range. The tree is the same after its file."""
  config = trees.load(name, TREES[name])
  again = json.loads(json.dumps(trees.to_dict(config)))
  assert trees.validate(TREES[name], again) == config
  for key, entry in trees.entries(TREES[name], trees.read(name)).items():
    wrong = [object(), {"a": 1}, ((0,),)]
    if re.match("a (whole )?number", ranges.words(entry.annotation)):
      wrong += ["1", True, 1e30, -1e30, float("nan")]
    for value in wrong:
      with pytest.raises(trees.ConfigError) as e:
        trees.change(config, {key: value})
      assert str(e.value).startswith(f"--config.{key}=") and "\n" not in str(e.value)
    assert len(entry.meaning.split()) > 1 or key.startswith("model.")


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
    (["rollout.slotz=3"], "did you mean 'rollout.slots'"),
    (["rollout.slots=0"], "rollout.slots=0"),
    (["steps="], "steps"),
    (["optimizer.name=adamvv"], "'muon'"),
    (["strategies=off"], "strategies"),
    (["reward=tlt_jax.tasks.gsm8k.scor"], "did you mean 'score'"),
    (["algorithm.name=grpo", "algorithm.clip_lo=1"], "did you mean 'algorithm.clip_low'"),
    (["algorithm.clip_low=2"], "clip_low=2"),
    (["prompts.source=tlt_jax.data.load_prompts"], "prompts.path is missing"),
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


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "get_config"),
    ("def get_config(", "SyntaxError"),
    ("import sys; sys.exit()", "SystemExit"),
    ("def get_config(arg=''): return dict(steps=1)", "is missing"),
  ],
)
def test_a_file_that_is_no_config_is_refused(command_line, tmp_path, text, message):
  path = tmp_path / "mine.py"
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
