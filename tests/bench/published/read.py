"""A table of published runs, read from CSV: one run a line, checked before anything is predicted.

Columns, those in brackets may be missing or empty:

    system model source group [id] [published] [practice]     which software, and who published it where
    layers hidden heads vocab seq [kv_heads ffn gated tied]   the model; 0 is a head of keys a head, and 4 hidden
    gpus gpu [nic_GBps]                                       the machine; GB/s of a GPU's own share of the network
    [data fsdp zero tensor sequence context pipe chunks schedule]
    microbatch microbatches [remat] seconds                   rows of a microbatch on a replica; seconds of a step
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape, step_flop

from ..published.cells import AXES, NEEDED, OPTIONAL, USUAL, WORDS, contradictions, numbers, real, software
from ..published.stacks import CHIPS, GPT, INTERLEAVED

MORE = "more_published_runs.csv"  # of the package
NIC = 0.92  # share of a network card's rate that collectives reach: 46 of 50 GB/s, NVIDIA/nccl-tests issue 290


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that somebody published, as the planner takes it.

    Attributes:
      line: Of the file, the header's is 1.
      name: System, model and GPUs, in words.
      group: Runs of one group were made with one software on one cluster.
      gpu: The chip, by its name in `CHIPS`.
      shape: The model.
      candidate: The layout.
      hardware: The machine.
      practice: The name of what ran on it, in `stacks.PRACTICES`.
      software: What ran on it.
      seconds: Of a step, as published.
      source: Where.
      row: The cells of the line.
    """

    line: int
    name: str
    group: str
    gpu: str
    shape: Shape
    candidate: Candidate
    hardware: Hardware
    practice: str
    software: SoftwareModel
    seconds: float
    source: str
    row: Mapping[str, str]

    @property
    def rows(self) -> int:
        """Examples of a step on all replicas."""
        return self.candidate.microbatch * self.candidate.microbatches * self.candidate.replicas

    def mfu(self, seconds: float) -> float:
        """Returns the share of the bfloat16 peak that the model's own FLOP reach in so many seconds a step."""
        peak = self.hardware.chip.bf16_flops
        return step_flop(self.shape, self.rows) / (seconds * self.candidate.devices * peak)


def load(path: str | Path | None = None) -> tuple[Run, ...]:
    """Returns the runs of a file; those of the package where none is given.

    Raises:
      JaxparError: With every line that lacks something or contradicts itself.
    """
    name = str(path or MORE)
    try:
        given = Path(__file__).parent.parent / MORE if path is None else Path(path)
        lines = given.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"{name}: {error}", rule="a table of runs is a CSV file", fix="--runs runs.csv") from error
    reader = csv.DictReader(lines)
    lacks = [key for key in (*WORDS, *NEEDED, "seconds") if key not in (reader.fieldnames or ())]
    if lacks:
        raise refuse(
            f"line 1 of {name} has no column {', '.join(lacks)}",
            rule=f"the header names the columns {', '.join((*WORDS, *NEEDED, 'seconds'))}, and may name "
            f"{', '.join((*USUAL, *OPTIONAL))}",
            fix=f"add {lacks[0]}",
        )
    found, problems = [], []
    for row in reader:
        try:
            found.append(_run(row, reader.line_num))
        except JaxparError as error:
            problems += [replace(each, got=f"line {reader.line_num} of {name}: {each.got}") for each in error.problems]
    if problems:
        raise JaxparError(*problems)
    if not found:
        raise refuse(f"no run in {name}", rule="a table has a line for each run", fix="--runs runs.csv")
    return tuple(found)


def _run(row: Mapping[str, Any], line: int) -> Run:
    """Returns the run of a line.

    Raises:
      JaxparError: With all that is wrong with it.
    """
    if None in row or None in row.values():
        raise refuse("as many cells as columns are not there", rule="a line has one cell for each column", fix="quotes")
    number, problems = numbers(row)
    seconds, nic = real(row, "seconds", problems), real(row, "nic_GBps", problems, empty=math.nan)
    if row["gpu"] not in CHIPS:
        problems.append(Problem(f"gpu {row['gpu']!r:.40}", f"one of {', '.join(CHIPS)}", suggest(row["gpu"], CHIPS)))
    stack = software(row, problems)
    if problems or stack is None:
        raise JaxparError(*problems)
    sizes: dict[str, Any] = {key: number[key] for key in (*AXES, "zero", "chunks", "microbatch", "microbatches")}
    candidate = Candidate(
        **sizes, sequence=bool(number["sequence"]),
        schedule=row.get("schedule") or "1f1b", remat=row.get("remat") or "none",
    )  # fmt: skip
    gpt = stack[0] in GPT
    shape = Shape(
        layers=number["layers"], dim=number["hidden"], heads=number["heads"], vocab=number["vocab"],
        seq=number["seq"], kv_heads=number["kv_heads"], hidden=number["ffn"], gated=bool(number["gated"]),
        tied=bool(number["tied"]), learned=gpt, biases=gpt,
    )  # fmt: skip
    if row["system"] in INTERLEAVED and candidate.pipe > 1:
        chunks = -(-shape.layers // candidate.pipe)
        candidate = replace(candidate, schedule="interleaved", chunks=chunks)
    problems += contradictions(row, number, seconds)
    if problems:
        raise JaxparError(*problems)
    hardware = CHIPS[row["gpu"]]
    if nic == nic:
        hardware = replace(hardware, between=replace(hardware.between, bandwidth=NIC * nic * 1e9))
    return Run(
        line=line, name=f"{row['system']} {row['model']}, {number['gpus']} x {row['gpu']}", group=row["group"],
        gpu=row["gpu"], shape=shape, candidate=candidate, hardware=hardware, practice=stack[0], software=stack[1],
        seconds=seconds, source=row["source"], row=dict(row),
    )  # fmt: skip
