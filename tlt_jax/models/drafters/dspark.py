"""DSpark's drafter as published (https://arxiv.org/abs/2607.05147), which servers can load.

See `block`, whose default learns faster. Its selector has rank 256, its masks are a token
that the policy never writes, and its blocks read all of the context.
"""

from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models.drafters import block


def _new_block(target: config_lib.ModelConfig) -> drafter_lib.Block:
  unused = [start for start, end in target.unused_rows if start < end]
  if not unused:
    raise ValueError(
      "dspark drafters need a token that the policy never writes, and its vocabulary has "
      "none to spare; use kind block"
    )
  return drafter_lib.Block(mask_token=unused[0], anchored=False, window=None, rank=256)


KIND = drafters.Kind(
  new_block=_new_block, module=block.BlockDrafter, customary_taps=block.taps
)
