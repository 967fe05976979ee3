"""Compares our rollout with the vanilla sampler of google-tunix, on the same weights.

    python3 -m venv /tmp/scratch
    /tmp/scratch/bin/pip install google-tunix==0.1.7
    /tmp/scratch/bin/python -m experiments.bench.tunix [--slices=2]

Run from the root of the checkout. tunix is no dependency of ours, but brings all that
our side needs; its later versions demand the TPU build of jax. Tried with jax 0.10.2
and flax 0.12.8. Some minutes on two cores, most of them to compile; on a machine that
does other work the ratios say little.

A random Qwen3 is written as a Hugging Face folder and read by each side with its own
loader; before anything is timed, both must continue some prompts greedily with the
same tokens. Then the sides take turns on each workload, all in this process. They
draw at temperature 1, and how long a response gets is fixed beforehand: no token ends
one. Ours also returns log-probabilities; tunix is not asked to, which would cost it.

tunix gets the best batch size of those tried and, for each batch, a cache and a number
of steps that fit its longest response exactly, which no user could know. It always
runs on device 0 with the threads of all cores; --slices=2 splits the CPU into two
devices for our side, so compare with the faster tunix of both settings.
"""

import dataclasses
import functools
import json
import os
import tempfile

from absl import flags
import jax
import numpy as np

from experiments import launch
from experiments import tables
from experiments.bench import interleave
from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib

try:
  from tunix.generate import sampler as tunix_sampler
  from tunix.models.qwen3 import model as tunix_model
  from tunix.models.qwen3 import params as tunix_params
except ImportError:  # main says how to install it
  tunix_sampler = None

_SLICES = flags.DEFINE_integer(
  "slices", 1, "Devices the CPU is shown as; our side runs on all.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each workload.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", [], "Names of workloads; all if empty.")

MODEL = config_lib.ModelConfig(
  architecture="Qwen3ForCausalLM",
  vocab_size=2048,
  width=256,
  mlp_width=768,
  num_layers=4,
  num_heads=8,
  num_kv_heads=2,
  head_dim=32,
  rope_theta=1e6,  # tunix's layers know no other
  qk_norm=True,
)


@dataclasses.dataclass(frozen=True)
class Workload:
  """Requests, how a user would set our options for them, and tunix's batch sizes."""

  name: str
  requests: requests_lib.Requests
  options: rollout.Options
  tunix_batches: tuple[int, ...]

  @property
  def tokens(self) -> int:
    return int(self.requests.max_tokens.sum())


class Tokenizer:
  """A tokenizer for tunix whose prompts are token ids already.

  No id is special: a sampled pad id would be masked out of tunix's attention.
  """

  def encode(self, tokens):
    return list(tokens)

  def decode(self, tokens):
    return ""

  def bos_id(self):
    return None

  def eos_id(self):
    return -1

  def pad_id(self):
    return -1


class Tunix:
  """The vanilla sampler: a static batch that runs until its longest row is done."""

  def __init__(self, folder: str):
    m = MODEL
    config = tunix_model.ModelConfig(
      num_layers=m.num_layers,
      vocab_size=m.vocab_size,
      embed_dim=m.width,
      hidden_dim=m.mlp_width,
      num_heads=m.num_heads,
      head_dim=m.head_dim,
      num_kv_heads=m.num_kv_heads,
      rope_theta=int(m.rope_theta),
      norm_eps=m.norm_eps,
      use_tied_embedding=m.tie_embeddings,
    )
    self._model = tunix_params.create_model_from_safe_tensors(folder, config)
    self._sampler = functools.cache(self._make_sampler)

  def _make_sampler(self, cache_size: int) -> "tunix_sampler.Sampler":
    m = MODEL
    cache = tunix_sampler.CacheConfig(cache_size, m.num_layers, m.num_kv_heads, m.head_dim)
    return tunix_sampler.Sampler(self._model, Tokenizer(), cache)

  def __call__(
    self, requests: requests_lib.Requests, batch: int, seed: int, greedy: bool = False
  ) -> list[np.ndarray]:
    """The responses, `batch` of them at a time."""
    responses = []
    for start in range(0, len(requests), batch):
      rows = range(start, min(start + batch, len(requests)))
      prompts = [requests.prompts[requests.prompt_idx[i]] for i in rows]
      steps = int(requests.max_tokens[list(rows)].max())
      longest = max(len(p) for p in prompts)
      drawn = self._sampler(longest + steps)(
        prompts,
        max_generation_steps=steps,
        max_prompt_length=longest,
        temperature=0.0 if greedy else 1.0,
        top_p=None if greedy else 1.0,
        seed=seed + start,  # without one, every call draws with the same key
      ).tokens
      responses += [t[: requests.max_tokens[i]] for i, t in zip(rows, drawn, strict=True)]
    return responses


