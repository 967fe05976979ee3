r"""Reads a number as people and models write it.

`read` takes a text that should state one number and nothing else, such as the content of
\boxed{...}; `read_last` takes prose. Both return the exact value, or None in doubt:

    72  72.00  1,234  1{,}234  1\,234  -5  - 5  negative 5      digits, and signs
    1.5e3  1.5 \times 10^3                                      powers of ten
    3/4  \frac{3}{4}  \dfrac34  ¾  1 3/4  1¾                    fractions
    5 million  5 \text{ dozen}  5k                              5,000,000  60  5,000
    $72  72%  72 km/h  72 m^2  \text{She has } 72 \text{ hens}  units and words
    48 + 24 = 72  x = 72  \approx 72                            the right side
    7, not 8  7 rather than 8                                   7

Refused are two numbers, ranges (5-7), alternatives (5 or 7), times and ratios (3:30), a
number that words change (half of 72, more than 72, not 72, 72 and a half), numbers in
words. Other text may be arithmetic, such as 2^3 \cdot 9; see `arithmetic`.
"""

import fractions
import re
import unicodedata

from tlt_jax.tasks import arithmetic

_MAX_LENGTH = 4000  # characters that are read
_MAX_DIGITS = 100  # of a number, without leading and trailing zeros

_MINUS = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"


def _vulgar(character: str) -> str:
  value = fractions.Fraction(unicodedata.numeric(character)).limit_denominator(10)
  return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_CHARACTERS = str.maketrans(
  {minus: "-" for minus in _MINUS}
  | {c: _vulgar(c) for c in _FRACTIONS}
  | {chr(0xFF10 + digit): str(digit) for digit in range(10)}  # full width
  | {"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "⁄": "/", "’": "'"}
  | {c: "=" for c in "≈≃≅≡⇒→"}
  | {c: "" for c in "\u200b\u200c\u200d\u2060\ufeff"}  # of no width
)
_TEXT_COMMAND = (
  r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|[mhf]box|boxed|operatorname|bm|boldsymbol"
  r"|emph|underline)"
)
_BRACE = re.compile(rf"(?<!\\)(?:({_TEXT_COMMAND})\s*+)?+\{{|(?<!\\)\}}")
_LETTER = "A-Za-z\u00c0-\u024f"
_REPLACEMENTS = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"\\!|\\(?:left|right|displaystyle|bf|rm|it)(?![a-z])|`", ""),
    (r"\{ ?([-,]) ?\}", r"\1"),
    (r"\\%", "%"),
    # Spaces between thousands, and other spaces.
    (r"(?<=[0-9])(?:\\[,;: ]|[~\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\[,;: ]|~|\\q?quad(?![a-z])|\\[()\[\]]", " "),
    (r"-(?: ?\\?\$|[€£¢¥₹])", "-"),
    (r"\\?\$|[€£¢¥₹]", " "),
    # Bold, not a power.
    (rf"(?<![0-9)}}])\*\*|\*\*(?=\s|[.,;:!{_LETTER}]|$)|__", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}"),
    (r"\\(?:approx|simeq|cong|equiv|sim|implies|[Rr]ightarrow|to)(?![a-z])", "="),
    (r"[^\S\n]+", " "),
    (r" ?\n\s*", "\n"),
    # Degrees, and units such as m^2.
    (r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ)", "°"),
    (rf"(?<=[{_LETTER}]) ?(?:\^ ?(?:\{{ ?[23] ?\}}|[23](?![0-9]))|[²³])", ""),
  )
]

_DIGITS = (
  r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+"
  r"|(?<![0-9])\.[0-9]++)"
)
_POWER_OF_TEN = (
  r"(?:[eE](?P<e>[-+]?[0-9]{1,2})(?![0-9A-Za-z])"
  r"| ?(?:\\times|\\cdot|[xX*]) ?10 ?\^ ?"
  r"(?:\{ ?(?P<braced>[-+]?[0-9]{1,2}) ?\}|(?P<bare>[-+]?[0-9]{1,2})(?![0-9])))"
)
_MAGNITUDES = {
  "hundred": 10**2,
  "thousand": 10**3,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "dozen": 12,
  "k": 10**3,
}
_VALUE = re.compile(
  r"(?P<sign>(?<![\w)}])[-+])?"  # only where it cannot be a subtraction
  r"(?:(?:(?P<whole>[0-9]{1,15})(?: | ?(?=\\)))?"
  rf"(?:\\frac ?\{{ ?(?P<above>-?{_DIGITS}) ?\}} ?\{{ ?(?P<below>{_DIGITS}) ?\}}"
  rf"|(?P<over>{_DIGITS}) ?/ ?(?P<under>{_DIGITS}))"
  rf"|(?P<number>{_DIGITS}){_POWER_OF_TEN}?)"
  r"(?P<magnitudes>(?:[kK]\b|(?: ?(?i:hundred|thousand|million|billion|trillion|dozen)s?\b)"
  r"{1,3})?)"
)

