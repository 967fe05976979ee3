"""A reward for few tokens."""


def score(prompt: str, response: str, answer: str, length: int, max_tokens: int) -> float:
  """1 for an empty response, 0 for one that uses all tokens it might have had."""
  return 1 - length / max_tokens
