"""TLT in JAX: reinforcement learning of reasoning models without the long tail.

One letter per dimension, the same in einsums, comments and docstrings:

    B  sequences (P * R), or slots        D  width of the model
    P  prompts                            F  width of the MLP
    R  responses per prompt               N  query heads
    T  tokens of a row in this call       K  key/value heads
    S  cache slots (tokens) of a row      G  query heads per kv head (N / K)
    J  nodes of a draft tree              H  size of a head
    W  children per node                  L  layers
    A  most tokens that one pass of the   V  vocabulary of the target
       target may give: accepted drafts   U  vocabulary of a drafter of its own
       and the bonus                      E  numbers kept per token for drafters
    C  sequences that n-grams are         M  micro-batches
       looked up in

Other sizes are words, as in `i32[B stops]`; they are of the place where they stand. A
star is any size, dots are any axes. Shapes are written dtype first, `f32[B T V]`;
`f[...]` is the computation's dtype. A mask is True where something counts.

Words: *policy* or *target* is the LLM that is trained. A *drafter* is a small model that
guesses its next tokens, one *source* of drafts among several. A *strategy* says how far
to guess; a *selector* chooses one, or plain decoding, for every *chunk*: a bounded number
of decoding iterations in one program. A *slice* is a group of devices that hold one
replica of the target; a *slot* is a row of its batch. *Features* are the hidden states of
the target that drafters read.
"""

__version__ = "0.1.0"  # the only place: the package and the documents follow