_ANY_VALUE = re.sub(r"\?P<\w+>", "?:", _VALUE.pattern)
_NEGATED = re.compile(  # numbers that are said not to be the answer
  r"(?:\b(?:can)?not|n't|\bnever|\brather than|\binstead of|\bas opposed to|\bunlike)"
  rf" (?:[A-Za-z]++ ){{0,3}}{_ANY_VALUE}",
  re.I,
)
_EQUALS = re.compile(r"(?<![!<>/])=")
_LIST = re.compile(r";|,(?![0-9]{3})|\b(?:or|and)\b")
_LEADING_MINUS = re.compile(r"^([(\[* ]*)(?:- ?|(?:negative|minus) )(?=[0-9.\\(])", re.I)

# Text that is allowed around the only number: letters, and some punctuation.
_BEFORE = re.compile(rf"(?:[{_LETTER}\s:,.(\[*'\"]|(?<=[a-z])-(?=[a-z]))*+")
_AFTER = re.compile(
  rf" ?+%?+°?+ ?+(?:[-/,]?+ ?+\(?+[{_LETTER}][{_LETTER}° ,;:&'\"()/.%-]*+)?+[.,;)\]\" ]*+"
)
# Words that change the number next to them.
_NUMBER_WORDS = (
  r"(?:(?:twen|thir|for|fif|six|seven|eigh|nine)ty|one|two|three|four|five|six|seven"
  r"|eight|nine|ten|eleven|twelve|zero|hundred|thousand|[mb]illion|dozen)\b(?!-)"
)
CHANGED_BEFORE = re.compile(
  rf"\b(?:(?:can)?not|never|neither|nor|no|wrong|incorrect)\b|n't\b|\b{_NUMBER_WORDS}"
  r"|\b(?:th[ae]n|least|most|up to|over|under|above|below|almost|nearly|between|from|half"
  r"|twice|thrice|double|triple|times|minus|negative|plus|square|squared|cubed?|root|or"
  r"|either)\b|(?:third|quarter|fourth|fifth|sixth|eighth|tenth|percent|%)s? of\b",
  re.I,
)
CHANGED_AFTER = re.compile(
  r"(?:\bnot|n't) (?:the |a )?(?:final )?(?:answer|correct|right|true|result|solution)\b"
  r"|\b(?:wrong|incorrect|or|plus|minus|point|below|squared|cubed|factorial|halves|thirds)\b"
  r"|\b(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths\b(?!-)"
  r"|\bhalf\b(?!-)|\ba (?:third|quarter)\b|^ ?[exyzn]\b|^ ?(?-i:[MBT])\b(?!&)"
  # 5 and thirty, 5 hours thirty minutes; but not 5 in thirty days.
  rf"|(?:^|\b(?:and|hours?|minutes?|dollars?|pounds?|feet),?) ?{_NUMBER_WORDS}",
  re.I,
)

# Text that is not allowed around the last number of prose, in its line.
_JOINED = re.compile(
  # Another number: a range, a list or a calculation.
  rf"[0-9][%°]?(?: (?:[{_LETTER}]++ ){{0,3}}(?:or|and|to)| of(?: the)?| ?(?:&|[-+*/,x]"
  r"|\\times|\\cdot|\\div)|[:.]|) ?[(*]*$"
  r"|[\w\\]$|[\^_<>≠≤≥√±][ {(]*$|[!/<>]= *$|\\(?:neq?|leq?|geq?|lt|gt|pm) ?$"
  # A minus that is no bullet: not at the start of its line.
  r"|(?:[=:]|\b(?:is|are|was|were|be|equals?|makes?|gives?|leaves?|gets?))"
  r"[ ({\[*]*- [({\[*]*$|-[({\[*]+$"
  r"|(?:\\frac|\\sqrt|\}) ?\{ ?$"
)
_CONTINUED = re.compile(
  r"[ })]*[\^¹²³⁰-⁹?]| ?(?:[+!]=|\+|[-*/] ?[(\\]|\\(?!text|end)[a-z])|_"
)
_WORDS_BEFORE = re.compile(rf"(?:[{_LETTER}'%]++ ?){{0,3}}$")
_WORDS_AFTER = re.compile(rf"(?: ?[{_LETTER}'&-]++){{0,5}}")
_WINDOW = 60  # characters on each side

