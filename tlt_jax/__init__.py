"""TLT in JAX: reinforcement learning of reasoning models without the long tail.

One letter per dimension, the same in einsums, comments and docstrings:

    B  sequences (P * R), or slots        D  width of the model
    P  prompts                            F  width of the MLP
    R  responses per prompt               N  query heads
    T  tokens of a row in this call       K  key/value heads
    S  cache slots (tokens) of a row      G  query heads per kv head (N / K)
    J  nodes of a draft tree              H  size of a head
    W  children per node                  L  layers
    A  most tokens per pass of the        V  vocabulary of the target
       target: accepted drafts and        U  a drafter's own vocabulary
       the bonus                          E  numbers kept per token for drafters
    C  sequences that n-grams are         M  micro-batches
       looked up in

Other sizes are words with a local meaning, as in `i32[B stops]`. A star is any size, dots
are any axes. Shapes are written dtype first, `f32[B T V]`; `f[...]` is the computation's
dtype. A mask is True where something counts. docs/glossary.md defines the words.
"""

__version__ = "0.1.0"  # the only place: the package and the documents follow
