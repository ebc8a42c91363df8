"""Loggers by name: each writes the rows of metrics.jsonl also to a library or a service.

    [metrics]
    loggers = ["tensorboard", "mlflow", "my_module:MyLogger"]

    run starts, resumes, rolls back ─► begin(run)         RUN/metrics.jsonl up to run.step is what the logger must show
    a row of a step, or its evaluation ─► log(step, values)
    run ends ─► close()

Terms: a `LoggedRun` (the run as a logger sees it), and loggers, which are objects with these methods; of a user's own
logger only `log` is required.

RUN/metrics.jsonl is the truth: a killed run resumes from a checkpoint before its last rows, and loses rows that a
library had not written yet. So `begin` makes the logger's curve that of the file, without a gap and without a step
twice, in the way that the library allows; see each class.

To add a logger: write a class and a row of `LOGGERS` in `services.py`, and an extra in pyproject.toml.
"""
