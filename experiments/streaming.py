"""Responses on a terminal while they grow, one after the other."""

from collections.abc import Callable, Sequence
import io
from typing import Any, TextIO
import unicodedata

from tlt_jax.spec_decode.decoding import samples as samples_lib

_UNFINISHED = "\ufffd"  # what a decoder gives for a part of a character


class Stream:
  """Looks on at a rollout (`samples.Watch`) and prints its responses.

  The first response that has not ended is shown as it grows; those after it wait for their
  turn, so that lines do not mix. Control characters but line ends and tabs are left out: a
  terminal would obey them. One that its encoding lacks is shown as an escape.
  """

  def __init__(self, decode: Callable, prompts: Sequence[Any], out: TextIO):
    """Shows nothing yet.

    Args:
      decode: token ids -> text
      prompts: of each request; with several, each stands before its response
      out: where to
    """
    if isinstance(out, io.TextIOWrapper):
      out.reconfigure(errors="backslashreplace")
    self._decode, self._prompts, self._out = decode, prompts, out
    self._ended = [False] * len(prompts)
    self._current, self._begun, self._shown = 0, False, ""

  def __call__(self, samples: samples_lib.Samples, ended: list[int]) -> None:
    """Prints what is new."""
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

  def _show(self, text: str, whole: bool) -> None:
    """Prints what of a text is not there yet; an unfinished character waits."""
    text = text if whole else text.rstrip(_UNFINISHED)
    if len(text) > len(self._shown):
      self._write(text[len(self._shown) :])
      self._shown = text

  def _write(self, text: str) -> None:
    """Prints what is harmless of a text."""
    shown = lambda c: c in "\n\t" or unicodedata.category(c) != "Cc"
    self._out.write("".join(filter(shown, text)))
