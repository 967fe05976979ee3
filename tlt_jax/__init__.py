"""TLT in JAX: reinforcement learning of reasoning models without the long tail.

One letter per dimension, the same in einsums, comments and docstrings:

    B  sequences (P * R), or slots      D  width of the model
    P  prompts                          F  width of the MLP
    R  responses per prompt; rows of    N  query heads
       a micro-batch                    K  key/value heads
    T  tokens in this call              G  query heads per kv head (N / K)
    S  cache slots (tokens)             H  size of a head
    M  micro-batches                    L  layers; length of a packed row
    E  stop tokens per request          V  vocabulary

Shapes are written dtype first, `f32[B T V]`; `f[...]` is the computation's dtype.
A mask is True where something counts.
"""
