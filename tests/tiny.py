"""Models and request batches that the tests share: small real ones, and a real shape."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
from unittest import mock

import jax
import numpy as np
import pytest

from tlt_jax import axes
from tlt_jax import programs
from tlt_jax import rl
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import target
from tlt_jax.rl import algorithm
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

CONFIG = config_lib.ModelConfig(
  architecture="Qwen3ForCausalLM",
  vocab_size=64,
  width=32,
  mlp_width=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  qk_norm=True,
)
# SmolLM2-135M: 45 KiB of KV per token.
SMOLLM2 = config_lib.ModelConfig(
  architecture="LlamaForCausalLM",
  vocab_size=49152,
  width=576,
  mlp_width=1536,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  rope_theta=1e5,
  max_position=8192,
  tie_embeddings=True,
)


def slow(*values):
  """A case of a parametrized test that takes long and seldom breaks: `make test-all`."""
  return pytest.param(*values, marks=pytest.mark.slow)


# Of a rollout, for `rollout.Options`.
SIZES = dict(max_length=96, max_prompt=12, prompt_rows=8, prefill_rows=8)

DRAFT_VOCAB = tuple(range(1, 64, 2))
_KINDS = {"eagle2": {}, "eagle3": dict(taps=(0, 1))}
DRAFTERS = {
  f"{kind}{'_vocab' if vocab else ''}": drafter.of_target(
    CONFIG, kind, vocab=vocab, **fields
  )
  for kind, fields in _KINDS.items()
  for vocab in ((), DRAFT_VOCAB)
}


@functools.cache
def draft_params(kind: str, seed: int):
  return drafter.init_params(DRAFTERS[kind], jax.random.key(seed))


def frozen(kind: str, seed: int = 5) -> spot_lib.Frozen:
  """A drafter of random weights that nothing trains."""
  return spot_lib.Frozen(DRAFTERS[kind], draft_params(kind, seed))


@functools.cache
def params():
  """Random weights whose next-token distributions are neither flat nor certain."""
  made = jax.jit(lambda key: target.init_params(CONFIG, key))(jax.random.key(0))
  made["head"] = made["head"] * 20.0
  return made


def on(mesh):
  """The parameters in their rollout layout on a mesh."""
  shardings = axes.shardings(mesh, axes.ROLLOUT, target.abstract_params(CONFIG))
  return jax.device_put(params(), shardings)


def mesh(data: int, model: int = 1):
  return axes.make_mesh(model, jax.devices()[: data * model])


_pools: dict[tuple, programs.Pool] = {}


@contextlib.contextmanager
def shared_programs(*key):
  """Rollouts that are made inside share the programs of others with this key, so that each
  is compiled once: all that a program depends on must be the same for them."""
  pool = _pools.setdefault(key, programs.Pool())
  with mock.patch.object(programs, "Pool", lambda *_: pool):
    yield


def prompts(count: int, seed: int = 0, longest: int = 9) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [
    rng.integers(0, CONFIG.vocab_size, rng.integers(1, longest + 1)).astype(np.int32)
    for _ in range(count)
  ]


def requests(num_prompts: int = 6, responses: int = 4, **options):
  """Unequal lengths come from a stop token and from limits of their own."""
  rng = np.random.default_rng(1)
  defaults = dict(
    max_tokens=rng.integers(1, 40, num_prompts * responses),
    stop_tokens=[3],
    seed=7,
  )
  return requests_lib.make_requests(
    prompts(num_prompts), responses, **{**defaults, **options}
  )


def refuse_chunks(monkeypatch, engine, most: int) -> list:
  """Lets chunks of more slots run out of memory; the list gets their keys."""
  inner, refused = engine.pool.get, []

  def limited(name, key, *args, **static):
    if key and key[0] > most:
      refused.append((name, key))
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: forced by a test")
    return inner(name, key, *args, **static)

  monkeypatch.setattr(engine.pool, "get", limited)
  return refused


def algorithms() -> list[str]:
  """Modules of `tlt_jax.rl` whose `make` returns an Algorithm and needs no argument."""
  found = []
  for info in pkgutil.iter_modules(rl.__path__):
    make = getattr(importlib.import_module(f"tlt_jax.rl.{info.name}"), "make", None)
    if make is not None:
      signature = inspect.signature(make, eval_str=True)
      optional = all(p.default != p.empty for p in signature.parameters.values())
      if optional and signature.return_annotation is algorithm.Algorithm:
        found.append(info.name)
  return found
