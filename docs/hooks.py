"""Makes pages of the site from files beside this folder, and mends links between them.

README.md is the start page. A link to a page or a picture of the site stays one; what it
says of any other file of the repository stays as text.
"""

import pathlib
import re

from mkdocs.structure import files as files_lib

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {  # file of the repository -> page
  "README.md": "index.md",
  "CHANGELOG.md": "changelog.md",
  "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
  """Adds the pages of files beside the folder of documents."""
  for source, page in PAGES.items():
    text = mended((ROOT / source).read_text(), ROOT)
    files.append(files_lib.File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, page, config, files):
  """Mends the links of a page that lies in the folder of documents."""
  if page.file.src_uri in PAGES.values():
    return markdown
  return mended(markdown, (ROOT / "docs" / page.file.src_uri).parent)


def mended(markdown: str, folder: pathlib.Path) -> str:
  """The text with links as the site has them; `folder` is where its file lies."""

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
