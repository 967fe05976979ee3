"""Measures how many tokens take other experts in the learner than in the rollout.

    python -m benchmarks.routing --policy=/models/Qwen3-30B-A3B

The policy draws responses by passes of one token over the KV cache; then the learner's
loop over layers reads them, packed into rows. Both compute in the policy's dtype, or in
`--dtype`, on one device that holds it. Of (token, layer) pairs it counts those with
another set of experts, and of tokens how much their log-probability differs: by chance, as
importance weights and KLs have it. The last line is JSON. `--dry_run` takes random weights
in a tiny size.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import few_rows
from benchmarks import shapes
from experiments import launch
from tlt_jax import packing
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import layers
from tlt_jax.models import moe
from tlt_jax.models import stacked
from tlt_jax.models import target
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.rl import log_probability

_DRY = shapes.tiny(shapes.MODELS["qwen3-30b-a3b"])


def _chosen(sown: dict) -> jax.Array:
  """The experts of a layer's tokens, sorted: i32[R k]."""
  (chosen,) = sown["mlp"]["chosen"]
  return jnp.sort(chosen, -1)


def draw(
  config: config_lib.ModelConfig, params: dict, first: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Draws tokens at temperature 1, each by a pass over the cache.

  Args:
    first: i32[B]  each row's prompt
    length: T of rows
  Returns:
    tokens i32[B T]; log-probabilities f32[B T-1] of all but the first; and experts
    i32[B T-1 L k] of all but the last
  """
  model, rows = target.Target(config), np.arange(len(first))

  @functools.partial(jax.jit, donate_argnums=1)
  def step(params, kv, tokens, t, key):
    args = {"params": params}, tokens[:, None], jnp.full((len(tokens), 1), t)
    (_, logits, kv), sown = model.apply(
      *args, cache=kv, method=model.features_and_logits, mutable=[moe.ROUTING]
    )
    logp = jax.nn.log_softmax(logits[:, 0])
    drawn = jax.random.categorical(key, logp).astype(jnp.int32)
    by_layer = (sown[moe.ROUTING][f"layer_{i}"] for i in range(config.num_layers))
    experts = jnp.stack([_chosen(x) for x in by_layer], 1)
    return kv, drawn, logp[rows, drawn], experts

  kv = cache_lib.init(config, len(first), length)
  tokens, every = [jnp.asarray(first, jnp.int32)], []
  for t, key in enumerate(jax.random.split(jax.random.key(0), length - 1)):
    kv, drawn, *of_step = step(params, kv, tokens[-1], t, key)
    tokens.append(drawn)
    every.append(of_step)
  logp, experts = (np.stack(jax.device_get(x), 1) for x in zip(*every, strict=True))
  return np.stack(jax.device_get(tokens), 1), logp, experts


def read(
  config: config_lib.ModelConfig, params: dict, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """What the learner finds for tokens i32[B T], two rows' in one: as those of `draw`."""
  bucket = packing.Bucket(1, 2 * tokens.shape[1])
  (packed,) = packing.pack(tokens[:, :1], tokens[:, 1:], [bucket])
  runs = stacked.runs(params, config)
  layer_of = np.argsort([i for run in runs for place in run for i in place])

  @jax.jit
  def score(params, packed, i):
    params, packed = stacked.stack(params, runs), packed.micro_batch(i)
    features, experts = stacked.features(
      config,
      params,
      runs,
      packed.tokens,
      packed_attention.Segments(packed.segments),
      layers.rotation(config, packed.positions),
      gather=dict,
      remat=False,
      watch=lambda sown: _chosen(sown[moe.ROUTING]),
    )
    head, features = target.output_head(config, params), features[0]
    hot = jnp.ones(len(features))
    logp, _ = log_probability.scores(config, features, head, packed.targets[0], hot)
    return logp, experts[layer_of].swapaxes(0, 1)

  found = [score(params, packed, i) for i in range(packed.count)]
  logp, experts = (np.concatenate(x) for x in zip(*jax.device_get(found), strict=True))
  masks, rows = packed.mask[: packed.count].ravel(), packed.sequence_idx.ravel()
  order = np.argsort(rows[: len(masks)][masks], kind="stable")
  shape = len(tokens), tokens.shape[1] - 1
  logp, experts = logp[masks][order], experts[masks][order]
  return logp.reshape(shape), experts.reshape(*shape, *experts.shape[1:])


def measure(
  config: config_lib.ModelConfig, params: dict, rows: int, length: int
) -> dict[str, float | Sequence[float]]:
  """Compares the two on `rows` responses of `length` tokens, prompts' one included."""
  usable = np.setdiff1d(
    np.arange(config.vocab_size), [i for r in config.unused_rows for i in range(*r)]
  )
  first = np.random.default_rng(0).choice(usable, rows)
  tokens, logp, experts = draw(config, params, first, length)
  logp2, experts2 = read(config, params, tokens)
  differ = np.any(experts != experts2, -1)
  taken = (experts[..., None, :] == experts2[..., None]).any(-1)
  ratio = np.exp(logp2 - logp)
  return {
    "tokens": int(differ.shape[0] * differ.shape[1]),
    "pairs_that_differ": float(differ.mean()),
    "pairs_that_differ_by_layer": differ.mean((0, 1)).round(4).tolist(),
    "experts_that_differ": float(1 - taken.mean()),
    "tokens_that_differ": float(differ.any(-1).mean()),
    "mean_abs_log_ratio": float(np.abs(logp2 - logp).mean()),
    "std_of_ratio": float(ratio.std()),
    "kl": float(np.mean(ratio - 1 - (logp2 - logp))),
  }


def main() -> None:
  if flags.FLAGS.dry_run:
    config = dataclasses.replace(_DRY, dtype=flags.FLAGS.dtype or _DRY.dtype)
    params, length = few_rows.weights(config), min(flags.FLAGS.tokens, 24)
  else:
    if not flags.FLAGS.policy:
      raise ValueError("--policy is empty: give a folder with a policy of experts")
    config = hf.load_config(pathlib.Path(flags.FLAGS.policy))
    if config.experts is None:
      raise ValueError(f"--policy={flags.FLAGS.policy} has no experts to route to")
    dtype, length = flags.FLAGS.dtype or config.dtype, flags.FLAGS.tokens
    config, params = hf.load(flags.FLAGS.policy, dtype=dtype)
    config = dataclasses.replace(config, dtype=dtype)
  if length > config.context:
    raise ValueError(f"--tokens={length} is beyond the policy's context, {config.context}")
  found = measure(config, params, flags.FLAGS.rows, length)
  print(json.dumps({"dtype": config.dtype} | found))


if __name__ == "__main__":
  flags.DEFINE_string("policy", "", "Folder of a policy of experts.")
  flags.DEFINE_enum("dtype", None, config_lib.DTYPES, "Of the computation; none: its own.")
  flags.DEFINE_integer("rows", 16, "Responses.", lower_bound=1)
  flags.DEFINE_integer("tokens", 1024, "Of each response.", lower_bound=2)
  flags.DEFINE_bool("dry_run", False, "Tiny sizes and random weights.")
  launch.run(main)
