"""From prompts to scored responses: tokenize, roll out, decode, reward."""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import stopwatch
from tlt_jax import tokenization
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import carry as carry_lib
from tlt_jax.rl import dynamic_sampling
from tlt_jax.rl import judge as judge_lib
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock
from tlt_jax.spec_decode.rollout import quorum as quorum_lib


class Drawn(NamedTuple):
  """What a rollout was asked, and drew."""

  requests: requests_lib.Requests
  samples: samples_lib.Samples
  quorum: quorum_lib.Quorum | None = None  # None: all responses end

  def again(self, rollout: rollout_lib.Engine, params: Any) -> samples_lib.Samples:
    """The same by another engine."""
    return quorum_lib.draw(rollout, params, self.requests, self.quorum)


@dataclasses.dataclass(frozen=True)
class Scored:
  """Responses with their rewards, R consecutive ones per prompt.

  With dynamic sampling these are of all prompts asked; `batch` takes a choice. Where
  responses are carried over they are whole ones, of which the rollout `drew` the ends.
  """

  requests: requests_lib.Requests
  samples: samples_lib.Samples
  text: list[str]  # B responses
  reward: np.ndarray  # f32[B]
  solved: np.ndarray  # bool[B]
  failure: np.ndarray  # str[B]  see `judge.Scores`
  parts: dict[str, np.ndarray]  # f32[B] each
  records: list[dict]  # {"prompt", "answer"} of each response
  rollout_s: float
  reward_s: float
  choice: dynamic_sampling.Outcome | None = None  # None: all prompts are trained on
  carry: carry_lib.InFlight | None = None  # what is in flight after it
  trained: carry_lib.Trained | None = None  # of what was carried over
  drew: Drawn | None = None  # None: the requests and samples here

  @property
  def drawn(self) -> Drawn:
    """What the rollout was asked, and drew."""
    return self.drew or Drawn(self.requests, self.samples)

  @property
  def outcome(self) -> list[str]:
    """Per response: solved, wrong, or truncated (not solved, and out of tokens)."""
    cut = self.samples.finish_reason == samples_lib.LENGTH
    return [
      "solved" if s else "truncated" if c else "wrong"
      for s, c in zip(self.solved, cut, strict=True)
    ]

  def batch(self, R: int) -> batch_lib.Batch:
    requests, samples, index = self.requests, self.samples, np.arange(len(self.reward))
    if self.choice is not None:
      index = index.reshape(-1, R)[self.choice.kept].reshape(-1)
    scores = judge_lib.Scores(
      self.reward[index], self.solved[index], self.failure[index], parts={}
    )
    return batch_lib.Batch(
      prompts=[requests.prompt(i) for i in index],
      responses=[samples.response(i) for i in index],
      temperature=requests.temperature[index],
      scored=dynamic_sampling.responses(requests, samples, scores, R, index),
      fresh=None if self.trained is None else self.trained.fresh,
    )

  def record(self) -> dict[str, list]:
    timeline = self.samples.timeline
    return {
      "length": self.samples.length.tolist(),
      "outcome": self.outcome,
      "live_time_s": [t for t, _ in timeline],
      "live_requests": [sum(live) for _, live in timeline],
      "chunks": [dataclasses.asdict(chunk) for chunk in self.samples.chunks],
      "micro_batch_s": self.samples.micro_batch_s,
      "decisions": self.samples.decisions,
    }

  def metrics(self) -> dict[str, float]:
    """All metrics; without tokens per pass where nothing was left to draw."""
    length, per_pass = self.samples.length, self.samples.mean_acceptance_length
    return {
      "rollout/seconds_s": self.rollout_s,
      "rollout/tokens_per_s": self.samples.kept_tokens / max(self.rollout_s, 1e-9),
      "rollout/length_mean": float(length.mean()),
      "rollout/length_p50": float(np.percentile(length, 50)),
      "rollout/length_p99": float(np.percentile(length, 99)),
      "rollout/length_max": int(length.max()),
      **({"rollout/mean_acceptance_length": per_pass} if self.samples.passes else {}),
      "rollout/slices": len(self.samples.timeline[0][1]),
      "rollout/speculating_s": self.samples.speculating_s,
      "rollout/idle_s": self.samples.idle_s,
      "rollout/useful_share": self.samples.useful_share,
      "rollout/truncated": self.outcome.count("truncated") / len(length),
      **{
        f"rollout/acceptance_rate_pos_{k}": rate
        for k, rate in enumerate(self.samples.acceptance_rate, 1)
      },
      **{f"rollout/{name}": gain for name, gain in self.samples.gain.items()},
      **(self.choice.metrics() if self.choice else {}),
      **(self.trained.metrics if self.trained else {}),
      **self.samples.training_metrics(),
      "reward/mean": float(self.reward.mean()),
      "reward/solved": float(self.solved.mean()),
      "reward/failed": float(np.mean(self.failure != "")),
      **{f"reward/{name}": float(part.mean()) for name, part in self.parts.items()},
      "reward/seconds_s": self.reward_s,
      "memory/rollout_bytes": self.samples.peak_bytes,
    }


