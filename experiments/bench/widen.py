"""Embeds a policy, and its drafter, in a larger one that computes the same.

    python -m experiments.bench.widen --drafter=DIR --workdir=runs/wide

The default policy is so small that a step costs what its operations cost to start. The
larger one costs what its weights cost to read, as real models do, and still answers the
default task: benchmarks on it use the lengths and the acceptance of the real policy.

Width is padded with zeros (which root-mean-square norms notice: their scales make up
for it), heads and the MLP likewise, and layers are added whose output is zero. What is
computed is the same up to rounding.

The drafter's hidden states get the policy's width; its heads and its MLP stay as they
are. It costs a 23rd of a pass of the larger policy then, as the drafters of models with
28 layers do, and not a tenth.
"""

import dataclasses
import functools
import logging
import pathlib

from absl import flags
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments import keys
from experiments import launch
from experiments import workdirs
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import target

TIMES = 3  # width of the larger policy over the policy's


def larger(
  config: config_lib.ModelConfig, layers: int, times: int
) -> config_lib.ModelConfig:
  """The larger policy's shape."""
  if layers < config.num_layers:
    raise ValueError(f"{layers} layers cannot hold the policy's {config.num_layers}")
  return dataclasses.replace(
    padded(config, times),
    num_layers=layers,
    mlp_width=config.mlp_width * times,
    num_heads=config.num_heads * times,
    num_kv_heads=config.num_kv_heads * times,
  )


def padded(config: config_lib.ModelConfig, times: int) -> config_lib.ModelConfig:
  """The shape with wider hidden states, and heads and an MLP as they are."""
  return dataclasses.replace(
    config,
    width=config.width * times,
    norm_eps=config.norm_eps / times,  # of a mean over more, and as many zeros more
  )


def embed(small: dict, random: dict, times: int, parts: int = 1) -> dict:
  """Parameters of the larger model, from the smaller's and random ones of its shape.

  Args:
    small: the smaller model's
    random: of the larger model
    times: its width over the smaller one's
    parts: inputs of width D that lie side by side in a drafter's "fc"
  """
  flat = traverse_util.flatten_dict(small, sep="/")
  found = {}
  for path, like in traverse_util.flatten_dict(random, sep="/").items():
    shape = like.shape
    if path not in flat:  # an added layer: what it adds to the residual stream is zero
      ends = path.endswith(("o_proj", "down_proj"))
      found[path] = np.zeros(shape, like.dtype) if ends else np.asarray(like)
      continue
    x = np.asarray(flat[path])
    if path.endswith("scale") and x.shape != shape:
      x = x / times**0.5
    if path == "fc":
      split = np.split(x, parts)
      D = shape[0] // parts
      x = np.concatenate([np.pad(s, ((0, D - len(s)), (0, 0))) for s in split])
    found[path] = np.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])
  return traverse_util.unflatten_dict(found, sep="/")


def logits(config: config_lib.ModelConfig, params) -> jax.Array:
  """f32[1 32 V] after some tokens."""

  @jax.jit
  def run(params):
    at = jnp.arange(32)[None]
    apply = functools.partial(target.Target(config).apply, {"params": params})
    features, _ = apply(at % config.vocab_size, at)
    return apply(features, method=target.Target.logits)

  return run(params)


def widen(
  policy: str | pathlib.Path,
  drafter: str | pathlib.Path | None,
  folder: pathlib.Path,
  layers: int | None = None,
  times: int = TIMES,
) -> None:
  """Writes the larger policy to `folder`/policy, and its drafter to `folder`/drafter.

  Args:
    policy: folder of the smaller one
    drafter: folder of its drafter, if it has one
    folder: where to
    layers: of the larger policy; None: half as many again
    times: its width over the smaller one's
  Raises:
    ValueError: the two policies would not compute the same, or the drafter is of another
      kind than EAGLE-2
  """
  small, params = convert.load_hf(policy)
  model = larger(small, layers or -(-small.num_layers * 3 // 2), times)
  init = jax.jit(lambda key: target.init_params(model, key))
  wide = embed(params, init(jax.random.key(0)), times)
  apart = float(jnp.max(jnp.abs(logits(small, params) - logits(model, wide))))
  logging.info("logits of the two differ by at most %.1e", apart)
  if apart > 1e-3:
    raise ValueError(f"the larger policy's logits differ by {apart:.1e} from the policy's")
  convert.save_hf(folder / "policy", model, wide)
  tokenization.copy_files(policy, folder / "policy")
  logging.info("exported the policy to %s", folder / "policy")
  if drafter:
    config, params = drafter_files.load(drafter, small)
    if config.kind != "eagle2":
      raise ValueError(f"{drafter}: only an eagle2 drafter can be embedded")
    one = dataclasses.replace(config, layer=padded(config.layer, times))
    init = jax.jit(lambda key: drafter_lib.init_params(one, key))
    random = init(jax.random.key(0))
    drafter_files.save(folder / "drafter", one, embed(params, random, times, parts=2))
    logging.info("exported its drafter to %s", folder / "drafter")


def main(config):
  given = flags.FLAGS
  folder = pathlib.Path(given.workdir)
  launch.start()
  workdirs.record(folder, config)
  drafter = given.drafter or config["drafter"]
  widen(config["policy"], drafter, folder, given.layers, given.times)


if __name__ == "__main__":  # other benchmarks, with flags of their own, use this file
  flags.DEFINE_string("drafter", "", "Folder; default: the config's, if any.")
  flags.DEFINE_string("workdir", "runs/wide", "Gets policy/ and drafter/.")
  flags.DEFINE_integer(
    "layers", None, "Of the larger policy; default: half as many again.", lower_bound=1
  )
  flags.DEFINE_integer("times", TIMES, "Its width over the policy's.", lower_bound=1)
  launch.run(main, config=("countdown", keys.RUN))
