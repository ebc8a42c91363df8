"""The day a GPU comes: everything that jaxpar claims about GPUs, measured in some minutes by one command.

    python -m tests.bench.gpu --plan      predictions, made anywhere and committed        predicted.json
    python -m tests.bench.gpu             measurements, each beside its prediction        gpu.jsonl, CHIP.toml, gpu.log
    python -m tests.bench.gpu --table     the tables of the README, from the records

Terms: a *stage* measures one thing, as a process of its own with a limit (`stage.py`; `table.py` lists them). Its
*work* takes each measurement once (`work.py`), into the *lines* of the record (`lines.py`), under the *identity* of
device, driver, versions and sources (`identity.py`). The *runner* starts what fits into the minutes (`runner.py`).

To add a stage: a file in `stages/` with a `STAGE`, and its place in `table.py`. `--rehearse` runs every stage with tiny
sizes on any machine: its lines say so, and no table is made of them.
"""
