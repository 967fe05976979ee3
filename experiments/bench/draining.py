"""Measures rollouts whose live batch falls from all requests to one, tokens per second.

    python -m experiments.bench.draining
    python -m experiments.bench.draining --config.policy=runs/wide/policy \\
        --config.drafter=runs/wide/drafter

The lengths of the responses are drawn beforehand: each is the one before times the same
factor, so that half of the requests are left when a small part of the time is over.
Plain decoding, each of `--strategies`, and "auto", which chooses by live requests, answer
the same requests in turn; tokens are compared. Where there are several slices, requests
are spread over them. Ratios are geometric means, with Student's 95% interval. The last
line is JSON.
"""

from collections.abc import Mapping
import json

from absl import flags
import jax
import numpy as np

from experiments import from_config
from experiments import keys
from experiments import launch
from experiments import tables
from experiments.bench import interleave
from tlt_jax import axes
from tlt_jax import metrics
from tlt_jax.models import config as config_lib
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import compare

_REQUESTS = flags.DEFINE_integer("requests", 32, "Live at first.", lower_bound=2)
_SHORTEST = flags.DEFINE_integer("shortest", 32, "Response, in tokens.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 1024, "Response, in tokens.", lower_bound=2)
_STRATEGIES = flags.DEFINE_list("strategies", ["3_1_4", "auto"], "Beside plain decoding.")
_DTYPE = flags.DEFINE_enum(
  "dtype", None, config_lib.DTYPES, "That the policy computes in; default: its folder's."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each side.", lower_bound=2)

PLAIN = "off"


def lengths(count: int, shortest: int, longest: int) -> np.ndarray:
  """Tokens of each response: i32[count], in equal ratios from the shortest on."""
  return np.geomspace(shortest, longest, count).round().astype(np.int32)


def requests(config: dict, wanted: np.ndarray) -> requests_lib.Requests:
  """Held-out prompts, a request each, that end after so many tokens and not before."""
  records = from_config.prompts(config, config["held_out"] | {"size": len(wanted)})
  chat = config["chat"]
  prompts = sample.encode(
    from_config.tokenizer(config["policy"]),
    [records[i % len(records)] for i in range(len(wanted))],
    chat=chat["apply"],
    system=chat["system"],
  )
  return requests_lib.make_requests(prompts, max_tokens=wanted, seed=config["seed"])


def engines(
  config: dict, models: from_config.Models, asked: requests_lib.Requests
) -> dict[str, rollout.Rollout]:
  """The sides, with every program ready.

  Args:
    config: of a run
    models: the policy, and the drafter if there is one
    asked: all of them live at first
  """
  slots = -(-len(asked) // models.mesh.shape[axes.DATA])
  length = int(asked.total_length.max())
  sizes = {"slots": slots, "max_length": length, "buckets": rollout.ladder(slots, length)}
  options = rollout.Options(**config["rollout"] | sizes | {"budget": {}})
  made = {}
  for text in (PLAIN, *_STRATEGIES.value):
    selector = from_config.selector_of(text, config)
    drafter, draft_params = models.drafter, models.draft_params
    if selector is None:
      drafter = draft_params = None
    engine = rollout.make(models.model, models.mesh, options, drafter, selector)
    engine.compile(models.params, asked.stop_tokens.shape[1], draft_params)
    engine.measure(models.params, asked.stop_tokens.shape[1], draft_params)
    made[text] = engine
  return made


def measure(
  models: from_config.Models,
  asked: requests_lib.Requests,
  sides: Mapping[str, rollout.Rollout],
) -> dict:
  """Rolls the requests out on every side, in turn."""
  drafts = lambda name: None if name == PLAIN else models.draft_params
  run = lambda name, engine: lambda _: engine(models.params, asked, drafts(name))
  calls = {name: run(name, engine) for name, engine in sides.items()}
  measured = list(interleave.turns(calls, _REPEATS.value))
  seconds, samples = interleave.seconds(measured), interleave.results(measured)
  total = int(asked.max_tokens.sum())
  found = {}
  for name in sides:
    rate, half = metrics.interval(total / seconds[name])
    drawn = samples[name][-1]
    compared = compare.compare(
      models.model, models.params, asked, samples[PLAIN][-1], drawn
    )
    found[name] = {
      "tokens_per_s": rate,
      "half": half,
      "over_plain": interleave.ratio(seconds[PLAIN], seconds[name]),
      "mean_acceptance_length": drawn.mean_acceptance_length,
      "differing_tokens": compared.differing_tokens,
      "near_ties": compared.near_ties,
      "total_tokens": compared.total_tokens,
    }
  return found


def report(found: Mapping[str, dict], live: int) -> None:
  """Prints the table."""
  text = lambda r: "{:.2f}x ({:.2f}-{:.2f})".format(r["mean"], *r["interval"])
  tables.show(
    f"Rollouts with {live} live requests falling to 1",
    ["side", "tokens/s", "over plain", "tokens per pass", "differ", "near-ties"],
    [
      [
        name,
        f"{r['tokens_per_s']:.0f} ± {r['half']:.0f}",
        text(r["over_plain"]),
        f"{r['mean_acceptance_length']:.2f}",
        str(r["differing_tokens"]),
        str(r["near_ties"]),
      ]
      for name, r in found.items()
    ],
  )


def main(config):
  if _LONGEST.value < _SHORTEST.value:
    raise ValueError("--longest is below --shortest")
  launch.start(1)
  wanted = lengths(_REQUESTS.value, _SHORTEST.value, _LONGEST.value)
  asked = requests(config, wanted)
  models = from_config.load_models(config, _DTYPE.value)
  found = measure(models, asked, engines(config, models, asked))
  report(found, _REQUESTS.value)
  sizes = {"requests": len(asked), "longest": int(wanted.max())}
  print(json.dumps({"device": jax.devices()[0].device_kind} | sizes | {"sides": found}))


if __name__ == "__main__":
  launch.run(main, config=("tail", keys.RUN))
