"""Operations of a decoding step that are worth a kernel, each in a folder of its own.

    ref.py     says what it computes, in plain jax.numpy; it runs everywhere
    pallas.py  for TPUs (Mosaic); on a CPU it can be interpreted
    triton.py  for NVIDIA GPUs from compute capability 8.0 on, through jax-triton

All of an operation's implementations have one signature. `__init__.py` has the function to
call; its `impl` names one, or is None for that of the machine, see `implementations`.
"""
