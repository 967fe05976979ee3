"""Streams responses to a terminal, one after the other."""

from collections.abc import Callable, Sequence
import io
from typing import Any, TextIO
import unicodedata

from tlt_jax.spec_decode.decoding import samples as samples_lib

_UNFINISHED = "\ufffd"  # a decoder's output for a part of a character


class Stream:
  """A `samples.Watch` of a rollout that prints its responses.

  The first unfinished response is streamed; later ones wait for it. Control characters
  other than newlines and tabs are dropped, since a terminal would interpret them.
  Characters outside of the terminal's encoding are escaped. With several `prompts`, each
  is printed before its response.
  """

  def __init__(self, decode: Callable[..., str], prompts: Sequence[Any], out: TextIO):
    if isinstance(out, io.TextIOWrapper):
      out.reconfigure(errors="backslashreplace")
    self._decode, self._prompts, self._out = decode, prompts, out
    self._ended = [False] * len(prompts)
    self._current, self._begun, self._shown = 0, False, ""

  def __call__(self, samples: samples_lib.Samples, ended: list[int]) -> None:
    for i in ended:
      self._ended[i] = True
    while self._current < len(self._prompts):
      i = self._current
      if (samples.length[i] or self._ended[i]) and not self._begun:
        self._begun = True
        if len(self._prompts) > 1:
          self._write(f"--- {self._prompts[i]!s:.200}\n")
      self._show(self._decode(samples.response(i)), self._ended[i])
      if not self._ended[i]:
        break
      self._out.write("\n")
      self._current, self._begun, self._shown = i + 1, False, ""
    self._out.flush()

  def _show(self, text: str, ended: bool) -> None:
    """Prints the new part of a text, except for an unfinished character."""
    text = text if ended else text.rstrip(_UNFINISHED)
    if len(text) > len(self._shown):
      self._write(text[len(self._shown) :])
      self._shown = text

  def _write(self, text: str) -> None:
    self._out.write(
      "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    )
