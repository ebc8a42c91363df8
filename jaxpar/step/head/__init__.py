"""The next-token loss in chunks, for models that expose hidden state and head: never materializes all logits.

    hidden [batch, seq, dim] ─► chunks of tokens ─► logits [chunk, vocab] ─► losses, and gradients at once
                                     └──────────────── scan ────────────────┘

    head_protocol     the model's protocol: a method `hidden`, and the path of its head in `head_name`
    token_sharding    the sharding of tokens and vocabulary in a step, and the chunks for it
    chunks            the sum of losses over chunks, with a custom backward pass

`models/settings/computing.py` sets how many logits are too many; `losses.next_token_loss` combines these files.
"""
