r"""Mathematics whose answer is a LaTeX expression: number, interval, matrix, word...

The response's final answer is the content of the last \boxed{...} or the line after the
last ####, by `gsm8k.final_answer`, and otherwise the last line. It is right if it
is mathematically equal to the gold answer: \frac12, 0.5 and \dfrac{2}{4} are, so are
(x+1)^2 and x^2+2x+1, and {1,2} and {2,1}, but not (1,2) and (2,1).

What `expression` cannot read to its last token is right only if it is spelled like the gold
answer. So a wrong answer is not paid for what a parser would have skipped; a right one in a
form that is not known here is refused.

    \{1,2\}  (1,2)  [1,2)  1, 2  \pm 3      sets, tuples, intervals, lists that may repeat
    x = 3  3  x > 3  (3,\infty)             a name may be left out, but not be another one
    5 km  5000 m  5  5 apples               a unit may be left out, but not be another one
    \begin{pmatrix}...  \langle 1,2\rangle  matrices and vectors
    \text{(C)}  C  \text{No solution}       choices and words
"""

import re

from tlt_jax.tasks import expression
from tlt_jax.tasks import gsm8k
from tlt_jax.tasks import units
from tlt_jax.tasks import written_number

_LONGEST = 1000  # characters of a final answer
Item = tuple  # a kind of answer and its parts
_INFINITY = ("value", ("infinity",), None)
_MINUS_INFINITY = ("value", ("neg", ("infinity",)), None)


def score(prompt: object, response: str, answer: object) -> float:
  r"""1.0 if the final answer equals the gold one, perhaps in \boxed{...} or after ####."""
  del prompt
  text = gsm8k.gold_text(answer)
  marked = gsm8k.final_answer(text)
  gold = (text if marked is None else marked).strip()
  if not gold:
    raise ValueError(f"gold answer {text[-60:]!r} is empty")
  final = gsm8k.final_answer(response)
  if final is None:
    line = (gsm8k.after_thoughts(response).strip().splitlines() or [""])[-1]
    return float(_is_stated(gold, line.strip()))
  return float(is_equal(gold, final.strip()))


def is_equal(gold: str, final: str) -> bool:
  """Whether two LaTeX texts are equal."""
  if not final or len(final) > _LONGEST + len(gold):
    return False
  of_gold, of_final = _tokens(gold), _tokens(final)
  if _spelling(of_gold) == _spelling(of_final):
    return any(token.strip() for token in of_gold)
  try:
    expected, found = _read(of_gold), _read(of_final)
    if _same(expected, found):
      return True
    if expected[0] == "value" and expected[2]:  # 5m after 5\text{ m}
      return _same(expected, _read(_tokens(_LETTER_UNIT.sub(r"\1\\text{\2}", final))))
  except (expression.Unread, RecursionError):
    pass
  return False


def _is_stated(gold: str, line: str) -> bool:
  """Whether the last line of a response states the answer, alone or in a sentence."""
  if len(line) > 4 * _LONGEST:
    line = line[-4 * _LONGEST :].partition(" ")[2]
  spans = list(_SPAN.finditer(line))
  if not spans:
    number = written_number.read_last(line)
    if number is not None and is_equal(gold, f"{number.numerator}/{number.denominator}"):
      return True
    stated = _STATEMENT.match(line)
    return is_equal(gold, line) or bool(stated and is_equal(gold, line[stated.end() :]))
  start = len(spans) - 1
  while start and _JOINED.fullmatch(line[spans[start - 1].end() : spans[start].start()]):
    start -= 1
  before = line[: spans[start].start()].split()[-3:]
  if written_number.CHANGED_BEFORE.search(" ".join(before)):
    return False
  return is_equal(gold, line[spans[start].start() :])


_SPAN = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]")
_JOINED = re.compile(r"\s*(?:,|;|,?\s*(?:and|or))\s*")
_STATEMENT = re.compile(r".*(?:\b(?:is|are|equals)\b|:\s)\s*")
_LETTER_UNIT = re.compile(r"(?<=[0-9}.])(\s*)([a-zA-Z]{1,2}(?:[/^]+[a-z0-9{}]+)*)$")

