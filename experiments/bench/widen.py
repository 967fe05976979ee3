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
import logging
import pathlib

from absl import flags
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments import setup
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import target

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder; default: the config's, if any.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/wide", "Gets policy/ and drafter/.")
_LAYERS = flags.DEFINE_integer("layers", 12, "Of the larger policy.", lower_bound=1)
_TIMES = flags.DEFINE_integer("times", 3, "Its width over the policy's.", lower_bound=1)


def larger(config: config_lib.ModelConfig, layers: int, times: int):
  """The larger shape."""
  if layers < config.num_layers:
    raise ValueError(f"{layers} layers cannot hold the policy's {config.num_layers}")
  return dataclasses.replace(
    padded(config, times),
    num_layers=layers,
    mlp_width=config.mlp_width * times,
    num_heads=config.num_heads * times,
    num_kv_heads=config.num_kv_heads * times,
  )


def padded(config: config_lib.ModelConfig, times: int):
  """The shape with wider hidden states, and heads and an MLP as they are."""
  return dataclasses.replace(
    config,
    width=config.width * times,
    norm_eps=config.norm_eps / times,  # of a mean over more, and as many zeros more
  )


def embed(small: dict, random: dict, times: int, parts: int = 1) -> dict:
  """Parameters of the larger model, from the smaller's and random ones of its shape.

  Args:
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


def main():
  workdir = pathlib.Path(_WORKDIR.value)
  config = setup.start(workdir, _CONFIG.value)
  folder, times = _DRAFTER.value or config["drafter"], _TIMES.value
  small, params = convert.load_hf(config["policy"])
  model = larger(small, _LAYERS.value, times)
  random = target.init_params(model, jax.random.key(0))
  wide = embed(params, random, times)
  tokens = jnp.arange(32)[None] % model.vocab_size
  logits = [
    target.Target(c).apply({"params": p}, features, method=target.Target.logits)
    for c, p in ((small, params), (model, wide))
    for features, _ in [target.Target(c).apply({"params": p}, tokens, jnp.arange(32)[None])]
  ]
  apart = float(jnp.max(jnp.abs(logits[0] - logits[1])))
  logging.info("logits of the two differ by at most %.1e", apart)
  if apart > 1e-3:
    raise ValueError(f"the larger policy's logits differ by {apart:.1e} from the policy's")
  setup.export(workdir / "policy", config["policy"], model, wide)
  if folder:
    drafter, params = drafter_files.load(folder, small)
    if drafter.kind != "eagle2":
      raise ValueError(f"{folder}: only an eagle2 drafter can be embedded")
    one = dataclasses.replace(drafter, layer=padded(drafter.layer, times))
    random = drafter_lib.init_params(one, jax.random.key(0))
    drafter_files.save(workdir / "drafter", one, embed(params, random, times, parts=2))
    logging.info("exported its drafter to %s", workdir / "drafter")


if __name__ == "__main__":
  setup.run(main)
