"""Exports the policy and drafter of a run's latest checkpoint for other tools.

    python -m experiments.export --workdir=runs/mine --output=DIR [--server=vllm] \\
        [--policy_only]

`DIR/policy` is a Hugging Face folder with tokenizer, in the dtype of the run's initial
policy. `DIR/drafter` is a drafter for SGLang or vLLM. The run may still be active. From a
workdir of `train_drafter` only the drafter is exported, with `--policy_only` only the
policy. Commands of this project read the same folders (`generate --model=DIR/policy
--drafter=DIR/drafter`).
"""

from collections.abc import Mapping, Sequence
import json
import logging
import pathlib
import shlex
from typing import Any

from absl import flags
import flax.linen as nn
import jax

from experiments import launch
from experiments import workdirs
from tlt_jax import checkpoint
from tlt_jax import tokenization
from tlt_jax.models import block_files
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import eagle_files
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.spec_decode.spot import spot as spot_lib

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to.", required=True)
_SERVER = flags.DEFINE_enum(
  "server", "sglang", eagle_files.SERVERS, "Server for the drafter."
)
_POLICY_ONLY = flags.DEFINE_bool("policy_only", False, "Leave the drafter out.")

_REMEDY = "give the folder of a run"
# Writes the drafter's token ids as SGLang needs them, from d2t in the drafter's
# safetensors. Arguments: that file, and the file to write.
_TOKEN_MAP = (
  "python -c 'import sys, torch; from safetensors.torch import load_file; d = "
  'load_file(sys.argv[1])["d2t"]; torch.save((d + torch.arange(len(d))).tolist(), '
  "sys.argv[2])'"
)


def export(
  workdir: pathlib.Path, output: pathlib.Path, server: str, policy_only: bool = False
) -> str:
  """Writes both folders; returns a message with the commands that serve them."""
  config = workdirs.read_json(workdir, _REMEDY)
  offline = "run" in config  # of `train_drafter`
  run = config["run"] if offline else config
  if "policy" not in run or "drafter" not in run:
    raise ValueError(
      f"{workdir} is the folder of neither `train` nor `train_drafter`: its config.json "
      "names no policy and drafter"
    )
  if offline and policy_only:
    raise ValueError(f"--policy_only: {workdir} is of `train_drafter`, and has no policy")
  parts = ["policy"] * (not offline) + ["drafter"] * (not policy_only)
  _check_output([output / part for part in parts], workdir, run)
  model = hf.load_config(run["policy"])
  checkpoints = checkpoint.Checkpoints(workdir / "checkpoints")
  drafter = None
  if offline:
    drafter, params = drafter_files.load(workdir / "drafter", model)
  elif not policy_only:
    drafter, params = drafter_of_run(run, model, checkpoints)
  if drafter is not None:  # first: the server may not support it
    published = block_files if drafter.block else eagle_files
    try:
      published.save(output / "drafter", drafter, params, server, model.dtype)
    except hf.CheckpointError as e:
      way_out = "" if offline else "; or export without it: --policy_only"
      raise ValueError(f"{e}{way_out}") from e
  policy = run["policy"]
  if not offline:
    like = {"policy": {"params": on_host(target.abstract_params(model))}}
    step, state = checkpoints.restore_part(like)
    policy = output / "policy"
    hf.save(policy, model, state["policy"]["params"], dtype=model.dtype)
    tokenization.Tokenizer.load(run["policy"]).save(policy)
    logging.info("exported the policy of step %d to %s", step, policy)
  if drafter is not None:
    return _message(policy, output, drafter, server)
  why = "" if policy_only else " The run has no drafter."
  return f"{policy}: {model.architecture}, {model.dtype}.{why}"


def _check_output(
  folders: Sequence[pathlib.Path], workdir: pathlib.Path, run: Mapping[str, Any]
) -> None:
  kept = [run["policy"], run["drafter"], workdir / "policy", workdir / "drafter"]
  kept = [pathlib.Path(folder).resolve() for folder in kept if folder]
  for folder in folders:
    if folder.resolve() in kept:
      raise ValueError(
        f"{folder} would be replaced, which the run began with or writes itself; choose "
        "another --output"
      )


