"""Names in configs: what they lead to, and what is said where they lead nowhere."""

import pytest

from tlt_jax import named
from tlt_jax.tasks import countdown


def test_a_dotted_name_is_imported():
  assert named.load("tlt_jax.tasks.countdown.score") is countdown.score


@pytest.mark.parametrize(
  "path, message",
  [
    ("score", "'score' is not of the form package.module.name"),
    ("tlt_jax.tasks.countdown.scor", "countdown has no 'scor'; did you mean 'score'[?]$"),
    ("tlt_jax.tasks.cuontdown.score", "no module .*cuontdown'; did you mean 'countdown'"),
    ("tlt_jaxx.tasks.score", "no module 'tlt_jaxx'; did you mean 'tlt_jax'"),
    ("tlt_jax.tasks.zzzzzzz.score", "no module 'tlt_jax.tasks.zzzzzzz'$"),
  ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_nearest(path, message):
  with pytest.raises(named.NameNotFound, match=message):
    named.load(path)


@pytest.mark.parametrize(
  "source, message",
  [
    ("import a_module_that_nobody_has", "failed: No module named 'a_module_that"),
    ("1 / 0", "importing broken failed: ZeroDivisionError: division by zero"),
    ("import sys; sys.exit(0)", "importing broken failed: SystemExit: 0"),
  ],
)
def test_a_module_that_fails_is_not_taken_for_a_missing_one(
  tmp_path, monkeypatch, source, message
):
  (tmp_path / "broken.py").write_text(source)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(named.NameNotFound, match=message):
    named.load("broken.name")


def test_the_nearest_name_ends_a_message():
  assert named.nearest("clip_hgh", ["clip_low", "clip_high"]) == (
    "; did you mean 'clip_high'?"
  )
  assert named.nearest("x", ["clip_low"]) == ""
