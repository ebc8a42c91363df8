"""NNX variables in a step: the model gathers them where it reads them; only the optimizer changes parameters.

To treat another kind of variable differently, edit `hooks.attach_use`.
"""
