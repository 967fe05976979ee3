"""A reward for short responses."""


def score(prompt: str, response: str, answer: str, length: int, max_tokens: int) -> float:
  """1 for an empty response, 0 for one of `max_tokens`."""
  return 1 - length / max_tokens
