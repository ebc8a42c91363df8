"""Infers the dim names of unannotated parameters from their use in the model's program.

    a call of the model ──► its jaxpr                                                  trace_call.py
    jaxpr of the model ──► dims in pieces, one where the program treats them as one       program.py, operations.py
                      └──► the use of each piece: produced, contracted, looked up, mixed  dim_pieces.py
    pieces             ──► names of dims: heads, mlp, vocab, embed, ...                   from_use.py
    paths and shapes   ──► the same by the field's usual layer names, without a program   from_words.py

If one matmul produces a dim and another contracts it, and nothing between mixes its entries, `tensor` splits it: the
first parameter by columns, the second by rows, without communication in between (Shoeybi et al. 2019,
arXiv:1909.08053). Such a dim is called heads if queries meet keys along it, else mlp.

A Linen model comes with an example of its inputs, so there is a program. An NNX model is made from `rngs` alone: there
is a program with `jp.from_nnx(factory, inputs)`, and in a job, where its loss calls the model. Otherwise names come
from words, and the first step warns where use contradicts them.

To follow another operation of JAX: a function in `OPERATIONS` of `operations.py`. To know another word: a row of
`WORDS` in `from_words.py`.
"""
