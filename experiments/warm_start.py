"""Trains the warm start of a policy on written-out Countdown searches.

The same --workdir resumes. The result is a Hugging Face folder (safetensors, config,
tokenizer) that `experiments.train` starts from. `--config.policy` trains an existing LLM,
with its tokenizer; its generation_config.json then stops responses at the end of a line.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import logging
import pathlib
import random

from absl import flags
import jax
import numpy as np

from experiments import config as config_lib
from experiments import growth
from experiments import launch
from experiments import memory_plan
from experiments import trees
from experiments import workdirs
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import stopwatch
from tlt_jax import tokenization
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.rl import supervised
from tlt_jax.tasks import countdown

_WORKDIR = flags.DEFINE_string("workdir", "runs/warm_start", "Where everything goes.")
_FORK = flags.DEFINE_string("fork", "", workdirs.FORK)


def batches(
  problems: countdown.Problems,
  encode: Callable[[str], Sequence[int]],
  *,
  sequences: int,
  max_response: int,
  give_up: float,
  start: int,
) -> Iterator[tuple[int, list[np.ndarray], list[np.ndarray]]]:
  """Yields (index of the next problem, prompts, responses) without end.

  The random order of a search depends on the problem only, and so batches on `start` only.
  Searches that get too long are tried four times, then skipped.

  Args:
    encode: token ids of a text; one for `STOP`
    sequences: of a batch
    max_response: characters of a search, at most
    give_up: share of the searches that end at a dead end, where they have one
    start: index of the first problem
  """
  i = start
  while True:
    prompts, responses = [], []
    while len(prompts) < sequences:
      prompt = problems[i]["prompt"]
      for attempt in range(4):
        rng = random.Random(f"{i} {attempt}")
        search = countdown.write_search(prompt, rng, max_response)
        if search is not None:
          if rng.random() < give_up:
            search = countdown.give_up(search, rng)
          prompts.append(np.array(encode(prompt), np.int32))
          tokens = [*encode(search.removesuffix(countdown.STOP)), *encode(countdown.STOP)]
          responses.append(np.array(tokens, np.int32))
          break
      i += 1
    yield i, prompts, responses


def tokenizer_of(policy: str) -> tokenization.Tokenizer:
  """Loads the tokenizer of an LLM, and checks that it can write a search.

  Raises:
    data.DataError: the folder has none
    ValueError: it lacks characters, or has no token for the end of a line
  """
  tokenizer = tokenization.Tokenizer.load(policy)
  ids = tokenizer.encode(countdown.CHARACTERS)
  if len(tokenizer.encode(countdown.STOP)) != 1 or (
    tokenizer.decode(ids) != countdown.CHARACTERS
  ):
    raise ValueError(
      f"the tokenizer of {policy} cannot write a search, which has the characters "
      f"{countdown.CHARACTERS!r}, the last one as a single token; take another policy"
    )
  return tokenizer


def export(
  folder: pathlib.Path, policy: str, encode: Callable[[str], Sequence[int]]
) -> None:
  """Writes the tokenizer of `policy`, "": that of Countdown; a line's end is a stop."""
  if not processes.is_first():
    return
  if policy:
    tokenization.Tokenizer.load(policy).save(folder)
  else:
    countdown.tokenizer().save_pretrained(folder)
  stops = {*tokenization.Tokenizer.load(folder).stop_tokens, *encode(countdown.STOP)}
  tokenization.write_stops(folder, sorted(map(int, stops)))


def main(config: config_lib.WarmStartConfig):
  if config.policy and config.begin_as:
    raise ValueError("a policy begins as one other: give config.policy or config.begin_as")
  launch.start()
  config = workdirs.keep_sizes(_FORK.value or _WORKDIR.value, config)
  model = hf.load_config(config.policy) if config.policy else config.model
  rule = optimizer.make(**config.optimizer)
  learner = learner_lib.make(
    model, supervised.make(), rule, axes.make_mesh(), **vars(config.learner)
  )
  if learner.remat is None:
    room, shared = memory.room(learner.mesh.local_devices)
    held = memory.bytes_by_device(learner.abstract_state()).values()
    free = room.free - (sum(held) if shared else max(held))
    remat = memory_plan.needs_remat(learner, free, shared)
    learner = dataclasses.replace(learner, remat=remat)
    config = trees.change(config, {"learner.remat": learner.remat})
  run = workdirs.open(_WORKDIR.value, config, _FORK.value)
  if policy := config.policy:
    _, params = hf.load(policy, dtype="float32")
    encode = tokenizer_of(policy).encode
  else:
    params = target.init_params(model, jax.random.key(config.seed))
    encode = countdown.tokenizer().encode
  if config.begin_as and run.start is None:  # else it has begun
    params = growth.begin_as(config.begin_as, model, params)
  state = learner.init(params)
  step, saved = 0, {"next": 0}
  if run.start is not None:
    step, state, saved = run.start.restore(learner.abstract_state())

  problems = countdown.Problems("train", 10**9, **vars(config.problems))
  made = batches(
    problems,
    encode,
    sequences=config.sequences,
    max_response=config.max_response,
    give_up=config.give_up,
    start=saved["next"],
  )
  stream = data.prefetch(made)
  run.begin(step)
  watch, seconds, tokens = stopwatch.Stopwatch(), 0.0, 0

  def at_stop():
    return step, state, saved

  with processes.saving(), run.checkpoints.at_stop(at_stop) as checkpoints:
    while step < config.steps:
      saved["next"], prompts, responses = next(stream)
      ones = np.ones(len(prompts), np.float32)
      lengths = np.array([[len(response)] for response in responses], np.int32)
      scored = algorithm.Responses(reward=ones[:, None], length=lengths)
      batch = batch_lib.Batch(prompts, responses, temperature=ones, scored=scored)
      state, metrics = learner.train(state, batch)
      loss = metrics["policy/loss"]
      if not np.isfinite(loss):
        raise FloatingPointError(f"the loss became {loss} at step {step + 1}")
      step += 1
      tokens += sum(map(len, responses))
      if step % 10 == 0 or step == config.steps:
        seconds += watch.lap()
        rate = tokens / seconds
        logging.info("step %d/%d  loss %.4f  %.0f tokens/s", step, config.steps, loss, rate)
      checkpoints.save(step, state, saved, force=step == config.steps)
      processes.stop_if_requested()

  folder = pathlib.Path(config.export or run.path / "policy")
  params = jax.tree.map(lambda x: x.astype(config.export_dtype), state.params)
  hf.save(folder, model, params)
  export(folder, policy, encode)
  logging.info("exported the policy to %s, for --config.policy of train", folder)


if __name__ == "__main__":
  read = trees.from_flags("warm_start", config_lib.WarmStartConfig)
  launch.run(main, joins_jobs=True, config=read)