_UNIT = re.compile(rf"(?:(?<=[0-9)}}]) ?[%°]? ?[{_LETTER}][{_LETTER} ]*+)?\.?$")
_RANGE = re.compile(r"-?[0-9.]+ ?- ?[0-9.]+")


def read(text: str) -> fractions.Fraction | None:
  text = _side(text)
  values = list(_VALUE.finditer(text))
  if len(values) == 1:
    before, after = text[: values[0].start()], text[values[0].end() :]
    if _BEFORE.fullmatch(before) and _AFTER.fullmatch(after):
      changed = CHANGED_BEFORE.search(before) or CHANGED_AFTER.search(after)
      return None if changed else _value(values[0])
  unit = _UNIT.search(text)
  text = re.sub(r",(?=[0-9]{3}(?![0-9]))", "", text[: unit.start()])
  if _RANGE.fullmatch(text) or CHANGED_AFTER.search(unit[0]):
    return None
  return arithmetic.value(text)


def read_last(text: str) -> fractions.Fraction | None:
  """The last number of a text; None if its context makes it no answer."""
  if len(text) > _MAX_LENGTH:
    text = text[-_MAX_LENGTH:].partition(" ")[2]  # no cut through a number
  text = _NEGATED.sub(" ", _clean(text))
  values = list(_VALUE.finditer(text))
  if not values:
    return None
  last = values[-1]
  before, after = text[: last.start()][-_WINDOW:], text[last.end() :][:_WINDOW]
  if _JOINED.search(before) or _CONTINUED.match(after):
    return None
  if CHANGED_BEFORE.search(_WORDS_BEFORE.search(before)[0]):
    return None
  if CHANGED_AFTER.search(_WORDS_AFTER.match(after)[0]):
    return None
  return _value(last)


def _clean(text: str) -> str:
  """Normalises notation; removes markup, spacing commands and currency."""
  text = _without_text_commands(text.replace("\\\\", " ").translate(_CHARACTERS))
  for pattern, replacement in _REPLACEMENTS:
    text = pattern.sub(replacement, text)
  return text


def _without_text_commands(text: str) -> str:
  r"""Replaces \text{...} and the like by their content; they may nest."""
  pieces, is_text, end = [], [], 0
  for brace in _BRACE.finditer(text):
    if brace[0] != "}":
      is_text.append(brace[1] is not None)
      drop = is_text[-1]
    else:
      drop = is_text.pop() if is_text else False
    if drop:
      pieces += [text[end : brace.start()], " "]
      end = brace.end()
  return "".join([*pieces, text[end:]])


def _side(text: str) -> str:
  """The right side of an equation, or the whole text; "" for lists and long texts."""
  if len(text) > _MAX_LENGTH:
    return ""
  text = _NEGATED.sub(" ", " ".join(_clean(text).split()))
  first, *others = _EQUALS.split(text)
  if any(_LIST.search(side) for side in others[:-1]):
    return ""
  text = others[-1] if others else first
  if "\\" not in text and "^" not in text:  # braces that mean nothing
    text = text.replace("{", " ").replace("}", " ")
  return _LEADING_MINUS.sub(r"\1-", " ".join(text.split()))


def _value(match: re.Match) -> fractions.Fraction | None:
  part = match.groupdict()
  if part["number"]:
    value = _decimal(part["number"])
    power = part["e"] or part["braced"] or part["bare"] or "0"
    factor = fractions.Fraction(10) ** int(power)
  else:
    value = _decimal(part["above"] or part["over"])
    factor = _decimal(part["below"] or part["under"])
    factor = 1 / factor if factor else None
  if value is None or factor is None:
    return None
  value *= factor
  if part["whole"]:
    if not 0 <= value < 1:  # two numbers
      return None
    value += int(part["whole"])
  for word in re.findall("[a-z]+", part["magnitudes"].lower()):
    value *= _MAGNITUDES[word.removesuffix("s")]
  return -value if part["sign"] == "-" else value


def _decimal(text: str) -> fractions.Fraction | None:
  whole, _, decimals = text.replace(",", "").partition(".")
  sign = -1 if whole.startswith("-") else 1
  whole, decimals = whole.lstrip("-0"), decimals.rstrip("0")
  if len(whole) + len(decimals) > _MAX_DIGITS:
    return None
  return sign * fractions.Fraction(f"{whole or 0}.{decimals or 0}")
