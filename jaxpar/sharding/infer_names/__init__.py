"""Infers the dim names of unannotated parameters from their use in the model's program.

    a call of the model ──► its jaxpr                                                  infer_dims.py
    jaxpr of the model ──► dims as pieces; dims that the program equates share one        from_use.py, operations.py
                      └──► the use of each piece: produced, contracted, looked up, mixed  dim_pieces.py
    pieces             ──► names of dims: heads, mlp, vocab, embed, ...                   from_use.py
    paths and shapes   ──► the same by the field's usual layer names, without a program   from_words.py

If one matmul produces a dim, another contracts it, and no operation between them mixes its entries, `tensor` splits it:
the first parameter by columns, the second by rows, without communication in between (Shoeybi et al. 2019,
arXiv:1909.08053). Such a dim is named heads if it is a batch dim of the product of queries and keys, else mlp.

A Linen model comes with example inputs, so it can be traced. An NNX model needs only `rngs`: it can be traced with
`jp.from_nnx(factory, inputs)`, and in a job, whose loss calls the model. Otherwise names come from the words in the
paths of parameters, and the first step warns where the use of a parameter contradicts its name.

To follow another operation of JAX: a function in `OPERATIONS` of `operations.py`. To know another word: a row of
`WORDS` in `from_words.py`.
"""
