"""Embeds a policy, and its drafter, in a larger one that computes the same.

    python -m experiments.bench.widen --config=experiments/configs/countdown.py:small \
        --workdir=runs/wide

The policy of 1.5M parameters is so small that a step costs what its operations cost to
start. The larger one costs what its weights cost to read, as real models do, and still
answers Countdown: benchmarks on it use the lengths and the acceptance of the real policy.

How, `experiments.growth` says.

The drafter's hidden states get the policy's width; its heads and its MLP stay as they
are. It costs a 23rd of a pass of the larger policy then, as the drafters of models with
28 layers do, and not a tenth.
"""

import dataclasses
import logging
import pathlib

from absl import flags
import jax

from experiments import growth
from experiments import keys
from experiments import launch
from experiments import workdirs
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
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
  small, params = hf.load(policy)
  model = larger(small, layers or -(-small.num_layers * 3 // 2), times)
  init = jax.jit(lambda key: target.init_params(model, key))
  wide = growth.embed(params, init(jax.random.key(0)), times)
  growth.check_same(small, params, model, wide)
  hf.save(folder / "policy", model, wide)
  tokenization.copy_files(policy, folder / "policy")
  logging.info("exported the policy to %s", folder / "policy")
  if drafter:
    config, params = drafter_files.load(drafter, small)
    if config.kind != "eagle2":
      raise ValueError(f"{drafter}: only an eagle2 drafter can be embedded")
    one = dataclasses.replace(config, layer=padded(config.layer, times))
    init = jax.jit(lambda key: drafter_lib.init_params(one, key))
    random = init(jax.random.key(0))
    wider = growth.embed(params, random, times, parts=2)
    drafter_files.save(folder / "drafter", one, wider)
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
