"""A task: is the sum of the digits odd? The answer is 0 or 1."""


class Problems:
  """A random-access source of records."""

  def __init__(self, split: str, size: int):
    self._first = 0 if split == "train" else 10**6
    self._size = size

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> dict[str, str]:
    if not 0 <= i < self._size:
      raise IndexError(i)
    number = self._first + i
    odd = sum(map(int, str(number))) % 2
    return {"prompt": f"{number}>1:", "answer": str(odd)}


def score(prompt: str, response: str, answer: str) -> tuple[float, bool]:
  """Half of the reward is for any answer."""
  solved = response[:1] == answer
  return 0.5 * (response[:1] in ("0", "1")) + 0.5 * solved, solved