@dataclasses.dataclass(frozen=True)
class Sampler:
  rollout: rollout_lib.Engine
  tokenizer: tokenization.Tokenizer
  judge: judge_lib.Judge
  sampling: Mapping[str, Any]  # temperature, top_k, top_p, min_p, max_tokens
  chat: bool | None = False  # wrap plain prompts in the chat template; None: if any
  system: str = ""  # system message of that template

  def compile(self, params) -> None:
    """Compiles all programs of its rollouts, and times strategies."""
    self.rollout.compile(params, self._stops)
    self.measure(params)

  def begin_compiling(self, params, others: Mapping[str, Callable[[], Any]]) -> None:
    """Returns once a rollout can begin; see `Engine.begin_compiling`."""
    self.rollout.begin_compiling(params, self._stops, others)

  def measure(self, params) -> None:
    """Times strategies, once all programs are there."""
    if self.rollout.measure(params, self._stops):
      logging.info("rollout: %s", self.rollout.pool.report())

  @property
  def _stops(self) -> int:
    return len(self.tokenizer.stop_tokens) + 1

  def __call__(
    self,
    params,
    records: Sequence[dict],
    responses: int,
    *,
    seed: int,
    first_request: int = 0,
    lengths: np.ndarray | None = None,
    replace: dynamic_sampling.Rule | None = None,
    carry: carry_lib.InFlight | None = None,
    **options: Any,
  ) -> Scored:
    """Draws and scores R responses to each of P prompts.

    Requests are numbered from `first_request` on in the run. `lengths` i32[P * R] are
    those of a trace. With `replace`, `records` are more than are asked at first. With
    `carry`, they are asked with what is in flight, and get their numbers there.

    Raises:
      FloatingPointError: the policy's log-probabilities are not finite
      RewardError: verifiers fail too often, see `judge.Options`
    """
    if carry is not None:
      return self._carry_on(params, carry.asking(records), seed, **options)
    prompts = encode(self.tokenizer, records, chat=self.chat, system=self.system)
    requests = requests_lib.make_requests(
      prompts, responses, seed=seed, first_request=first_request, **self._limits(lengths)
    )
    asked = [records[p] for p in requests.prompt_idx]

    def score(samples, index):
      return self._score(samples, requests, asked, index)

    if replace is None:
      with concurrent.futures.ThreadPoolExecutor(1) as thread:
        pending = []

        def begin(samples):
          pending.append(thread.submit(score, samples, range(len(requests))))
          return lambda: not pending[0].done()

        watch = stopwatch.Stopwatch()
        samples = self._run(params, requests, score=begin, **options)
        rollout_s = watch.lap()
        with progress.shown("scoring the responses"):
          judged, choice = pending[0].result().whole(), None
      judged = judged._replace(seconds=watch.lap())
    else:
      replacement = dynamic_sampling.Replacement(replace, requests, score)
      with contextlib.closing(replacement):
        watch = stopwatch.Stopwatch()
        samples = self._run(params, requests, ask=replacement, **options)
        rollout_s = watch.lap()
        judged, choice = replacement.finish()
      count = len(judged.text)
      requests, asked = requests.subset(np.arange(count)), asked[:count]
      samples = samples.first(count)
    self.judge.check(judged.scores)
    return Scored(
      requests=requests,
      samples=samples,
      text=judged.text,
      **judged.scores._asdict(),
      records=asked,
      rollout_s=rollout_s,
      reward_s=judged.seconds,
      choice=choice,
    )

  def _carry_on(
    self, params, carry: carry_lib.InFlight, seed: int, **options: Any
  ) -> Scored:
    """Draws until enough prompts in flight are complete, and scores those."""
    records = [group.record for group in carry.groups]
    prompts = encode(self.tokenizer, records, chat=self.chat, system=self.system)
    limits = self._limits(None) | {"seed": seed}
    asked = carry.asked(prompts, **limits)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      pending = []

      def begin(samples):
        after, trained = carry.after(asked, samples, prompts, **limits)
        args = trained.samples, trained.requests, trained.records
        scores = thread.submit(self._score, *args, range(len(trained.requests)))
        pending.extend((after, trained, scores))
        return lambda: not scores.done()

      watch = stopwatch.Stopwatch()
      samples = self._run(
        params, asked.requests, quorum=asked.quorum, score=begin, **options
      )
      rollout_s = watch.lap()
      after, trained, scores = pending
      with progress.shown("scoring the responses"):
        judged = scores.result().whole()
    self.judge.check(judged.scores)
    return Scored(
      requests=trained.requests,
      samples=trained.with_times(samples),
      text=judged.text,
      **judged.scores._asdict(),
      records=trained.records,
      rollout_s=rollout_s,
      reward_s=watch.lap(),
      carry=after,
      trained=trained,
      drew=Drawn(asked.requests, samples, asked.quorum),
    )

  def _run(self, params, requests, quorum=None, **options) -> samples_lib.Samples:
    samples = quorum_lib.draw(self.rollout, params, requests, quorum, **options)
    if not np.isfinite(samples.logp).all():
      raise FloatingPointError(
        "the policy's log-probabilities are not finite: its weights hold NaN or "
        "infinity, or have grown too large"
      )
    return samples

  def _score(
    self,
    samples: samples_lib.Samples,
    requests: requests_lib.Requests,
    records: Sequence[dict],
    index: range,
  ) -> dynamic_sampling.Judged:
    """Scores this process's share of the responses `index`; see `Judged.whole`."""
    began = time.perf_counter()
    mine = index[processes.share()]
    text = [self.tokenizer.decode(samples.response(i)) for i in index]
    scores = self.judge(
      prompts=[records[i]["prompt"] for i in mine],
      responses=text[processes.share()],
      answers=[records[i]["answer"] for i in mine],
      length=samples.length[mine],
      max_tokens=requests.max_tokens[mine],
    )
    return dynamic_sampling.Judged(text, scores, time.perf_counter() - began)

  def _limits(self, lengths: np.ndarray | None) -> dict[str, Any]:
    sampling, stop_tokens = dict(self.sampling), self.tokenizer.stop_tokens
    if lengths is None:
      return sampling | {"stop_tokens": stop_tokens}
    return sampling | {"stop_tokens": [-1] * len(stop_tokens), "max_tokens": lengths}