# Tokens.

_CHARACTERS = str.maketrans(
  {chr(0xFF10 + digit): str(digit) for digit in range(10)}  # full width
  | {"\u2212": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi "}
  | {"∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm "}
  | {"∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "θ": r"\theta "}
  | {"²": "^2", "³": "^3", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34"}
)
_FONT = re.compile(
  r"\\(text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|[mhf]box|boldsymbol|bm)"
  r"\s*\{([^{}]*)\}"
)
_SPELLINGS = (
  (r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|,\\!\s*)(?=[0-9]{3}(?![0-9]))", ""),  # 10\,000
  (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])|\\!", ""),
  (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\[()\[\]]|(?<!\\)\$", " "),
  (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
  (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
  (r"\\mathbb\s*\{?\s*R\s*\}?", r"\\reals "),
  (r"(\\circ\s*\}?)\s*([CF])\b", r"\1\\text{\2}"),
  (r"\\uppi(?![a-zA-Z])", r"\\pi "),
  (r"(?<![0-9])([0-9]+\.)\(([0-9]+)\)", r"\1\\overline{\2}"),  # 0.(3)
  (r"\\(?:mathrm|mathbf|rm)\s+([a-zA-Z])(?![a-zA-Z])", r" \1 "),
  (r"\{\\rm\s+([^{}]*)\}", r"\\mathrm{\1}"),
  (">=", r"\\geq "),
  ("<=", r"\\leq "),
  (r"\\hat\s*\{?\\([ij])math\}?|\\hat\s*\{\\math(?:bf|rm)\{([ijk])\}\}", r"\\vec{\1\2}"),
)
_SYNONYMS = {
  "\\le": "\\leq", "\\leqslant": "\\leq", "\\ge": "\\geq", "\\geqslant": "\\geq",
  "\\ne": "\\neq", "\\lt": "<", "\\gt": ">", "\\dots": "\\ldots", "\\varnothing":
  "\\emptyset", "\\vert": "|", "\\lbrace": "\\{", "\\rbrace": "\\}",
  "\\land": "\\text{and}", "\\lor": "\\text{or}", "\\text{infinity}": "\\infty",
  "\\text{percent}": "\\%",
  "\\text{percentage}": "\\%", "\\text{degrees}": "°", "\\text{degree}": "°",
  "\\degree": "°", "\\bigcup": "\\cup", "\\epsilon": "\\varepsilon",
}  # fmt: skip
_CLOCK = re.compile(r"(?<=[0-9])\s*(?:([AP])M|([ap])\.m\.)(?![a-zA-Z])")
_PLAIN = re.compile(r"[-+(.]*+[0-9]|[^a-zA-Z]*$|(?:\W*(?:and|or|[A-Z])\b\W*)+$")
_THOUSANDS = re.compile(r"(?<![\w.,{])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9,])")
_WORDS = {"and", "or", "yes", "no", "odd", "not", "all", "none", "true", "dne"}


def _tokens(text: str) -> list[str]:
  text = text.translate(_CHARACTERS)
  for spelling, plain in _SPELLINGS:
    text = re.sub(spelling, plain, text)
  for _ in range(2):  # they nest
    text = _FONT.sub(_without_font, text)
  text = _CLOCK.sub(r"\\text{\1\2m}", text)
  text = _THOUSANDS.sub(_without_commas, text.strip().rstrip(". "))
  found = expression.tokens(text, _WORDS | units.WORDS)
  found = [
    _SYNONYMS.get(token.lower() if token.startswith("\\text") else token, token)
    for token in found
  ]
  if len(found) == 1 and re.fullmatch(r"\\text\{(?:[a-z]|[A-Z]+)\}", found[0]):
    return found if found[0][6:-1].lower() in _WORDS else [found[0][6:-1]]
  return found


def _without_font(match: re.Match) -> str:
  font, text = match[1], " ".join(match[2].replace("~", " ").split())
  text = re.sub(r"\b([a-zA-Z])\.(?=[a-zA-Z]\b|$)", r"\1", text)  # a.m.
  choice = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", text)
  if font in ("mathbf", "boldsymbol", "bm"):
    return rf"\vec{{{text}}}" if text in ("i", "j", "k") else f" {text} "
  if choice and text in ("e", "i", "d") and not font.startswith(("text", "mbox")):
    return f" {text} "
  if choice:
    return rf"\text{{{choice[1]}}}"
  if _PLAIN.match(text):
    return f" {text} "
  if text in expression.FUNCTIONS:
    return f"\\{text} "
  if font.startswith("operatorname"):
    return "\\" + re.sub("[^a-zA-Z]", "", text) + " "
  return rf"\text{{{text}}}"


def _without_commas(match: re.Match) -> str:
  before = match.string[: match.start()]
  depth = len(re.findall(r"[(\[]|\\\{", before)) - len(re.findall(r"[)\]]|\\\}", before))
  return match[0] if depth > 0 else match[0].replace(",", "")


def _spelling(tokens: list[str]) -> str:
  text = " ".join(
    _words([token]) if token.startswith("\\text") else token for token in tokens
  )
  return re.sub(r"\{ (\S+) \}", r"\1", text)


def _words(tokens: list[str]) -> str:
  """Words without what does not change them: case, a plural, punctuation, an article."""
  text = " ".join(token.removeprefix("\\text{").removesuffix("}") for token in tokens)
  text = re.sub(r"(?<=[^\W\d_])[.'’]|\b(?:an?|the|A(?= [a-z])|The)\b", "", text)
  words = re.findall(r"[^\W_]+|\S", text.lower())
  if not re.search("[0-9]", text):
    words = [word for word in words if word not in ",:-"]
  return " ".join(word.removesuffix("s") if len(word) > 3 else word for word in words)


# Structure.

_OPENING = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle"}
_DEEPER = {*_OPENING, "{", "\\lfloor", "\\lceil", "\\lvert"}
_HIGHER = {*_OPENING.values(), "}", "\\rfloor", "\\rceil", "\\rvert"}
_SEPARATORS = {",", ";", "\\text{and}", "\\text{or}"}
_RELATIONS = {"=", "<", ">", "\\leq", "\\geq", "\\neq", "\\in"}
_MIRRORED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}


def _split(tokens: list[str], at: set[str]) -> tuple[list[list[str]], list[str]]:
  """The parts between tokens of `at` outside of brackets, and those tokens."""
  parts, between, depth = [[]], [], 0
  for token in tokens:
    depth += token in _DEEPER or token.startswith("\\begin{")
    depth -= token in _HIGHER or token.startswith("\\end{")
    if not depth and token in at:
      parts.append([])
      between.append(token)
    else:
      parts[-1].append(token)
  return parts, between


def _read(tokens: list[str]) -> Item:
  parts, separators = _split(_without_last_comma(tokens), _SEPARATORS)
  items = [item for part in parts for item in _expanded(part)]
  if len(items) == 1:
    return items[0]
  if items[0][0] == "named" and all(item[0] == "value" for item in items[1:]):
    items[1:] = [("named", items[0][1], item, None) for item in items[1:]]
  if set(separators) == {"\\text{or}"} and all(
    item[:2] == ("named", items[0][1]) and item[2][0] in ("bracket", "union")
    for item in items
  ):
    return ("named", items[0][1], ("union", [item[2] for item in items]), None)
  return ("list", items)


def _without_last_comma(tokens: list[str]) -> list[str]:
  """1, 2, and 3 as 1, 2 and 3."""
  joints = ("\\text{and}", "\\text{or}")
  return [
    token
    for place, token in enumerate(tokens)
    if token != "," or tokens[place + 1 : place + 2] not in ([joint] for joint in joints)
  ]


def _expanded(tokens: list[str]) -> list[Item]:
  r"""One item, or two of \pm."""
  if "\\pm" not in tokens and "\\mp" not in tokens:
    return [_item(tokens)]
  signs = {"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"}
  return [_item([sign.get(token, token) for token in tokens]) for sign in signs]


def _item(tokens: list[str]) -> Item:
  sides, relations = _split(tokens, _RELATIONS)
  if relations:
    return _relation(sides, relations)
  members, unions = _split(tokens, {"\\cup"})
  if unions:
    return ("union", [_item(member) for member in members])
  if tokens == ["\\emptyset"]:
    return ("set", [])
  if tokens == ["\\reals"]:
    return ("bracket", "(", [_MINUS_INFINITY, _INFINITY], ")")
  if any(token.startswith("\\begin{") for token in tokens):
    return _matrix(tokens)
  if tokens and tokens[0] in _OPENING and tokens[-1] in (")", "]", "\\}", "\\rangle"):
    inside = tokens[1:-1]
    parts, commas = _split(inside, {",", ";"})
    if _is_balanced(inside) and (commas or tokens[0] in ("\\{", "\\langle")):
      items = [item for part in parts if inside for item in _expanded(part)]
      if tokens[0] == "\\{" and tokens[-1] == "\\}":
        return ("set", items)
      plain = {"\\langle": "(", "\\rangle": ")"}
      return (
        "bracket",
        plain.get(tokens[0], tokens[0]),
        items,
        plain.get(tokens[-1], tokens[-1]),
      )
  if tokens and tokens[0].startswith("\\text"):
    if all(token.startswith("\\text") or token.isalpha() for token in tokens):
      return ("words", _words(tokens))
  return _quantity(tokens)


def _is_balanced(tokens: list[str]) -> bool:
  depth = 0
  for token in tokens:
    depth += (token in _DEEPER) - (token in _HIGHER)
    if depth < 0:
      return False
  return not depth


_CURRENCIES = {"\\$": "\\text{dollar}", "€": "\\text{euro}", "£": "\\text{sterling}"}


def _quantity(tokens: list[str]) -> Item:
  sign = next((token for token in tokens[:2] if token in _CURRENCIES), None)
  if sign:
    tokens = [token for token in tokens if token != sign] + [_CURRENCIES[sign]]
  number = next((k for k, token in enumerate(tokens) if token.startswith("\\text")), None)
  node = expression.read(tokens[:number])
  if number is None:
    return ("value", node, None)
  text = "".join(
    f" {token[6:-1]} " if token.startswith("\\text") else token for token in tokens[number:]
  )
  try:
    return ("value", node, units.read(text))
  except ValueError:
    raise expression.Unread from None


def _matrix(tokens: list[str]) -> Item:
  """A matrix, perhaps in brackets and after a factor."""
  begin = next(k for k, token in enumerate(tokens) if token.startswith("\\begin{"))
  environment = re.match(r"\\begin\{([a-z]+)", tokens[begin])[1]
  factor, rest = tokens[:begin], tokens[begin + 1 :]
  closing = _OPENING.get(factor[-1]) if factor else None
  if closing in (")", "]") and rest[-1] == closing:
    factor, rest = factor[:-1], rest[:-1]
  if not rest or not rest[-1].startswith("\\end{" + environment):
    raise expression.Unread
  rows = [row for row in _split(rest[:-1], {"\\\\"})[0] if row]
  entries = [[expression.read(entry) for entry in _split(row, {"&"})[0]] for row in rows]
  if factor:
    factor = expression.read(factor)
    entries = [[("*", factor, entry) for entry in row] for row in entries]
  if environment in ("pmatrix", "bmatrix", "array"):
    environment = "matrix"
  return (environment, [[("value", entry, None) for entry in row] for row in entries])


def _name(tokens: list[str]) -> str | None:
  """What stands for an unknown: x, f(x), \\text{Area}."""
  if tokens and all(token.startswith("\\text") for token in tokens):
    return _words(tokens)
  text = "".join(tokens)
  if re.fullmatch(r"[a-zA-Z](\^\{-1\}|'*)\([a-zA-Z](,[a-zA-Z])*\)", text):
    return text
  if re.fullmatch(r"\([a-zA-Z](,[a-zA-Z])+\)", text):  # (y,x) = (1,2) is no (1,2)
    return text if text[1:-1:2] == "".join(sorted(text[1:-1:2])) else None
  try:
    node = expression.read(tokens)
  except expression.Unread:
    return None
  return node[1] if node[0] == "symbol" and not node[1][0].isdigit() else None


def _relation(sides: list[list[str]], relations: list[str]) -> Item:
  if set(relations) == {"="}:
    return _equation(sides)
  if len(relations) == 1 and relations[0] == "\\in":
    name = _name(sides[0])
    if name is None:
      raise expression.Unread
    return ("named", name, _item(sides[1]), None)
  bounds = []
  for left, relation, right in zip(sides[:-1], relations, sides[1:], strict=True):
    if relation in (">", "\\geq"):
      left, relation, right = right, _MIRRORED[relation], left
    bounds.append((left, relation, right))
  if any(relation in ("=", "\\in") for relation in relations):
    raise expression.Unread
  if len(bounds) == 2 and bounds[0][2] != bounds[1][0]:
    bounds.reverse()  # 3 > x > 1
  named = _as_interval(bounds)
  if named:
    return named
  differences = []
  for left, relation, right in bounds:
    difference = ("-", expression.read(right), expression.read(left))
    differences.append(("inequality", difference, relation))
  return differences[0] if len(differences) == 1 else ("list", differences)


def _as_interval(bounds: list[tuple]) -> Item | None:
  """The values of the only variable, where constants bound it."""
  sides = [side for left, _, right in bounds for side in (left, right)]
  names = {_name(side) for side in sides} - {None}
  if len(names) != 1 or len(bounds) > 2:
    return None
  (name,) = names
  if len(bounds) == 2 and _name(bounds[0][2]) != name:
    return None
  low, high, opening, closing = _MINUS_INFINITY, _INFINITY, "(", ")"
  for left, relation, right in bounds:
    is_upper = _name(left) == name
    value = _quantity(right if is_upper else left)
    if expression.symbols(value[1]):
      return None
    if relation == "\\neq":
      halves = [(_MINUS_INFINITY, value), (value, _INFINITY)]
      parts = [("bracket", "(", list(half), ")") for half in halves]
      return ("named", name, ("union", parts), None)
    if is_upper:
      high, closing = value, "]" if relation == "\\leq" else ")"
    else:
      low, opening = value, "[" if relation == "\\leq" else "("
  return ("named", name, ("bracket", opening, [low, high], closing), None)


def _equation(sides: list[list[str]]) -> Item:
  names = [_name(side) for side in sides]
  if names[0] is None and names[-1] is not None:
    sides, names = sides[::-1], names[::-1]
  if names[0] is None and len(sides) == 2:
    left, right = (expression.read(side) for side in sides)
    difference = ("-", left, right)
    if expression.symbols(difference):
      return ("equation", difference)
  items = [_item(side) for side in (sides if names[0] is None else sides[1:])]
  if any(not _same(items[-1], item) for item in items[:-1]):  # 48+24 = 72
    raise expression.Unread
  if names[0] is None:
    return items[-1]
  try:
    difference = ("-", expression.read(sides[0]), items[-1][1])
  except expression.Unread:
    difference = None
  is_line = items[-1][0] == "value" and difference and expression.symbols(items[-1][1])
  return ("named", names[0], items[-1], difference if is_line else None)


# Comparison.

_EMPTY = {
  _words([text]) for text in ("no solution", "no real solution", "none", "empty set")
}
_INDEX = re.compile("_[0-9]+$")  # x_1 and x_2 as values of x


def _same(gold: Item, final: Item) -> bool:
  match gold, final:
    case ("value", *_), ("value", *_):
      return _same_quantity(gold, final)
    case ("named", name, inside, difference), ("named", other, others, by):
      if name == other or _INDEX.sub("", name) == other or name == _INDEX.sub("", other):
        return _same(inside, others)
      return bool(difference and by) and expression.proportional(difference, by)
    case ("named", _, _, difference), ("equation", by) if difference:
      return expression.proportional(difference, by)
    case ("equation", difference), ("named", _, _, by) if by:
      return expression.proportional(difference, by)
    case ("equation", difference), ("equation", by):
      return expression.proportional(difference, by)
    case ("named", _, inside, _), _:
      return _same(inside, final)
    case _, ("named", _, inside, _):
      return _same(gold, inside)
    case ("inequality", difference, relation), ("inequality", by, other):
      return relation == other and expression.proportional(
        difference, by, is_positive=relation != "\\neq"
      )
    case ("words", words), ("words", others):
      return words == others
    case (("words", words), ("set", [])) | (("set", []), ("words", words)):
      return words in _EMPTY
    case ("list", items), ("list", others):
      names = [
        {_INDEX.sub("", of[1]) for of in side if of[0] == "named"}
        for side in (items, others)
      ]
      if bool(names[0]) != bool(names[1]) and len(names[0] | names[1]) > 1:
        return _same_in_order(items, others)
      return _match(items, others)
    case ("list", items), ("set", others):
      return _match(items, others)
    case ("set", items), ("list" | "set", others):
      return all(any(_same(item, other) for other in others) for item in items) and all(
        any(_same(item, other) for item in items) for other in others
      )
    case ("union", items), ("union", others):
      return _match(items, others)
    case ("bracket", opening, items, closing), ("bracket", other, others, end):
      return (opening, closing) == (other, end) and _same_in_order(items, others)
    case ("bracket", "(", items, ")"), ("list", others):
      return _same_in_order(items, others)
    case ("list", items), ("bracket", "(", others, ")"):
      return _same_in_order(items, others)
    case ("matrix", rows), ("bracket", "(", others, ")") if _is_vector(rows):
      return _same_in_order(sum(rows, []), others)
    case ("bracket", "(", items, ")"), ("matrix", rows) if _is_vector(rows):
      return _same_in_order(items, sum(rows, []))
    case (kind, [[*_], *_] as rows), (other, [[*_], *_] as others):
      shapes = [[len(row) for row in of] for of in (rows, others)]
      if kind != other or shapes[0] != shapes[1]:
        return False
      return _same_in_order(sum(rows, []), sum(others, []))
    case ("set", [item]), _:
      return _same(item, final)
    case _, ("set", [item]):
      return _same(gold, item)
  return False


def _is_vector(rows: list[list[Item]]) -> bool:
  return len(rows) == 1 or all(len(row) == 1 for row in rows)


def _same_in_order(items: list[Item], others: list[Item]) -> bool:
  return len(items) == len(others) and all(map(_same, items, others))


def _match(items: list[Item], others: list[Item]) -> bool:
  """Whether each one has its own equal one."""
  if len(items) != len(others):
    return False
  others = list(others)
  for item in items:
    place = next((k for k, other in enumerate(others) if _same(item, other)), None)
    if place is None:
      return False
    del others[place]
  return True


def _same_quantity(gold: Item, final: Item) -> bool:
  unit, other = (item[2] or units.NONE for item in (gold, final))
  nodes = []
  has_both = bool(unit.powers and other.powers)
  if has_both and unit.powers != other.powers:
    return False
  for item, of, beside in ((gold, unit, final), (final, other, gold)):
    if not has_both and of.powers and expression.has_unit(beside[1]):  # 60 cm, 60 degrees
      return False
    if not has_both and units.INDISPENSABLE & of.powers.keys():
      return False
    size = of.factor * of.scale if has_both else of.scale
    nodes.append(item[1] if size == 1 else ("*", item[1], ("number", size)))
  return expression.equal(*nodes)
