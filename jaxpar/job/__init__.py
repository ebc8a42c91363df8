"""Jobs: a job file holds the settings of every package, and `build` turns them into a compiled step.

    file/       parsing and writing of job files; every problem is reported at once
    parts/      the model, data, optimizer and planner model that a job names
    doctor/     checks of this machine before a run
    compare/    one job trained with several exchanges, side by side
    report/     a run folder as one HTML page
    evaluation/ a run's checkpoints, or a Hugging Face folder, on held-out examples and other data
    plan_api, chat  commands as Python functions: `jp.plan`; a chat
    starter     the files that `jaxpar new` writes

Terms: a `Job` and its tables, a problem, a verb. Each verb (`run`, `check`, `inspect`, `plan`, ...) has one file here,
which returns values; `cli` prints them.
To add a key: add a field and its meaning (under Attributes) to the dataclass of the package that reads it; the schema,
`--print-defaults` and the check for unknown keys follow. To add a verb: add a file here that returns a value, and one
in `cli` that prints it.
"""