def make(
  rollout: rollout_lib.Engine,
  *,
  tokenizer: tokenization.Tokenizer,
  judge: judge_lib.Judge,
  sampling: Mapping[str, Any],
  chat: Mapping[str, Any],
) -> Sampler:
  """Makes a sampler.

  `sampling`: temperature, top_k, top_p, min_p and max_tokens of every request; `chat`:
  {"apply": whether plain prompts get the chat template (None: if there is one), "system":
  its message, or ""}.
  """
  return Sampler(
    rollout=rollout,
    tokenizer=tokenizer,
    judge=judge,
    sampling=sampling,
    chat=chat["apply"],
    system=chat["system"],
  )


def encode(
  tokenizer: tokenization.Tokenizer,
  records: Sequence[dict],
  *,
  chat: bool | None,
  system: str,
) -> list[np.ndarray]:
  return [tokenizer.encode(r["prompt"], system=system or None, chat=chat) for r in records]


def replay(
  path: str | pathlib.Path | None, strict: bool
) -> Callable[[int], clock.Decisions]:
  """step -> the decisions of the clock in a run's rollouts (rollouts.jsonl), to replay.

  If it is not `strict`, a missing file or step, or a different rollout, is no error: the
  clock decides from there on.

  Raises:
    metrics.MetricError: the file is missing or damaged
  """
  known = {}
  if strict or (path and processes.on_first(lambda: pathlib.Path(path).exists())):
    known = {r["step"]: _decisions(path, r) for r in metrics.read(path)}

  def decisions(step):
    logged = known.get(step)
    if strict and logged is None:
      raise metrics.MetricError(f"{path}: nothing was decided there in step {step + 1}")
    return clock.Decisions(logged, strict=strict, source=f"{path}, step {step + 1},")

  return decisions


def _decisions(path: str | pathlib.Path, rollout: Mapping[str, Any]) -> list | None:
  decisions = rollout.get("decisions")
  if decisions is None:
    return None
  if not isinstance(decisions, list) or not all(
    isinstance(entry, list) and [*map(type, entry)] == [str, int] for entry in decisions
  ):
    raise metrics.MetricError(
      f"{path}: the decisions of step {rollout['step'] + 1} are not (name, number) each; "
      "give the rollouts.jsonl of a run"
    )
  return decisions


_EVALUATION = 1 << 31  # added to the seed: no evaluation shares noise with a step


def evaluate(
  sampler: Sampler, params, records: Sequence[dict], samples: int, seed: int
) -> Scored:
  """Draws `samples` responses per held-out record, with the same noise every time."""
  with progress.shown("evaluation"):
    return sampler(params, records, samples, seed=seed + _EVALUATION)
