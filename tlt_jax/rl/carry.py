"""Responses that are carried over: a step ends before the longest of them have.

As partial rollouts (Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.6.2): more
prompts are in flight than a step trains on. A step's rollout ends when enough of them are
complete; the responses that are not go on in the next step, under its policy, from where
they are. A step trains on the oldest prompts that are complete, with all their responses.

Which tokens are drawn in which step follows from weights and seed alone (see
`rollout.quorum`), with speculation or without, so that a resumed run goes on bit for bit.

Tokens of a response are then of several policies. Each has the log-probability under the
one that drew it, by which `importance_cap` and `importance_mask` of an algorithm correct.
The learner computes it before its update, for the responses that go on: as the rollout has
it, it would depend on shapes in its last bits.
Departures from the paper: no fixed number of tokens per step, a bound on how many policies
a response may span, and whole groups only.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import logging
from typing import Any, NamedTuple, Protocol

import numpy as np

from tlt_jax import ranges
from tlt_jax.rl import batch as batch_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import quorum as quorum_lib

_AGES = 3  # that metrics tell apart; the last counts older tokens, too


@ranges.options
class Options:
  prompts: ranges.CountOrZero = ranges.field(
    0,
    "prompts in flight, more than batch.prompts: their unfinished responses go on in the "
    "next step; 0: every step finishes its own",
  )
  versions: ranges.Count = ranges.field(
    4, "policies that a response may span, 2 or more; in the last the step waits for it"
  )


class Response(NamedTuple):
  """What is drawn of a response."""

  tokens: np.ndarray  # i32[n]
  # f32[n]  under the policy that drew each: the learner's of those before the last version
  logp: np.ndarray
  version: np.ndarray  # i32[n]  of the policy that drew each: updates before it
  finish_reason: int = samples_lib.UNFINISHED

  @property
  def is_complete(self) -> bool:
    return self.finish_reason != samples_lib.UNFINISHED

  def extended(self, samples: samples_lib.Samples, i: int, version: int) -> "Response":
    """With what a rollout drew of it, as its request i."""
    begun, n = len(self.tokens), int(samples.length[i])
    return Response(
      samples.tokens[i, :n].copy(),
      np.append(self.logp, samples.logp[i, begun:n]),
      np.append(self.version, np.full(n - begun, version, np.int32)),
      int(samples.finish_reason[i]),
    )


_BLANK = Response(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class Group(NamedTuple):
  """A prompt with its responses."""

  number: int  # of the prompt in the run
  record: dict  # {"prompt", "answer"}, of JSON types
  responses: tuple[Response, ...]

  @property
  def is_complete(self) -> bool:
    return all(response.is_complete for response in self.responses)


class Asked(NamedTuple):
  """What a step asks."""

  requests: requests_lib.Requests  # of the responses that are not complete
  quorum: quorum_lib.Quorum
  place: list[tuple[int, int]]  # group and response of each request


class Trained(NamedTuple):
  """What a step trains on: P prompts with R responses each."""

  records: list[dict]  # of each response
  requests: requests_lib.Requests
  samples: samples_lib.Samples  # whole responses, without times and chunks
  fresh: np.ndarray  # bool[P R T]  tokens that this step drew
  going_on: batch_lib.Batch  # what is in flight then; `fresh` tokens are to be scored
  metrics: dict[str, float]

  def with_times(self, drawn: samples_lib.Samples) -> samples_lib.Samples:
    """The responses, with the times and chunks of the rollout that ended."""
    names = ("tokens", "length", "logp", "logp_filtered", "finish_reason", "features")
    whole = {name: getattr(self.samples, name) for name in names}
    return dataclasses.replace(drawn, **whole)


@dataclasses.dataclass(frozen=True)
class InFlight:
  """The prompts in flight between two steps, and how many there may be."""

  options: Options
  prompts: int  # P, that a step trains on
  responses: int  # R, to each
  version: int  # updates of the policy so far
  numbered: int  # prompts that were asked so far
  groups: tuple[Group, ...] = ()  # the oldest first

  @property
  def missing(self) -> int:
    """Prompts that are to be asked now."""
    return max(self.options.prompts - len(self.groups), 0)  # a fork may have lowered it

  def asking(self, records: Sequence[dict]) -> "InFlight":
    """With further prompts; ValueError: no checkpoint can hold one."""
    new = tuple(
      Group(self.numbered + k, _as_saved(record), (_BLANK,) * self.responses)
      for k, record in enumerate(records)
    )
    return dataclasses.replace(
      self, numbered=self.numbered + len(new), groups=self.groups + new
    )

  def asked(self, prompts: Sequence[np.ndarray], **options: Any) -> Asked:
    """What the next step asks.

    Args:
      prompts: tokens of each group's prompt
      options: of `requests.make_requests`
    """
    whole = self._requests(self.groups, prompts, **options)
    every = _responses(self.groups)
    left = np.array([i for i, r in enumerate(every) if not r.is_complete], np.int64)
    begun = [response.tokens for response in every]
    complete = sum(group.is_complete for group in self.groups)
    quorum = quorum_lib.Quorum(
      wanted=max(self.prompts - complete, 0),
      must_end=np.array([self._is_last(every[i]) for i in left], bool),
    )
    place = [divmod(int(i), self.responses) for i in left]
    return Asked(dataclasses.replace(whole, begun=begun).subset(left), quorum, place)

  def _is_last(self, response: Response) -> bool:
    """Whether the next version is the last that a response may span."""
    first = response.version[0] if len(response.version) else self.version
    return self.version - first + 1 >= self.options.versions

  def _requests(
    self, groups: Sequence[Group], prompts: Sequence[np.ndarray], **options: Any
  ) -> requests_lib.Requests:
    R = self.responses
    made = requests_lib.make_requests(prompts, R, **options)
    numbers = [group.number * R + r for group in groups for r in range(R)]
    return dataclasses.replace(made, request=np.array(numbers, np.uint32))

  def after(
    self,
    asked: Asked,
    samples: samples_lib.Samples,
    prompts: Sequence[np.ndarray],
    **options: Any,
  ) -> tuple["InFlight", Trained]:
    """What is in flight after a step, and what the step trains on.

    Args:
      samples: of what was `asked`, with the same `prompts` and `options`
    """
    grown = [list(group.responses) for group in self.groups]
    for i, (g, r) in enumerate(asked.place):
      grown[g][r] = grown[g][r].extended(samples, i, self.version)
    groups = [
      group._replace(responses=tuple(responses))
      for group, responses in zip(self.groups, grown, strict=True)
    ]
    chosen = [g for g, group in enumerate(groups) if group.is_complete][: self.prompts]
    trained = [groups[g] for g in chosen]
    rest = tuple(group for g, group in enumerate(groups) if g not in chosen)
    requests = self._requests(trained, [prompts[g] for g in chosen], **options)
    records = [group.record for group in trained for _ in range(self.responses)]
    after = dataclasses.replace(self, version=self.version + 1, groups=rest)
    waiting = [prompts[g] for g in range(len(groups)) if g not in chosen]
    going_on = self._batch(rest, self._requests(rest, waiting, **options))
    metrics = self._ages(trained) | {
      "carry/tokens": float(max(samples.length - asked.requests.begun_length, default=0)),
      "carry/dropped_tokens": float(samples.dropped_tokens),
      "carry/unfinished": float(
        sum(bool(len(r.tokens)) and not r.is_complete for g in rest for r in g.responses)
      ),
      "carry/waiting_prompts": float(sum(group.is_complete for group in rest)),
    }
    whole, fresh = _whole(requests, trained), self._fresh(trained, requests)
    return after, Trained(records, requests, whole, fresh, going_on, metrics)

  def _fresh(self, groups: Sequence[Group], requests: requests_lib.Requests) -> np.ndarray:
    """bool[groups R T]: the tokens that this version drew."""
    fresh = np.zeros((len(requests), int(max(requests.max_tokens))), bool)
    for row, response in zip(fresh, _responses(groups), strict=True):
      row[: len(response.version)] = response.version == self.version
    return fresh.reshape(len(groups), self.responses, -1)

  def _batch(
    self, groups: Sequence[Group], requests: requests_lib.Requests
  ) -> batch_lib.Batch:
    blank = batch_lib.blank(len(groups), self.responses)
    fresh = self._fresh(groups, requests)
    return batch_lib.Batch(
      prompts=[requests.prompt(i) for i in range(len(requests))],
      responses=[response.tokens for response in _responses(groups)],
      temperature=requests.temperature,
      scored=blank.scored.replace(logp=np.zeros(fresh.shape, np.float32)),
      fresh=fresh,
    )

  def scored(
    self, score: Callable[..., np.ndarray], params: Any, going_on: batch_lib.Batch
  ) -> "InFlight":
    """With log-probabilities of the tokens that were drawn last, as the learner has them.

    Args:
      score: `Trainer.score_responses` of the policy
      params: of the policy that drew them
      going_on: of `Trained`
    """
    logp = score(params, going_on, going_on.fresh.any(-1).reshape(-1))

    def with_logp(response: Response, new: np.ndarray) -> Response:
      is_new = response.version == self.version - 1
      return response._replace(logp=np.where(is_new, new[: len(is_new)], response.logp))

    groups = tuple(
      group._replace(responses=tuple(map(with_logp, group.responses, table)))
      for group, table in zip(self.groups, logp, strict=True)
    )
    return dataclasses.replace(self, groups=groups)

  def _ages(self, trained: Sequence[Group]) -> dict[str, float]:
    """How old tokens are when they are trained on, in updates since they were drawn."""
    responses = _responses(trained)
    ages = self.version - np.concatenate([r.version for r in responses])
    spans = [r.version[-1] - r.version[0] + 1 for r in responses]
    shares = np.bincount(np.minimum(ages, _AGES), minlength=_AGES + 1) / len(ages)
    return {
      "carry/age_mean": float(ages.mean()),
      "carry/age_max": float(ages.max()),
      **{f"carry/age_{age}": float(share) for age, share in enumerate(shares)},
      "carry/versions_mean": float(np.mean(spans)),
      "carry/versions_max": float(max(spans)),
    }

  def state(self) -> dict:
    """For a checkpoint; of JSON types."""
    return {
      "version": self.version,
      "numbered": self.numbered,
      "responses": self.responses,
      "groups": [
        {
          "number": group.number,
          "record": group.record,
          "responses": [
            {
              **{name: _packed(getattr(r, name)) for name in _DTYPES},
              "finish_reason": r.finish_reason,
            }
            for r in group.responses
          ],
        }
        for group in self.groups
      ],
    }

  def restored(self, state: Mapping[str, Any], max_tokens: int) -> "InFlight":
    """Goes on from a `state`.

    Raises:
      ValueError: it has another number of responses per prompt, or one that is longer than
        responses may be now
    """
    if state["responses"] != self.responses:
      raise ValueError(
        f"{len(state['groups'])} prompts in flight have {state['responses']} responses "
        f"each, batch.responses is {self.responses}; go on with "
        f"--config.batch.responses={state['responses']}, or from a checkpoint of a run "
        "without rollout.carry"
      )
    groups = tuple(
      Group(
        group["number"],
        group["record"],
        tuple(
          Response(
            **{name: _unpacked(r[name], dtype) for name, dtype in _DTYPES.items()},
            finish_reason=r["finish_reason"],
          )
          for r in group["responses"]
        ),
      )
      for group in state["groups"]
    )
    longest = max((len(response.tokens) for response in _responses(groups)), default=0)
    if longest > max_tokens:
      raise ValueError(
        f"a response in flight has {longest} tokens, sampling.max_tokens is {max_tokens}; "
        f"go on with --config.sampling.max_tokens={longest} or more, or drop what is in "
        "flight with --config.rollout.carry.prompts=0"
      )
    return dataclasses.replace(
      self, version=state["version"], numbered=state["numbered"], groups=groups
    )


def _as_saved(record: dict) -> dict:
  """What is used of a record, as a checkpoint gives it back: a resumed run has the same."""
  used = {name: record[name] for name in ("prompt", "answer") if name in record}
  try:
    return json.loads(json.dumps(used))
  except TypeError as e:
    raise ValueError(
      f"the record of the prompt {str(record.get('prompt'))[:60]!r} cannot be kept in a "
      f"checkpoint, as rollout.carry needs ({e}); give its source JSON types, or "
      "rollout.carry.prompts=0"
    ) from e


_DTYPES = {"tokens": np.int32, "logp": np.float32, "version": np.int32}


def _packed(x: np.ndarray) -> str:
  return base64.b64encode(x.astype(x.dtype.newbyteorder("<")).tobytes()).decode()


def _unpacked(text: str, dtype: type) -> np.ndarray:
  stored = np.dtype(dtype).newbyteorder("<")
  return np.frombuffer(base64.b64decode(text), stored).astype(dtype)


def _responses(groups: Sequence[Group]) -> list[Response]:
  return [response for group in groups for response in group.responses]


def _whole(requests: requests_lib.Requests, groups: Sequence[Group]) -> samples_lib.Samples:
  samples = samples_lib.empty(requests)
  for i, response in enumerate(_responses(groups)):
    n = len(response.tokens)
    samples.tokens[i, :n], samples.logp[i, :n] = response.tokens, response.logp
    samples.length[i], samples.finish_reason[i] = n, response.finish_reason
  return samples


class Batch(Protocol):
  """What a step trains on."""

  prompts: int
  responses: int
  most_prompts: int


def make(options: Options, batch: Batch) -> InFlight | None:
  """What is in flight before a run's first step; None: it carries nothing over.

  Raises:
    ValueError: no more in flight than a step trains on, responses that may not span two
      versions, or prompts that are replaced
  """
  if not options.prompts:
    return None
  if options.prompts <= batch.prompts:
    raise ValueError(
      f"rollout.carry.prompts={options.prompts} are in flight, batch.prompts="
      f"{batch.prompts} are trained on: none would be carried over; give more, or 0 to "
      "finish all in their step"
    )
  if options.versions < 2:
    raise ValueError(
      f"rollout.carry.versions={options.versions}: a response that is carried over spans 2 "
      "policy versions or more; give 2, or rollout.carry.prompts=0"
    )
  if batch.most_prompts:
    raise ValueError(
      f"batch.most_prompts={batch.most_prompts} replaces prompts within a step, "
      f"rollout.carry.prompts={options.prompts} keeps them over steps; give 0 to one"
    )
  return InFlight(options, batch.prompts, batch.responses, version=0, numbered=0)


def restored(
  carry: InFlight | None, state: Mapping[str, Any] | None, step: int, max_tokens: int
) -> InFlight | None:
  """What is in flight after `step` steps of a run.

  Args:
    carry: of `make`
    state: of the checkpoint; None: of a run that carried nothing over
    max_tokens: of a response

  Raises:
    ValueError: see `InFlight.restored`
  """
  if carry is None:
    if state and state["groups"]:
      logging.warning(
        "%d prompts were in flight; without rollout.carry their responses are dropped",
        len(state["groups"]),
      )
    return None
  if state is None:
    return dataclasses.replace(carry, version=step, numbered=step * carry.prompts)
  return carry.restored(state, max_tokens)
