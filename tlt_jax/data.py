"""Prompts: their sources, and batches of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import hashlib
import logging
import math
import pathlib
from typing import Any, Literal, TypeVar

import grain
import pyarrow as pa
import pyarrow.parquet as pq

from tlt_jax import calls
from tlt_jax import fields
from tlt_jax import json_objects
from tlt_jax import named
from tlt_jax import ranges

_END = object()
Item = TypeVar("Item")


class DataError(ValueError):
  """Invalid data; the message names the place and the remedy.

  `argument` is that of a source which is at fault, "" if it is none.
  """

  def __init__(self, message: str, argument: str = ""):
    super().__init__(message)
    self.argument = argument


def source(source: str, **options: Any) -> Sequence[dict]:
  """The records that `package.module.name(**options)` returns, by index.

  Raises:
    DataError: the name does not exist, takes other arguments, or cannot read its files
  """
  try:
    return find(source)(**options)
  except TypeError as e:
    raise DataError(f"{source!r}: {e}", "source") from e
  except OSError as e:
    raise DataError(f"{source!r} cannot be read: {e}") from e


def find(source: str) -> Callable[..., Sequence[dict]]:
  try:
    return named.load(source)
  except named.NameNotFound as e:
    raise DataError(f"source {source!r}: {e}") from e


def load_prompts(
  path: str | pathlib.Path,
  prompt_field: str = "",
  answer_field: str | None = "",
  size: ranges.Large | None = None,
  keep: str = "",
  longest: ranges.Large | None = None,
  split: Literal["all", "train", "held_out"] = "all",
  share: ranges.ShareAboveZero = 0.05,
) -> Sequence[dict]:
  """The records of a .jsonl or .parquet file, every one checked, in file order.

  A prompt is a string or a list of chat messages ({"role", "content"}). Blank lines are
  skipped. The place is for error messages: "train.jsonl, line 17".

  Args:
    path: file of records, .jsonl or .parquet; '' in held_out: `share` of the prompts
    prompt_field: name of the field that holds a record's prompt, with dots for nested
      ones ('prompt.0.content'); '': the first of `fields.PROMPTS` that there is
    answer_field: name of the field that holds a record's answer, with dots for nested ones
      ('reward_model.ground_truth'); '': the first of `fields.ANSWERS` that there is; None:
      every answer is ''
    size: most records that are returned, the first of the file; None: all
    keep: dotted name of a function that is given a record with all its fields and says
      whether it is kept; '': all are
    longest: characters of a prompt, of all messages together; records with longer ones are
      left out; None: none is. (The limit in tokens is rollout.max_prompt)
    split: part of the records: all, those to train on, or those that are held out; the
      latter two share no prompt
    share: of the different prompts that is held out, chosen by a hash of the prompt
  Raises:
    DataError: no such file, another format, a broken or incomplete record
  """
  ranges.check(load_prompts, locals())
  if not str(path):
    raise DataError(
      "names no file; '' in held_out needs prompts.path, a share of which it is", "path"
    )
  path = pathlib.Path(path)
  readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
  if path.suffix not in readers:
    raise DataError(
      f"{path}: prompts are read from {' or '.join(readers)} files, not from "
      f"{path.suffix or 'a file without a suffix'!r} (pandas: "
      "read_csv(FILE).to_parquet(NAME))",
      "path",
    )
  if not path.is_file():
    raise DataError(f"{path}: no such file (in folder {path.absolute().parent})", "path")
  is_kept = _filter(keep)
  prompts = _Field("prompt", prompt_field, fields.PROMPTS)
  answers = None if answer_field is None else _Field("answer", answer_field, fields.ANSWERS)
  records, left_out = [], 0
  for place, record in readers[path.suffix](path):
    name, prompt = prompts.of(place, record)
    prompt = fields.as_prompt(prompt, name)
    answer = "" if answers is None else fields.plain(answers.of(place, record)[1])
    if problem := prompt_problem(prompt):
      raise DataError(f"{place}: field {name!r} {problem}", "prompt_field")
    too_long = longest is not None and _characters(prompt) > longest
    if too_long or not is_kept(place, record):
      left_out += 1
      continue
    records.append({"prompt": prompt, "answer": answer, "place": place})
  if not records:
    of = f" but {left_out:,} that keep and longest leave out" if left_out else ""
    raise DataError(f"{path}: holds no records{of}", "path")
  logging.info("%s: %s", path, ", ".join(x.taken for x in (prompts, answers) if x))
  if split != "all":
    records = _split(records, split, share, path)
  return records[:size]


class _Field:
  """Where records have their prompt or their answer: as the first one has it."""

  def __init__(self, kind: str, name: str, groups: Sequence[Sequence[str]]):
    self._kind, self._groups = kind, groups
    self._names = [name] if name else []

  @property
  def taken(self) -> str:
    return f"{self._kind}s are field {self._names[0]!r}"

  def of(self, place: str, record: dict) -> tuple[str, Any]:
    """The field's name and value."""
    if not self._names:
      self._names = fields.candidates(record, self._groups)
    if not self._names:
      raise DataError(
        f"{no_field(place, self._kind, record)}; name the one that holds the {self._kind}"
        + (" (None: there is none)" if self._kind == "answer" else ""),
        f"{self._kind}_field",
      )
    first, *others = self._names
    try:
      value = fields.look_up(record, first)
    except KeyError as e:
      raise DataError(no_field(place, first, record), f"{self._kind}_field") from e
    for other in others:
      if not fields.has(record, other) or fields.look_up(record, other) != value:
        raise DataError(
          f"{place}: {first!r} and {other!r} differ, and either may be the {self._kind}; "
          f"name one of {', '.join(fields.names(record))}",
          f"{self._kind}_field",
        )
    return first, value


