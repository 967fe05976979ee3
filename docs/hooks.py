"""Makes pages of the site from other files of the repository, and adapts links.

README.md is the start page. Links to pages and pictures of the site remain, links to other
files become text. In reference.md a line `::: package.module` is replaced by the docstrings
of that module.
"""

import ast
from collections.abc import Iterator
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {  # file of the repository -> page
  "README.md": "index.md",
  "CHANGELOG.md": "changelog.md",
  "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
  """Adds the pages of files outside of the folder of documents."""
  from mkdocs.structure import files as files_lib  # the rest needs no mkdocs

  for source, page in PAGES.items():
    text = mended((ROOT / source).read_text(), ROOT)
    files.append(files_lib.File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, page, config, files):
  """Adapts the links of a page of the folder of documents."""
  if page.file.src_uri in PAGES.values():
    return markdown
  return described(mended(markdown, (ROOT / "docs" / page.file.src_uri).parent))


def mended(markdown: str, folder: pathlib.Path) -> str:
  """The text with the links of the site; `folder` is that of its file."""

  def link(match):
    image, text, target, anchor = match.groups()
    if re.match(r"\w+:", target):
      return match[0]
    path = (folder / target).resolve()
    if path.is_relative_to(ROOT):
      name = str(path.relative_to(ROOT))
      if name in PAGES:
        return f"{image}[{text}]({PAGES[name]}{anchor or ''})"
      if name.startswith("docs/"):
        return f"{image}[{text}]({name.removeprefix('docs/')}{anchor or ''})"
    return text

  return _LINK.sub(link, markdown)


def described(markdown: str) -> str:
  """The text with the docstrings of modules."""

  def reference(match: re.Match) -> str:
    return "\n".join(_module(match[1]))

  return re.sub(r"^::: (\S+)$", reference, markdown, flags=re.MULTILINE)


def _module(name: str) -> Iterator[str]:
  """Yields a module's docstring, and its public constants, classes and functions."""
  path = ROOT / name.replace(".", "/")
  path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  source = path.read_text()
  tree = ast.parse(source)
  yield f"### {name}\n"
  yield _fenced(ast.get_docstring(tree))
  yield _fenced("\n".join(_constants(tree, source.splitlines())), "python")
  for node in tree.body:
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
      yield from _class(node, source.splitlines())
    elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
      yield from _function(node, node.name)


def _constants(tree: ast.Module, lines: list[str]) -> Iterator[str]:
  """Yields the lines of public names that are assigned, with their comments."""
  for node in tree.body:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
      continue
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)]
    if any(not name.startswith("_") for name in names):
      first = node.lineno - 1
      while lines[first - 1].startswith("#"):
        first -= 1
      yield from lines[first : node.end_lineno]


def _class(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
  """Yields a class: its fields as they are written, with comments, and its methods."""
  yield f"#### `{node.name}`\n"
  yield _fenced(ast.get_docstring(node))
  methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
  fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
  if fields:
    end = min([m.lineno - 1 - len(m.decorator_list) for m in methods] or [node.end_lineno])
    written = lines[node.body[0].end_lineno : end]
    yield _fenced(textwrap.dedent("\n".join(written)).strip(), "python")
  for method in methods:
    if not method.name.startswith("_"):
      yield from _function(method, f"{node.name}.{method.name}")


def _function(node: ast.FunctionDef, name: str) -> Iterator[str]:
  """Yields a function: its signature and its docstring."""
  returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
  yield f"#### `{name}`\n"
  yield _fenced(f"{node.name}({ast.unparse(node.args)}){returns}", "python")
  yield _fenced(ast.get_docstring(node))


def _fenced(text: str | None, language: str = "text") -> str:
  """A verbatim block; "" without text."""
  return f"```{language}\n{text}\n```\n" if text else ""
