"""The summary of a run, with every figure computed by hand; its time without compiling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import equal_rewards
from experiments import summary
from tests import commands
from tlt_jax import stopwatch
from tlt_jax.rl import algorithm

home = commands.home


def step(number: int, reward: float, **more: float) -> dict:
  """The record of a step of 4 s, of which 3 s are the rollout."""
  seconds = {"step/seconds_s": 4.0, "rollout/seconds_s": 3.0, "policy/seconds_s": 0.5}
  of = {"step": number, "reward/mean": reward, "reward/solved": reward}
  named = {key.replace("__", "/"): value for key, value in more.items()}
  return of | seconds | {"rollout/length_mean": 100.0 * reward} | named


def evaluation(number: int, accuracy: float) -> dict:
  """The last record of a run, which is of no step."""
  measured = {
    "eval/accuracy": accuracy,
    "eval/reward_mean": accuracy,
    "eval/seconds_s": 7.0,
  }
  return {"step": number, "compile/seconds_s": 0.25} | measured


def lines(records, **options) -> set[str]:
  return {" ".join(x.split()) for x in summary.text(records, **options).splitlines()}


def flat(records) -> str:
  return " ".join(summary.text(records).split())


REWARDS = (0.62, 0.22, 0.47, 0.41, 0.59, 0.72)


@pytest.mark.parametrize(
  "count, of, first, last, seconds",
  [
    (
      6,
      "3 steps",
      "0.437",
      "0.573",
      "18.0",
    ),  # (0.62 + 0.22 + 0.47) / 3; the same of the last
    (5, "2 steps", "0.420", "0.500", "15.0"),
    (2, "step", "0.620", "0.220", "6.0"),
  ],
)
def test_the_last_record_is_no_step(count, of, first, last, seconds):
  """It is of the evaluation after the last step only."""
  records = [step(i, reward) for i, reward in enumerate(REWARDS[:count])]
  records[0] |= {"eval/accuracy": 0.5, "eval/reward_mean": 0.5, "eval/seconds_s": 2.0}
  found = lines([*records, evaluation(count, 0.75)])
  lengths = [f"{100 * float(x):.0f}" for x in (first, last)]
  assert {
    f"quantity first {of} last {of}",
    f"reward mean {first} {last}",
    f"response length, mean {lengths[0]} {lengths[1]}",
    "step seconds 4.00 4.00",
    "eval accuracy, first and last 0.500 0.750",
    f"rollout {seconds} 75%",
    f"all steps {4 * count}.0 100%",
    "Outside of these steps: evaluations 9.0 s, compiling 0.2 s.",
  } <= found


def test_a_run_of_one_step_has_one_column():
  found = lines([step(0, 0.25), evaluation(1, 0.75)])
  assert {"quantity the only step", "reward mean 0.250"} <= found
  assert lines([evaluation(0, 0.75)]) == {"The run has done no step."}


def test_rows_that_say_nothing_are_left_out():
  """What repeats the reward, and speculation where there was none."""
  records = [step(i, 0.5, rollout__mean_acceptance_length=1.0) for i in range(4)]
  assert "solved" not in flat(records) and "per pass" not in flat(records)
  records[3] |= {"reward/solved": 0.25, "rollout/speculating_s": 1.0}
  assert {"solved 0.500 0.375", "tokens per pass of the policy 1.00 1.00"} <= lines(records)


@pytest.mark.parametrize(
  "saved, said",
  [
    (1.5, "1.5 s less than without it: 1.25 times as fast."),
    (-1.5, "1.5 s more than without it: slower, 0.75 times as fast."),
    (0.0, "as long as without it: as fast (1.00 times)."),
  ],
)
def test_what_speculation_saved_is_a_sentence(saved, said):
  """Of two steps with rollouts of 3 s."""
  gained = {"rollout__predicted_gain": 1.2, "rollout__saved_s": saved / 2}
  records = [step(i, 0.5, **gained) for i in range(2)]
  assert f"Speculation: rollouts took 6.0 s, {said}" in flat(
    [*records, evaluation(2, 0.75)]
  )


def test_the_summary_compares_ends_and_shares_out_the_time():
  """Hand numbers."""
  seconds = {"step/seconds_s": 10.0, "rollout/seconds_s": 6.0, "policy/seconds_s": 3.0}
  records = [{"step": i, "reward/mean": 0.1 * i} | seconds for i in range(6)]
  records[0]["eval/accuracy"] = 0.25
  records[4]["eval/accuracy"] = 0.75
  rows = {" ".join(row.split()) for row in summary.text(records, k=2).splitlines()}
  assert {"reward mean 0.050 0.450", "eval accuracy, first and last 0.250 0.750"} <= rows
  assert {"rollout 36.0 60%", "other 6.0 10%", "all steps 60.0 100%"} <= rows


def test_the_summary_has_what_compared_rollouts_gained():
  """Twice as fast, then four times: a geometric mean, which replaces the estimate."""
  compared = {"plain/tokens": 600, "plain/differing_tokens": 0, "plain/near_ties": 0}
  own = {"rollout/predicted_gain": 1.5, "rollout/saved_s": 1.0, "rollout/seconds_s": 2.0}
  own |= {"rollout/speculating_s": 1.0, "rollout/mean_acceptance_length": 2.0}
  own |= {"rollout/slices": 2, "rollout/idle_s": 1.0, "rollout/harvested_s": 0.5}
  own |= {"drafter/updates": 3, "step/seconds_s": 4.0}
  records = [dict(own) for _ in range(4)]
  for step, seconds, gain in ((1, 4.0, "2.00"), (3, 8.0, "2.83")):
    records[step] |= compared | {"plain/seconds_s": seconds}
    text = " ".join(summary.text(records).split())
    assert f"{gain} times as fast" in text
  for found in ("1.94 times", "1,200 tokens", "50%", "25%"):
    assert found in text
  assert "less than without it" not in text


def test_steps_in_which_nothing_was_learnt_are_counted():
  records = [step(i, 0.5, policy__no_signal=float(i % 3 == 0)) for i in range(5)]
  said = "In 2 of 5 steps the responses of every prompt had equal rewards: nothing"
  assert said in flat([*records, evaluation(5, 0.75)])
  assert "equal rewards" not in flat(records[1:3])


def watch(changes: dict, caplog) -> equal_rewards.Watch:
  config = commands.read_run("countdown.py:smoke", changes)
  caplog.clear()
  return equal_rewards.Watch(config, algorithm.make(**config.algorithm))


@pytest.mark.parametrize(
  "record, changes, cause",
  [
    (
      {"reward/solved": 0.0, "reward/mean": 0.0},
      {},
      "none was solved, the mean reward is 0;",
    ),
    ({"reward/solved": 1.0, "reward/mean": 1.0}, {}, "every response was solved"),
    ({"reward/solved": 0.0, "rollout/truncated": 1.0}, {}, "sampling.max_tokens=64"),
    ({"reward/solved": 0.5}, {"sampling.temperature": 0.0}, "sampling.temperature is 0"),
    ({"reward/solved": 0.0, "reward/failed": 1.0}, {}, "the reward failed"),
    ({"reward/solved": 0.5, "reward/mean": 0.5}, {}, "the mean reward is 0.5;"),
  ],
)
def test_the_log_says_once_that_nothing_is_learnt(caplog, record, changes, cause):
  """From the fifth such step in a row on; again only if rewards have differed since."""
  watched = watch(changes, caplog)
  equal, differ = record | {"policy/no_signal": 1.0}, record | {"policy/no_signal": 0.0}
  for count, run in (
    (0, [equal] * 4 + [differ]),
    (1, [equal] * 12),
    (2, [differ] + [equal] * 5),
  ):
    for one in run:
      watched.update(one)
    assert len(caplog.messages) == count
  assert all(cause in message for message in caplog.messages)


GROUPS = ["grpo", "grpo_gae", "dr_grpo", "dapo", "gspo", "cispo"]


@pytest.mark.parametrize("name", [*GROUPS, "rloo", "reinforce_pp", "ppo"])
def test_one_response_is_too_few_for_algorithms_that_compare_them(caplog, name):
  """Which is said at the start, and only then."""
  watched = watch({"batch.responses": 1, "algorithm": {"name": name}}, caplog)

  def warnings():
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

  assert len(warnings()) == (name in GROUPS)
  for _ in range(9):
    watched.update({"policy/no_signal": float(name in GROUPS)})
  assert len(warnings()) == (name in GROUPS)
  assert all("batch.responses is 1" in message for message in warnings())


def test_compiling_is_counted_once(monkeypatch):
  """Tracing within tracing, then XLA: 3.5 s and 5 s."""
  made, now = stopwatch.Compiling(), [0.0]
  monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
  for now[0], what, seconds in (
    (2.0, "jaxpr_trace_duration", 1.0),
    (4.0, "jaxpr_trace_duration", 3.5),
    (9.0, "backend_compile_duration", 5.0),
  ):
    made.add(f"/jax/core/compile/{what}", seconds, fun_name="f")
  made.add("/jax/compilation_cache/cache_retrieval_time_sec", 4.0)
  assert made.seconds == 8.5


def test_a_lap_has_no_compiling():
  """Of a program that takes far longer to compile than to run."""

  @jax.jit
  def run(x):
    for i in range(600):
      x = jnp.sin(x) + i
    return x

  before, watched = stopwatch.compiled_s(), stopwatch.Stopwatch()
  jax.block_until_ready(run(np.float32(1.0)))
  lap = watched.lap()
  compiled = stopwatch.compiled_s() - before
  jax.block_until_ready(run(np.float32(1.0)))
  assert 0 <= lap < 0.5 * compiled and watched.lap() < 0.5 * compiled


def test_what_can_be_done_next_is_said_in_commands(tmp_path, monkeypatch):
  """As `tlt` where that started the run, with its config, a drafter and a prompt."""
  given = ["--config=mine.py", "--config.steps", "30", "--config.reward=a b", "--fork=x"]
  monkeypatch.setattr(summary.sys, "orig_argv", ["python", "/bin/tlt", "train", *given])
  monkeypatch.setattr(summary.sys, "argv", ["train.py", *given])
  config = commands.read_run("countdown.py:smoke", {"steps": 30})
  (tmp_path / "drafter").mkdir()
  prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": "1 + 1?"}]
  said = summary.what_next(tmp_path, config, prompt)
  of_config = "--config=mine.py '--config.reward=a b'"
  policy = f"--model={tmp_path}/policy"
  assert [x.strip() for x in said.splitlines() if x.startswith("  tlt ")] == [
    f"tlt evaluate {of_config} {policy} --baseline={config.policy}",
    f"tlt generate {of_config} {policy} --drafter={tmp_path}/drafter '--prompt=1 + 1?'",
    f"tlt export --workdir={tmp_path} --output={tmp_path}/served",
  ]
  assert "drafter/" in said and "--config.steps=60" in said
  long = summary.what_next(tmp_path, config, "x" * 201)
  assert "x" * 9 not in long and "--prompt=..." in long
