"""Files of a policy's responses, on which a drafter is trained."""

import pathlib

import numpy as np

from tlt_jax import writing

_NAMES = ("prompts", "responses")
_REMEDY = "delete it to generate the responses again"


def store(path: pathlib.Path, sequences: list[tuple[np.ndarray, np.ndarray]]) -> None:
  """Writes (prompt, response) token ids as two flat arrays and their lengths."""
  flat = {name: np.concatenate([s[i] for s in sequences]) for i, name in enumerate(_NAMES)}
  sizes = np.array([(len(p), len(r)) for p, r in sequences])
  partial = path.with_suffix(".tmp.npz")
  with writing.to(path):
    np.savez(partial, sizes=sizes, **flat)
  partial.replace(path)


def load(path: pathlib.Path, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Reads a file of `store`; raises ValueError if it is damaged, or of other tokens."""
  with path.open("rb") as file:
    try:
      with np.load(file, allow_pickle=False) as stored:
        sizes, *flat = (stored[name] for name in ("sizes", *_NAMES))
    except Exception as e:  # zipfile, zlib and numpy each raise their own
      raise ValueError(f"{path} is damaged ({e!s:.200}); {_REMEDY}") from e
  _check(path, sizes, flat, vocab_size)
  ends = np.cumsum(sizes, 0)[:-1]
  parts = [np.split(ids, ends[:, i]) for i, ids in enumerate(flat)]
  return list(zip(*parts, strict=True))


def _check(
  path: pathlib.Path, sizes: np.ndarray, flat: list[np.ndarray], vocab_size: int
) -> None:
  are_integers = all(np.issubdtype(x.dtype, np.integer) for x in (sizes, *flat))
  if not are_integers or sizes.ndim != 2 or not len(sizes) or sizes.min() < 0:
    raise ValueError(f"{path} is damaged (invalid sizes); {_REMEDY}")
  if [(x.ndim, len(x)) for x in flat] != [(1, n) for n in sizes.sum(0)]:
    raise ValueError(f"{path} is damaged (sizes and tokens do not match); {_REMEDY}")
  ids = np.concatenate(flat)
  unknown = ids[(ids < 0) | (ids >= vocab_size)]
  if len(unknown):
    raise ValueError(
      f"{path} has token {unknown[0]}, the policy has 0 to {vocab_size - 1}; {_REMEDY}"
    )