def drafter_of_run(
  run: Mapping[str, Any],
  model: config_lib.ModelConfig,
  checkpoints: checkpoint.Checkpoints,
) -> tuple[drafter_lib.DrafterConfig | None, Any]:
  """The drafter of the latest checkpoint, or the run's frozen one; None without one."""
  name = run["drafter"]
  if not name:
    return None, None
  if drafters.is_kind(name):
    saved = checkpoints.data()[1].get("drafter") or {}
    vocab = spot_lib.saved_vocab(saved)
    drafter, frozen = drafter_lib.of_target(model, name, vocab=vocab), None
  else:
    drafter, frozen = drafter_files.load(name, model)
  if not run["spot"]["train"]:
    return (drafter, frozen) if frozen is not None else (None, None)
  params = on_host(drafter_lib.abstract_params(drafter))
  name = "average" if run["spot"]["average"] else "params"
  _, part = checkpoints.restore_part({"drafter": {"state": {name: params}}})
  return drafter, part["drafter"]["state"][name]


def on_host(abstract: Any) -> Any:
  """Shapes of parameters with a sharding on the CPU."""
  host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), nn.meta.unbox(abstract)
  )


def _message(
  policy: str | pathlib.Path,
  output: pathlib.Path,
  drafter: drafter_lib.DrafterConfig,
  server: str,
) -> str:
  folder = output / "drafter"
  if not drafter.block and not eagle_files.has_server(drafter):
    return (
      f"{policy}, {folder}: no released server has a class for this drafter, with norms of "
      "q and k; commands of this project read it"
    )
  serve = {"sglang": _with_sglang, "vllm": _with_vllm}[server]
  return serve(str(policy), folder, drafter)


def _with_sglang(
  policy: str, folder: pathlib.Path, drafter: drafter_lib.DrafterConfig
) -> str:
  command = (
    f"python -m sglang.launch_server --model-path {shlex.quote(policy)} "
    f"--speculative-algorithm {_method(drafter).upper()} "
    f"--speculative-draft-model-path {shlex.quote(str(folder))}"
  )
  if drafter.block:
    command += f" --speculative-num-draft-tokens {drafter.block.guesses + 1}"
    return _of_all_tokens("SGLang", drafter) + command
  if drafter.kind != "eagle2" or not drafter.vocab:
    return command
  tensors = shlex.quote(str(folder / "model.safetensors"))
  tokens = shlex.quote(str(folder.with_name("token_map.pt")))
  return f"{_TOKEN_MAP} {tensors} {tokens}\n{command} --speculative-token-map {tokens}"


def _with_vllm(
  policy: str, folder: pathlib.Path, drafter: drafter_lib.DrafterConfig
) -> str:
  count = drafter.block.guesses if drafter.block else 3
  options = {
    "method": _method(drafter),
    "model": str(folder),
    "num_speculative_tokens": count,
  }
  quoted = shlex.quote(json.dumps(options))
  command = f"vllm serve {shlex.quote(policy)} --speculative-config {quoted}"
  return command if drafter.has_own_head else _of_all_tokens("vLLM", drafter) + command


def _method(drafter: drafter_lib.DrafterConfig) -> str:
  if drafter.block:
    return "dspark" if drafter.block.shifted else "dflash"
  return {"eagle2": "eagle", "eagle3": "eagle3"}[drafter.kind]


def _of_all_tokens(server: str, drafter: drafter_lib.DrafterConfig) -> str:
  """A line that says so, where the folder does not have the drafter's vocabulary."""
  if not drafter.vocab:
    return ""
  return (
    f"{server} drafts among all {drafter.layer.vocab_size:,} tokens, not the "
    f"{len(drafter.vocab):,} of this drafter; responses are the same, acceptance may "
    "differ:\n"
  )


def main():
  launch.start()
  folders = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUTPUT.value)
  workdirs.lock(folders[1])
  print(export(*folders, _SERVER.value, _POLICY_ONLY.value))


if __name__ == "__main__":
  launch.run(main)
