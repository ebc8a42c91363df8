"""Evaluates checkpoints of a run, or a Hugging Face folder, on held-out examples and named sets.

evaluated_model  a trained model, its job without what only training needs, and the keys that may differ from the run
open_model       RUN/job.toml, checkpoints/, data/, or a folder with a config.json  ─►  `EvaluatedModel`
text_bytes       the bytes of text that a set's targets stand for
evaluate         `EvaluatedModel`  ─►  the loss and other metrics of each checkpoint on each set

A run folder is only read: texts are packed in a temporary folder.
"""
