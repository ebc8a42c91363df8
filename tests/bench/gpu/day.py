"""The three things to do on the day: predict, measure, and make the tables; what `python -m tests.bench.gpu` calls."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.files import make_folder
from jaxpar.mesh.chips import find_chip
from jaxpar.plan.machine.hardware import HARDWARE, Hardware

from ..command import environment
from ..gpu import predicted, runner, show
from ..gpu.identity import Identity, check_unchanged, identify
from ..gpu.lines import NAME, Lines, read
from ..gpu.process import Ended, run_limited
from ..gpu.stage import Stage

LOG = "gpu.log"


def plan(stages: Sequence[Stage], folder: Path, *, chip: str = "h100", rehearsal: bool = False) -> dict[str, Any]:
    """Predicts what the stages will measure on a chip, without one, and writes the predictions.

    Raises:
      JaxparError: If the chip's constants are not known, XLA's compiler for GPUs is missing, or jaxpar was edited
        meanwhile.
    """
    if chip not in HARDWARE:
        raise refuse(f"--chip {chip}", rule=f"predicted for {', '.join(HARDWARE)}", fix="--chip h100")
    identity = identify(rehearsal=True)  # before the stages, as in `measure`: what is edited meanwhile predicts nothing
    make_folder(folder)
    found: dict[str, dict[str, predicted.Numbers]] = {}
    for stage in stages:
        if stage.predict is None:
            continue
        begin = time.perf_counter()
        found[stage.name] = dict(stage.predict(stage.sizes(rehearsal=rehearsal), HARDWARE[chip]))
        print(f"{stage.name:<12}{len(found[stage.name])} predicted in {time.perf_counter() - begin:.0f} s", flush=True)
    check_unchanged(identity)
    path = predicted.write(folder, chip, found, identity, rehearsal=rehearsal)
    print(f"{path}: commit it before anything is measured")
    return {"file": str(path), "predicted": found}


def measure(
    stages: Sequence[Stage], folder: Path, *, minutes: float, rehearsal: bool = False
) -> tuple[dict[str, Any], int]:
    """Runs the stages that fit into so many minutes, and returns how each ended, with an exit status.

    Raises:
      JaxparError: If there is no GPU and it is no rehearsal, the predictions are of other code, or the disk is full.
    """
    clock = time.monotonic
    budget = runner.Budget(60 * minutes, clock, clock())
    identity = identify(rehearsal=rehearsal)
    make_folder(folder)
    foretold = [stage.name for stage in stages if stage.predict]
    known = predicted.find(folder, hardware_of(identity).chip.key, identity, stages=foretold)
    print(f"{identity.device}, sources {identity.sources}, predictions {known.file}; {minutes:g} minutes", flush=True)
    lines = Lines(folder / NAME, identity)
    cache = str(Path(tempfile.gettempdir()) / f"jaxpar-bench-gpu-{identity.sources}")

    def start(stage: Stage, limit: float) -> Ended:
        command = [sys.executable, "-m", "bench.gpu.one_stage", stage.name, str(folder), *["--rehearse"] * rehearsal]
        flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), stage.flags]))
        told = {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": cache}  # stages share programs, and what tuning found
        return run_limited(command, limit=limit, log=folder / LOG, environment={**environment(), **told})

    found = runner.run(stages, lines, budget, start)
    whole = all(outcome in ("measured", "there already") for outcome in found.values())
    return {"stages": found, "predictions": known.file, "record": str(lines.path)}, 0 if whole else 1


def table(folder: Path) -> str:
    """Prints the tables of a record, and returns them."""
    text = show.tables(read(folder / NAME), predicted.all_of(folder))
    print(text)
    return text


def hardware_of(identity: Identity) -> Hardware:
    """Returns the planner's constants of a device; a rehearsal's are those of an H100.

    Raises:
      JaxparError: If they are not known.
    """
    chip = find_chip("h100" if identity.rehearsal else identity.device)
    if chip is None or chip.key not in HARDWARE:
        raise refuse(
            f"bench gpu on {identity.device}",
            rule=f"what is measured was predicted, for {', '.join(HARDWARE)}",
            fix="jaxpar measure gemm --write mine.toml measures a chip of your own",
        )
    return HARDWARE[chip.key]