def _split(records: list[dict], split: str, share: float, path: pathlib.Path) -> list[dict]:
  keys = [_question(record["prompt"]) for record in records]
  by_hash = sorted(set(keys), key=lambda key: hashlib.sha256(key).digest())
  held_out = set(by_hash[: max(round(share * len(by_hash)), 1)])
  if len(held_out) == len(by_hash):
    raise DataError(
      f"{path}: {share:g} of {len(by_hash):,} different prompts leaves none to train on",
      "share",
    )
  is_wanted = split == "held_out"
  return [r for r, key in zip(records, keys, strict=True) if (key in held_out) == is_wanted]


def _question(prompt: str | list[dict]) -> bytes:
  """What is asked, whatever the system message and the white space."""
  if not isinstance(prompt, str):
    asked = [message for message in prompt if message["role"] != "system"]
    prompt = " ".join(message["content"] for message in asked or prompt)
  return " ".join(prompt.split()).encode(errors="surrogatepass")


def held_out_share(prompts: dict, held_out: dict) -> tuple[dict, dict]:
  """The arguments of two sources, where the second one's path is '' as those of one file.

  `held_out` has then the arguments of `prompts` but its own `share` and `size`.
  """
  alike = prompts.get("source") == held_out.get("source") and prompts.get("path")
  if held_out.get("path") != "" or not alike:
    return prompts, held_out
  own = {name: held_out[name] for name in ("share", "size") if name in held_out}
  shared = prompts | {name: x for name, x in own.items() if name == "share"}
  return shared | {"split": "train"}, prompts | own | {"split": "held_out"}


def _filter(keep: str) -> Callable[[str, dict], bool]:
  if not keep:
    return lambda place, record: True
  try:
    wanted = named.load(keep)
  except named.NameNotFound as e:
    raise DataError(f"{keep!r}: {e}", "keep") from e

  def is_kept(place: str, record: dict) -> bool:
    try:
      return bool(wanted(record))
    except Exception as e:
      raise DataError(f"{place}: {keep!r} failed: {type(e).__name__}: {e}", "keep") from e

  return is_kept


def _characters(prompt: str | list[dict]) -> int:
  messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
  return sum(len(message["content"]) for message in messages)


class Mixture(Sequence):
  """Several sources, drawn from by weight.

  As a sequence it holds all their records, one source after the other. The batches of
  `prompt_iterator` take its share from each source, whatever its size: a source is
  shuffled again whenever it is used up.

  Args:
    weights: above 0; their ratio counts
  Raises:
    DataError: an empty part, or an invalid weight
  """

  def __init__(self, parts: Sequence[Sequence[dict]], weights: Sequence[float]):
    self.parts, self.weights = list(parts), [float(w) for w in weights]
    if not self.parts or not all(map(len, self.parts)):
      raise DataError("a mixture needs sources, and none of them empty")
    are_weights = all(0 < w < math.inf for w in self.weights)
    if len(self.parts) != len(self.weights) or not are_weights:
      raise DataError(f"a mixture needs a weight above 0 per source, got {self.weights}")

  def __len__(self) -> int:
    return sum(map(len, self.parts))

  def __getitem__(self, i: int) -> dict:
    if i >= 0:
      for part in self.parts:
        if i < len(part):
          return part[i]
        i -= len(part)
    raise IndexError(i)


