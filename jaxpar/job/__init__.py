"""Jobs: a job file gathers the settings of each room, and `build` makes a step of them, room by room.

    file/     text and tables of a job file, every problem at once
    parts/    the model, the data and the plan's model that a job names
    doctor/   what would stop or slow a run on this machine
    compare/  ways to agree, on one job
    benches/  what `jaxpar bench` measures or compiles of jobs
    report/   a run's folder as one page
    doors/    what verbs do, for Python: `jp.plan`; a chat
    template/ the folder that a user begins with

Nouns: a `Job` and its tables, a problem, a verb. One file per verb (`run`, `check`, `inspect`, `plan`, ...) returns
values; `cli` prints them.
To add a key of a job: a field with its meaning in the Attributes of the dataclass that the room reads; the file's
schema, `--print-defaults` and the checks of unknown keys follow from it. To add a verb: a file here that returns a
value, and one in `cli` that prints it.
"""
