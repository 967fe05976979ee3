"""Writes what a run has trained as two folders that other tools open.

    python -m experiments.export --workdir=runs/mine --output=DIR [--server=vllm]

`DIR/policy` is a Hugging Face folder with tokenizer, in the number format of the policy
that the run began with. `DIR/drafter` is a drafter that SGLang loads, or vLLM, beside that
policy. Both are of the latest checkpoint; the run may still go on. Of a workdir of
`train_drafter` only the drafter is written. Commands of this project take the same folders
(`--model=DIR/policy --drafter=DIR/drafter` of `generate`).
"""

from collections.abc import Mapping
import logging
import pathlib
from typing import Any

from absl import flags
import flax.linen as nn
import jax

from experiments import launch
from experiments import workdirs
from tlt_jax import checkpoint
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import eagle_files
from tlt_jax.models import target

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Where the folders go.", required=True)
_SERVER = flags.DEFINE_enum(
  "server", "sglang", eagle_files.SERVERS, "That loads the drafter."
)

_REMEDY = "give the folder of a run"
_HOW = {
  "sglang": "python -m sglang.launch_server --model-path {policy} --speculative-algorithm "
  "{method} --speculative-draft-model-path {drafter}",
  "vllm": 'vllm serve {policy} --speculative-config \'{{"method": "{method}", "model": '
  '"{drafter}", "num_speculative_tokens": 3}}\'',
}


def export(workdir: pathlib.Path, output: pathlib.Path, server: str) -> str:
  """Writes both folders; returns what is to be said of them.

  Args:
    workdir: of `train` or `train_drafter`
    output: where to
    server: that loads the drafter, see `eagle_files.save`
  Raises:
    ValueError: there is nothing to export, or no server computes what the drafter does
  """
  config = workdirs.read(workdir, {}, _REMEDY)
  run = config.get("run", config)  # of a drafter's training: that it is for
  model = convert.load_config(run["policy"])
  if (output / "policy").resolve() == pathlib.Path(run["policy"]).resolve():
    raise ValueError(f"--output={output} has the policy that the run began with")
  checkpoints = checkpoint.Checkpoints(workdir / "checkpoints")
  if run is config:
    drafter, draft_params = drafter_of_run(run, model, checkpoints)
  else:
    drafter, draft_params = drafter_files.load(workdir / "drafter", model)
  if drafter is not None:  # first: it may be refused
    eagle_files.save(output / "drafter", drafter, draft_params, server, model.dtype)
  policy = run["policy"]
  if run is config:
    like = {"policy": {"params": on_host(target.abstract_params(model))}}
    step, state = checkpoints.restore_part(like)
    policy = output / "policy"
    params = state["policy"]["params"]
    convert.save_hf(policy, model, params, dtype=model.dtype)
    tokenization.copy_files(run["policy"], policy)
    logging.info("exported the policy of step %d to %s", step, policy)
  if drafter is None:
    return f"{policy}: {model.architecture}, {model.dtype}. The run has no drafter."
  return _told(policy, output / "drafter", drafter, server)


def drafter_of_run(
  run: Mapping[str, Any],
  model: config_lib.ModelConfig,
  checkpoints: checkpoint.Checkpoints,
) -> tuple[drafter_lib.DrafterConfig | None, Any]:
  """What drafts in a run: that of the latest checkpoint, or the frozen one of a folder."""
  name = run["drafter"]
  if not name:
    return None, None
  if drafters.is_kind(name):
    drafter, frozen = drafter_lib.of_target(model, name), None
  else:
    drafter, frozen = drafter_files.load(name, model)
  if not run["spot"]["every"]:
    return (drafter, frozen) if frozen is not None else (None, None)
  params = on_host(drafter_lib.abstract_params(drafter))
  if run["spot"]["held_out_rows"]:
    _, part = checkpoints.restore_part({"drafter": {"published": params}})
    return drafter, part["drafter"]["published"]
  name = "average" if run["spot"].get("average") else "params"
  _, part = checkpoints.restore_part({"drafter": {"state": {name: params}}})
  return drafter, part["drafter"]["state"][name]


def on_host(abstract: Any) -> Any:
  """Shapes of parameters that are to be read into the memory of the host."""
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host)
  return jax.tree.map(shaped, nn.meta.unbox(abstract))


def _told(
  policy: str | pathlib.Path,
  folder: pathlib.Path,
  drafter: drafter_lib.DrafterConfig,
  server: str,
) -> str:
  """Names the folders, and the command that serves them."""
  if not eagle_files.has_server(drafter):
    return (
      f"{policy}, {folder}: no released server has a class for this drafter, with norms of "
      "q and k; commands of this project take it"
    )
  method = {"eagle2": "eagle", "eagle3": "eagle3"}[drafter.kind]
  method = method.upper() if server == "sglang" else method
  return _HOW[server].format(policy=policy, drafter=folder, method=method)


def main():
  launch.start()
  print(export(pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value), _SERVER.value))


if __name__ == "__main__":
  launch.run(main)
