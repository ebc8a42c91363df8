"""The thirteen runs of `python -m tests.bench.planner`, as runs of a table."""

from ..planner import published, read
from ..published.read import Run

GROUPS = {"Megatron-LM": "Megatron 2022", "torchtitan": "torchtitan H100", "MaxText": "MaxText H100"}
PRACTICE = {"Megatron-LM": "MEGATRON_2022", "torchtitan": "TORCHTITAN", "MaxText": "MAXTEXT"}


def first() -> tuple[Run, ...]:
    """Returns the runs, in groups of their own but for torchtitan's."""
    found = []
    for line, row in enumerate(published(), 2):
        shape, candidate, hardware, software, seconds = read(row)
        gpu = row["gpu"].replace("-80GB", "")
        found.append(
            Run(
                line=line, name=f"{row['system']} {row['model']}, {row['gpus']} x {gpu}", group=GROUPS[row["system"]],
                gpu=gpu, shape=shape, candidate=candidate, hardware=hardware, practice=PRACTICE[row["system"]],
                software=software, seconds=seconds, source=row["source"], row=row,
            )
        )  # fmt: skip
    return tuple(found)
