"""The hall: a job file gathers each room's own spec, and `build` walks through the rooms.

    file/     text and tables of a job file, every problem at once
    parts/    the model, the data and the plan's model that a job names
    doctor/   what would stop or slow a run on this machine

Nouns: a `Job` and its tables, a problem, a verb. One file per verb (`run`, `check`, `inspect`, `plan`, ...) returns
values; `cli` prints them.
To add a key of a job: a field with its meaning in the spec of the room that reads it.
"""
