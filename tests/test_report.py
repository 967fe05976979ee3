"""The report of a run: one file, which a browser shows without asking for anything."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest

from tests import commands
from tests import test_metrics

HOSTILE = "<script>document.title = 'run'</script><img src='http://example.org/x.png'>&amp;"
FIGURES = ("reward", "lengths", "live_requests", "timeline", "acceptance")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = os.environ.get("TLT_BROWSER") or next(
  filter(None, map(shutil.which, _BROWSERS)), ""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a run, whose responses are markup."""
  folder = tmp_path_factory.mktemp("run & more")
  test_metrics.write_run(folder, range(3))
  records = [
    json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
  ]
  for record in records:
    record |= {f"rollout/acceptance_rate_pos_{k}": 0.9 - 0.2 * k for k in (1, 2)}
  lines = "".join(json.dumps(record) + "\n" for record in records)
  (folder / "metrics.jsonl").write_text(lines)
  (folder / "config.json").write_text(json.dumps({"seed": 7, "reward": HOSTILE}))
  (folder / "samples").mkdir()
  sample = {"prompt": "1+1?", "response": HOSTILE, "reward": 0.5, "solved": False}
  for name in ("train_000001", "train_000002", "eval_000000"):
    (folder / "samples" / f"{name}.jsonl").write_text(
      json.dumps(sample | {"prompt": name}) + "\n"
    )
  return folder


@pytest.fixture(scope="module")
def report(run):
  path = run / "report.html"
  commands.module("report").write(run, path)
  return path


class Parsed(html.parser.HTMLParser):
  """Tags with their attributes, and the text between them."""

  def __init__(self, text: str):
    super().__init__()
    self.tags, self.text = [], ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.text += data


def test_a_report_holds_all_of_a_run_and_asks_for_nothing(report):
  """Figures inside; what responses say is text."""
  page = Parsed(report.read_text())
  images = {a["id"]: a for tag, a in page.tags if tag == "img"}
  assert sorted(images) == sorted(FIGURES)
  assert all(a["src"].startswith("data:image/png;base64,") for a in images.values())
  assert all(a["alt"] for a in images.values())
  assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
  assert page.text.count(HOSTILE) == 3  # two samples, and the configuration
  assert "train_000002" in page.text and "train_000001" not in page.text
  assert "eval_000000" in page.text and '"seed": 7' in page.text
  assert "rollout/acceptance_rate_pos_2" in page.text and "reward mean" in page.text


def test_a_damaged_run_is_told_in_one_line(run, tmp_path):
  report = commands.module("report")
  folder = shutil.copytree(run, tmp_path / "run")
  (folder / "samples" / "train_000002.jsonl").write_text("{")
  with pytest.raises(ValueError, match=r"train_000002.jsonl, line 1 is not JSON"):
    report.write(folder, tmp_path / "report.html")
  (folder / "metrics.jsonl").unlink()
  with pytest.raises(ValueError, match=r"metrics.jsonl: no such file"):
    report.write(folder, tmp_path / "report.html")
  assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(not BROWSER, reason="no browser here; TLT_BROWSER names one")
def test_a_browser_shows_it(report, tmp_path):
  """Chromium without a window: the page as it stands there, and a picture of it."""
  picture = tmp_path / "shown.png"
  base = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
  base += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,4000"]
  show = lambda *flags: subprocess.run(
    [*base, *flags, report.as_uri()], capture_output=True, timeout=120
  )
  page = Parsed(show("--dump-dom").stdout.decode())
  assert [a["id"] for tag, a in page.tags if tag == "img"] and page.text.count(HOSTILE) == 3
  assert "run" != re.search(r"<title>(.*?)</title>", report.read_text())[1]
  show(f"--screenshot={picture}")
  assert picture.stat().st_size > 50_000  # figures and all, not a white page
