"""When rollouts are repeated; `test_commands` runs one whose are."""

import pytest

from experiments import repeats
from tests import commands

DRAFTING = {
  "compare.every": 2,
  "drafter": "eagle2",
  "strategies": "up to 4 live: 3_1_4",
}


@pytest.mark.parametrize(
  "change", [{"compare.every": 0}, {"drafter": ""}, {"strategies": ""}]
)
def test_nothing_is_repeated_where_nobody_asks_or_nothing_drafts(change):
  config = commands.read_run("countdown.py:smoke", DRAFTING | change)
  repeated = repeats.make(config, None, None, None)
  assert not any(repeated(step, None, None) for step in range(4))
