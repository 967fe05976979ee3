"""Files of the target's features, computed once per training.

One file per `_AT_ONCE` sequences. After a kill the missing files are computed.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import logging
import pathlib
import shutil
import time

import numpy as np

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import writing
from tlt_jax.spec_decode.spot import offline

_AT_ONCE = 16  # sequences of a file
_REMEDY = "delete it, and its features are computed again"


@dataclasses.dataclass(frozen=True)
class FeatureFiles:
  """Features f32[T E] of sequences of T tokens, read from disk on access."""

  folder: pathlib.Path
  sizes: tuple[int, ...]  # T of each sequence
  width: int  # E

  def __getitem__(self, i: int) -> np.ndarray:
    """The features of the i-th sequence; raises ValueError if the file is damaged."""
    shard, within = divmod(i, _AT_ONCE)
    sizes = self.sizes[shard * _AT_ONCE :][:_AT_ONCE]
    path = _path(self.folder, shard)
    try:
      stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
      raise ValueError(f"{path} is damaged ({e!s:.200}); {_REMEDY}") from e
    if stored.dtype != np.float32 or stored.shape != (sum(sizes), self.width):
      raise ValueError(f"{path} does not hold these sequences' features; {_REMEDY}")
    start = sum(sizes[:within])
    return stored[start : start + sizes[within]]


def compute(
  folder: pathlib.Path,
  learner: offline.DraftLearner,
  target_params,
  sequences: Sequence[tuple[np.ndarray, np.ndarray]],
) -> FeatureFiles:
  """Computes the features that the folder does not hold yet.

  Args:
    target_params: laid out by `axes.ROLLOUT`
    sequences: (prompt, response) token ids
  Raises:
    OSError: the disk has no room for them
  """
  sizes = tuple(len(p) + len(r) for p, r in sequences)
  files = FeatureFiles(folder, sizes, learner.layout.size)
  missing = processes.on_first(lambda: list(_missing(files)))
  if not missing:
    return files
  folder.mkdir(exist_ok=True)
  tokens = sum(sum(sizes[i : i + _AT_ONCE]) for i in missing)
  needed, free = 4 * files.width * tokens, shutil.disk_usage(folder).free
  amount = f"{memory.text(needed)} of disk for the target's features of {tokens} tokens"
  if needed > free:
    raise OSError(
      f"{folder} needs {amount}, and has {memory.text(free)}; make room, train on fewer "
      "responses, or let every update compute them: --config.keep_features=False"
    )
  logging.info("computing, once, %s", amount)
  began = time.time()
  with progress.counted("features, file", missing) as each:
    for first in each:
      prompts, responses = zip(*sequences[first : first + _AT_ONCE], strict=True)
      made = learner.features(target_params, prompts, responses)
      if not processes.is_first():
        continue
      path = _path(folder, first // _AT_ONCE)
      partial = path.with_suffix(".tmp.npy")
      with writing.to(path):
        np.save(partial, np.concatenate([x.astype(np.float32) for x in made]))
      partial.replace(path)
  processes.barrier()
  seconds = time.time() - began
  logging.info("features: %.0f s, %.0f tokens/s", seconds, tokens / seconds)
  return files


def _missing(files: FeatureFiles) -> Iterator[int]:
  """Yields the first sequence of each file that is not there."""
  for first in range(0, len(files.sizes), _AT_ONCE):
    if not _path(files.folder, first // _AT_ONCE).exists():
      yield first


def _path(folder: pathlib.Path, shard: int) -> pathlib.Path:
  return folder / f"{shard:05d}.npy"
