r"""Units of measurement in words and symbols: km/h, square centimeters, m^2, red apples.

A word that is not known is a unit by itself. `read` refuses words that say something else
about their number, such as tenths, or more, squared.
"""

from collections.abc import Set
import fractions
import re
from typing import NamedTuple

from tlt_jax.tasks import written_number

Fraction = fractions.Fraction


class Unit(NamedTuple):
  powers: dict[str, int]  # of dimensions
  factor: Fraction  # base units of the dimensions in one unit
  scale: Fraction  # what words such as million multiply the number by


NONE = Unit({}, Fraction(1), Fraction(1))

_MEASURES = {  # of a dimension: how many base units a unit has, and its names
  "length": "1 m meter metre, 1000 km kilometer kilometre, 1/100 cm centimeter centimetre,"
  " 1/1000 mm millimeter millimetre, 381/1250 ft foot feet, 127/5000 in inch inches,"
  " 1143/1250 yd yard, 201168/125 mi mile",
  "mass": "1 kg kilogram, 1/1000 g gram, 1/1000000 mg milligram, 1000 ton tonne, 1 kilo",
  "weight": "1 lb pound, 1/16 oz ounce",
  "time": "1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, 604800 week",
  "years": "12 year yr, 1 month",
  "volume": "1 l L liter litre, 1/1000 ml milliliter millilitre",
  "money": "1 dollar usd, 1/100 cent",
  "angle": "1 rad radian",
  "": "1000000 million M, 1000000000 billion B, 1000 thousand k K, 100 hundred, 12 dozen",
}
_UNITS = {
  name: (dimension, Fraction(words.split()[0]))
  for dimension, units in _MEASURES.items()
  for words in units.split(",")
  for name in words.split()[1:]
}
_UNITS |= {name + "s": unit for name, unit in _UNITS.items() if len(name) > 1}
_SHORT = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "per": "/", "sq": "square"}
_POWERS = {"square": 2, "squared": 2, "cubic": 3, "cubed": 3}
INDISPENSABLE = {"am", "pm", "bc", "ad"}
_NO_UNITS = set(  # words that say something about the number
  "and no nor neither either more less fewer than least most about of if when where for mod"
  " not but is are base to approx approximately".split()
)
# Words that are units also without a number before them.
WORDS: Set[str] = {name for name in (*_UNITS, *_SHORT) if len(name) > 1}


def read(text: str) -> Unit:
  """Raises ValueError if the text is no unit."""
  text = re.sub("[a-zA-Z]{2,}", lambda word: word[0].lower(), text)
  text = re.sub(r"[.{}()]", "", text)
  for short, long in _SHORT.items():
    text = re.sub(rf"\b{short}\b", long, text)
  words = " ".join(word for word in text.split() if _UNITS.get(word, "?")[0])
  if written_number.CHANGED_AFTER.search(words):  # 5 tenths
    raise ValueError(f"{text!r} is no unit")
  powers, factor, scale = {}, Fraction(1), Fraction(1)
  sign, next_power, last = 1, 1, None
  for word in re.findall(r"[^\W\d_]+|\^ ?-?[0-9]+|\S", text):
    if word == "/":
      sign = -1
    elif word in ("square", "cubic") or (word in _POWERS and last is None):
      next_power = _POWERS[word]
    elif word in _POWERS or re.fullmatch(r"\^ ?-?[0-9]+", word):
      power = _POWERS.get(word) or int(word[1:])
      if last is None or abs(power) > 9:
        raise ValueError(f"{text!r} is no unit")
      powers[last[0]] += last[2] * (power - 1)
      factor *= last[1] ** (last[2] * (power - 1))
      last = None
    elif word in _NO_UNITS or not word[0].isalpha():
      raise ValueError(f"{text!r} is no unit")
    else:
      plain = word.removesuffix("s") if len(word) > 3 else word
      dimension, size = _UNITS.get(word, (plain, Fraction(1)))
      if not dimension:
        scale *= size
        continue
      powers[dimension] = powers.get(dimension, 0) + sign * next_power
      factor *= size ** (sign * next_power)
      last, next_power = (dimension, size, sign), 1
  if next_power != 1:  # 5 squared
    raise ValueError(f"{text!r} is no unit")
  return Unit(powers, factor, scale)
