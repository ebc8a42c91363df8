"""The loss of the next token for models that offer their hidden state and their head: all logits are never there.

    hidden [batch, seq, dim] ─► chunks of tokens ─► logits [chunk, vocab] ─► losses, and the gradients that follow
                                     └──────────────── scan ────────────────┘

    offered    what such a model says of itself: a method `hidden`, and the path of its head in `head_name`
    cut        how a step cuts tokens and vocabulary, and the chunks that follow from it
    chunks     the sum of losses over chunks, with a backward pass of its own

How many logits are too many is in `models/settings/logits.py`; `losses.next_token` puts all of it together.
"""
