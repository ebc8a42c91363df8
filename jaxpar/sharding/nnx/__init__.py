"""An NNX model's variables as a step has them: used where they are read, parameters changed by the optimizer alone.

To treat another kind of variable otherwise: in `hooks.used`.
"""