def mixture(sources: str, size: ranges.Large | None = None) -> Mixture:
  """Several sources, drawn from by weight; see `Mixture`.

  Args:
    sources: as in "0.7 * tlt_jax.data.load_prompts(path='a.jsonl') + 0.3 *
      my_package.parity.Problems(split='train', size=1000)"
    size: most records that are wanted of each source; None: all
  Raises:
    DataError: a source that cannot be found or made, or an invalid weight
  """
  ranges.check(mixture, locals())
  try:
    listed = calls.weighted(sources)
  except ValueError as e:
    raise DataError(f"{sources!r} {e}", "sources") from e
  return Mixture([_called(c, size) for c in listed], [c.weight for c in listed])


def named_sets(sets: str, size: ranges.Large | None = None) -> list[dict]:
  """The records of several held-out sets; evaluations report each by its name.

  Args:
    sets: as in "gsm8k=tlt_jax.data.load_prompts(path='test.jsonl'), sums=..."
    size: most records that are wanted of each set; None: all
  Raises:
    DataError: a source that cannot be found or made
  """
  ranges.check(named_sets, locals())
  try:
    listed = calls.by_name(sets)
  except ValueError as e:
    raise DataError(f"{sets!r} {e}", "sets") from e
  return [
    record | {"set": name}
    for name, call in listed.items()
    for record in _called(call, size)
  ]


def _called(call: calls.Call, size: int | None) -> Sequence[dict]:
  options = call.options or {}
  if size is not None:
    options = options | {"size": min(size, options.get("size") or size)}
  return source(source=call.path, **options)


def _read_jsonl(path):
  # Bytes: a str would also be split at U+2028, which JSON strings may hold.
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    if not line.strip():
      continue
    place = f"{path}, line {number}"
    try:
      record = json_objects.parse(line)
    except ValueError as e:
      raise DataError(f"{place} {e}; a .jsonl file has one object per line", "path") from e
    yield place, record


def _read_parquet(path):
  try:
    rows = pq.read_table(path).to_pylist(maps_as_pydicts="lossy")
  except (pa.ArrowException, OSError, ValueError, ArithmeticError) as e:
    raise DataError(f"{path}: not a readable Parquet file ({reason(e)})", "path") from e
  for number, row in enumerate(rows):
    yield f"{path}, row {number}", row


def reason(e: Exception) -> str:
  return (str(e).strip() or type(e).__name__).splitlines()[0][:250]


def no_field(place: str, field: str, record: dict) -> str:
  there = fields.names(record)
  listed = ", ".join(there[:30]) + (", ..." if len(there) > 30 else "")
  return f"{place}: no field {field!r}; there are {listed}" + named.nearest(field, there)


def prompt_problem(prompt) -> str | None:
  if isinstance(prompt, str):
    return None if prompt.strip() else "is empty"
  if not isinstance(prompt, list):
    return f"is a {type(prompt).__name__}, not a string or a list of messages"
  if not prompt:
    return "is an empty list of messages"
  for message in prompt:
    if not (
      isinstance(message, dict)
      and isinstance(message.get("role"), str)
      and isinstance(message.get("content"), str)
    ):
      return f"has a message that is not {{'role', 'content'}}: {message!r:.80}"
  return None


def prompt_iterator(source: Sequence[dict], batch: int, seed: int) -> grain.DatasetIterator:
  """Endless batches that depend on (source, batch, seed) alone, resumable exactly.

  Every epoch has its own order. Batches continue across epochs, so `batch` may exceed the
  source. One thread reads ahead. `get_state()` returns the position as JSON data;
  `set_state` restores it, given the same three arguments.

  Raises:
    DataError: an empty source or batch, or an invalid seed
  """
  if batch < 1:
    raise DataError(f"a batch needs at least 1 prompt, got {batch}")
  if not len(source):
    raise DataError("there are no prompts to iterate over")
  if not 0 <= seed < 2**32:
    raise DataError(f"the seed of the prompts must lie in [0, 2**32), got {seed}")
  if isinstance(source, Mixture):
    # Sources with the same records have different orders.
    parts = [_endless(part, (seed + i) % 2**32) for i, part in enumerate(source.parts)]
    records = grain.MapDataset.mix(parts, source.weights)
  else:
    records = _endless(source, seed)
  batches = records.batch(batch, batch_fn=list)
  return iter(
    batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
  )


def _endless(source: Sequence[dict], seed: int) -> grain.MapDataset:
  # Without a number of epochs grain 0.2 overflows at batch 1.
  epochs = 2**48 // len(source) + 1
  return grain.MapDataset.source(source).seed(seed).shuffle().repeat(epochs)


def prefetch(items: Iterable[Item]) -> Iterator[Item]:
  """Computes the next item in a background thread."""
  iterator = iter(items)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    following = pool.submit(next, iterator, _END)
    while (item := following.result()) is not _END:
      following = pool.submit(next, iterator, _END)
      yield item
