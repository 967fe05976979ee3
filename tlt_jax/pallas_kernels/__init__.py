"""Operations of a decoding step with kernels, in a folder each.

    ref.py     the reference in plain jax.numpy, for any machine
    pallas.py  for TPUs (Mosaic); on a CPU it can be interpreted
    triton.py  for NVIDIA GPUs from compute capability 8.0 on

An operation's implementations have the same signature. `__init__.py` has the function to
call; its `impl` selects one, see `implementations`.
"""
