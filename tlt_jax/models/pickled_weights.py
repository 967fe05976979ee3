"""Refuses weights that PyTorch has pickled, and says how to convert them.

Loading a pickle may run what it holds, so that none is ever loaded here.
"""

import pathlib
import shlex

from tlt_jax.models import hf_folder

_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WEIGHTS = "pytorch_model*.bin"  # what transformers calls the files of weights
# Takes the files of weights.
_CONVERT = (
  "python -c 'import sys, torch; from safetensors.torch import save_file as s; s({k: "
  "v.clone().contiguous() for f in sys.argv[1:] for k, v in torch.load(f, "
  'map_location="cpu", weights_only=True).items()}, "model.safetensors")\''
)


def refuse(path: pathlib.Path) -> None:
  """Raises CheckpointError if a folder has PyTorch's files and no safetensors.

  The error has the command that converts them: all that are called as transformers calls
  weights, else the only one there is.
  """
  found = sorted(file.name for p in _PATTERNS for file in path.glob(p))
  if not found or any(path.glob("*.safetensors")):
    return
  files, note = shlex.quote(found[0]), ""
  if any(path.glob(_WEIGHTS)):
    files = _WEIGHTS
  elif len(found) > 1:
    files, note = "FILE", f" (FILE: the one of these {len(found)} that has its weights)"
  raise hf_folder.CheckpointError(
    f"{path} holds {', '.join(map(repr, found)):.120} but no safetensors, and pickles are "
    f"never loaded; convert it, in that folder and with torch 2.6 or later{note}: "
    f"{_CONVERT} {files}"
  )