def prompts(count: int, length: int) -> list[np.ndarray]:
  """Random token ids; the same for the same arguments."""
  rng = np.random.default_rng(length)
  return list(rng.integers(1, MODEL.vocab_size, (count, length), np.int32))


def powers_of_two(largest: int) -> tuple[int, ...]:
  return tuple(2**i for i in range(largest.bit_length()))


def workloads(slices: int) -> list[Workload]:
  """The four workloads, for our engine on so many slices."""

  def equal(batch: int, tokens: int) -> Workload:
    slots = max(batch // slices, 1)
    options = rollout.Options(
      max_length=32 + tokens,
      max_prompt=32,
      slots=slots,
      buckets=rollout.grid([slots], range(64, 32 + tokens, 64)),
      chunk=64,
      prompt_rows=slots,
      prefill_rows=slots,
      prefill_block=32,
    )
    requests = requests_lib.make_requests(prompts(batch, 32), max_tokens=tokens)
    return Workload(f"equal_{batch}x{tokens}", requests, options, (batch,))

  drawn = np.minimum(np.random.default_rng(0).geometric(1 / 64, 64), 512)
  slots = 64 // slices
  geometric = rollout.Options(
    max_length=32 + 512,
    max_prompt=32,
    slots=slots,
    buckets=rollout.grid(powers_of_two(slots), (64, 96, 128, 192, 256, 384, 32 + 512)),
    chunk=16,
    prompt_rows=slots,
    prefill_rows=slots,
    prefill_block=32,
    rebalance=slices > 1,
  )
  shared = rollout.Options(
    max_length=256 + 64,
    max_prompt=256,
    slots=8,
    buckets=rollout.grid(powers_of_two(8), [256 + 64]),
    chunk=64,
    prompt_rows=1,
    prefill_rows=1,
    prefill_block=256,
    rebalance=slices > 1,
  )
  return [
    equal(32, 128),
    equal(4, 256),
    Workload(
      "geometric_64",
      requests_lib.make_requests(prompts(64, 32), max_tokens=drawn),
      geometric,
      (16, 32, 64),
    ),
    Workload(
      "same_prompt_8x64",
      requests_lib.make_requests(prompts(1, 256), 8, max_tokens=64),
      shared,
      (8,),
    ),
  ]


def check_same_model(tunix: Tunix, params, mesh) -> None:
  """Makes sure that greedy responses of both sides agree token for token.

  Raises:
    ValueError: they do not, so that nothing could be compared
  """
  requests = requests_lib.make_requests(prompts(8, 32), max_tokens=64, temperature=0)
  options = rollout.Options(max_length=96, max_prompt=32, slots=8)
  ours = rollout.make(MODEL, mesh, options)(params, requests)
  theirs = tunix(requests, 8, 0, greedy=True)
  for i, response in enumerate(theirs):
    if not np.array_equal(ours.response(i), response):
      raise ValueError(f"greedy responses to prompt {i} differ: not the same model")
  drawn = np.concatenate(theirs)
  distinct = len(np.unique(drawn))
  print(f"greedy: both sides draw the same {len(drawn)} tokens, {distinct} distinct")


def run(workload: Workload, tunix: Tunix, params, mesh) -> dict:
  """Runs both sides on one workload."""
  engine = rollout.make(MODEL, mesh, workload.options)

  def ours(repeat: int) -> None:
    seed = np.full_like(workload.requests.seed, repeat)
    samples = engine(params, dataclasses.replace(workload.requests, seed=seed))
    np.testing.assert_array_equal(samples.length, workload.requests.max_tokens)

  def theirs(repeat: int, batch: int) -> None:
    drawn = tunix(workload.requests, batch, 1000 * repeat)
    np.testing.assert_array_equal([*map(len, drawn)], workload.requests.max_tokens)

  batches = {n: functools.partial(theirs, batch=n) for n in workload.tunix_batches}
  sides = {"ours": ours, **batches}
  seconds = interleave.seconds(list(interleave.turns(sides, _REPEATS.value)))
  best = min(workload.tunix_batches, key=lambda batch: np.median(seconds[batch]))
  a, b = seconds["ours"], seconds[best]
  ratio = b / a
  return {
    "ours_s": [float(np.median(a)), float(a.min()), float(a.max())],
    "tunix_s": [float(np.median(b)), float(b.min()), float(b.max())],
    "tunix_batch": best,
    "tunix_s_by_batch": {str(n): float(np.median(seconds[n])) for n in batches},
    "ours_tokens_per_s": workload.tokens / float(np.median(a)),
    "tunix_tokens_per_s": workload.tokens / float(np.median(b)),
    "ratio": float(np.median(ratio)),
    "ratio_range": [float(ratio.min()), float(ratio.max())],
  }


def report(results: dict) -> None:
  """Prints the table."""
  spread = lambda x, digits: f"{x[0]:.{digits}f} ({x[1]:.{digits}f}-{x[2]:.{digits}f})"
  tables.show(
    "Medians (ranges); useful tokens only",
    ["workload", "ours, s", "tunix, s", "its batch", "tokens/s", "tunix", "ratio"],
    [
      [
        name,
        spread(r["ours_s"], 3),
        spread(r["tunix_s"], 3),
        str(r["tunix_batch"]),
        f"{r['ours_tokens_per_s']:.0f}",
        f"{r['tunix_tokens_per_s']:.0f}",
        spread([r["ratio"], *r["ratio_range"]], 2),
      ]
      for name, r in results.items()
    ],
  )


def main():
  if tunix_sampler is None:
    raise ValueError(
      "tunix is not installed: python3 -m venv /tmp/scratch && /tmp/scratch/bin/pip "
      "install google-tunix==0.1.7, then run this with /tmp/scratch/bin/python"
    )
  launch.keep_freed_memory()  # as our commands do; both sides are faster for it
  jax.config.update("jax_num_cpu_devices", _SLICES.value)
  chosen = workloads(_SLICES.value)
  names = [w.name for w in chosen]
  if unknown := set(_ONLY.value) - set(names):
    raise ValueError(f"no workload {', '.join(unknown)}; there are {', '.join(names)}")
  mesh = axes.make_mesh()
  with tempfile.TemporaryDirectory() as folder:
    # Larger than the usual start, so that attention and MLP decide what is drawn.
    start = target.init_params(MODEL, jax.random.key(0))
    start = jax.tree.map(lambda x: x if x.ndim == 1 else 3 * x, start)
    hf.save(folder, MODEL, start)
    _, params = hf.load(folder, mesh, axes.ROLLOUT)
    tunix = Tunix(folder)
    check_same_model(tunix, params, mesh)
    results = {
      w.name: run(w, tunix, params, mesh)
      for w in chosen
      if not _ONLY.value or w.name in _ONLY.value
    }
  report(results)
  print(
    json.dumps(
      {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # above the cores: something else ran
        "slices": _SLICES.value,
        "workloads": results,
      }
    )
  )


if __name__ == "__main__":
  launch.run(main)
