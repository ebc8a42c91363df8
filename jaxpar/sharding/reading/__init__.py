"""Reads what the dims of a bare model's parameters are: from what its program does with them.

    a call of the model ──► its jaxpr                                                  called.py
    jaxpr of the model ──► pieces of dims, one where the program treats them as one       program.py, operations.py
                      └──► what is done with each: made, taken, looked up, mixed          pieces.py
    pieces             ──► names of dims: heads, mlp, vocab, embed, ...                   use.py
    paths and shapes   ──► the same by the field's words, where there is no program       words.py

A dim that one matmul makes and another contracts, with nothing between that mixes its entries, is one that `tensor`
splits: the first parameter by columns, the second by rows, and nothing is sent in between (Shoeybi et al. 2019,
arXiv:1909.08053). Where queries meet keys such a dim is called heads, elsewhere mlp.

A Linen model comes with an example of its inputs, so there is a program. An NNX model is made from `rngs` alone: with
`jp.nnx(factory, inputs)`, and in a job, where its loss calls it, there is one, else words read it; the first step then
says where use would have told otherwise.

To follow another operation of JAX: a function in `OPERATIONS` of `operations.py`. To know another word: a row of
`WORDS` in `words.py`.
"""
