"""An NNX model's variables in a step: gathered where they are read, parameters changed by the optimizer alone.

To treat another kind of variable otherwise: in `hooks.with_use`.
"""
