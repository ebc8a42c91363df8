"""The training jobs that stages measure: what they are, how they run and are traced, and whom they stand beside.

A job is a `Training` (`training.py`): declared, compiled for a GPU that is not there, or run (`running.py`). To measure
it beside somebody else's step: a function in `models_with_state.py`.
"""
