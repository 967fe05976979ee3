"""Chat templates: the Jinja programs of model folders that turn messages into a prompt.

They run as in transformers' `apply_chat_template` (blocks trimmed, `tojson` without HTML
escapes, `raise_exception`, tags break, continue and generation), but `strftime_now` gives a
day that the caller fixes, so that a prompt does not change overnight.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
from typing import Any

import jinja2
from jinja2 import ext
from jinja2 import sandbox


class Template:
  """A compiled template.

  Args:
    source: Jinja
    today: the day that `strftime_now` formats, at midnight; None: this one
  Raises:
    jinja2.TemplateError: the source is no template
  """

  def __init__(self, source: str, today: datetime.date | None = None):
    self.source, self.today = source, today or datetime.date.today()
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
      "raise_exception": _raise,
      "strftime_now": self._strftime_now,
    }
    self._compiled = environment.from_string(source)

  def render(self, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]) -> str:
    """The text of messages, with the assistant's turn opened; `tokens` as in bos_token."""
    return self._compiled.render(
      messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens
    )

  def _strftime_now(self, form: str) -> str:
    return datetime.datetime.combine(self.today, datetime.time()).strftime(form)


class _Generation(ext.Extension):
  """{% generation %} marks what the assistant says, and adds nothing."""

  tags = {"generation"}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
