"""The process of one stage: `python -m tests.bench.gpu.one_stage STAGE FOLDER [--rehearse]`."""

import argparse
import sys
from pathlib import Path

from jaxpar.errors import JaxparError
from jaxpar.mesh.xla import hush_plugin
from jaxpar.process_exit import exit_with_supervisor

from ..gpu.day import hardware_of
from ..gpu.identity import Identity, identify
from ..gpu.lines import NAME, Lines
from ..gpu.stage import Stage
from ..gpu.table import chosen
from ..gpu.work import Work


def main(argv: list[str]) -> int:
    """Runs a stage, and returns its exit status."""
    exit_with_supervisor()
    hush_plugin()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.one_stage")
    parser.add_argument("stage")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    identity = identify(rehearsal=args.rehearse)
    (stage,) = chosen(args.stage)
    try:
        stage.run(work(stage, args.folder, identity))
    except JaxparError as error:
        print(f"error: {error}")
        return 1
    return 0


def work(stage: Stage, folder: Path, identity: Identity) -> Work:
    """Returns the work of a stage."""
    return Work(
        stage=stage.name, sizes=stage.sizes(rehearsal=identity.rehearsal), lines=Lines(folder / NAME, identity),
        hardware=hardware_of(identity),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
