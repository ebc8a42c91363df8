"""`jaxpar launch -n 4 train JOB`: starts, watches and restarts several processes of one job."""

import argparse
import sys
from typing import Any

from jaxpar.cli.options import add_allow_import, add_json, job_file

EXAMPLE = """\
  $ jaxpar launch -n 4 train configs/quickstart.toml
  $ jaxpar launch -n 8 --nodes 2 --node 1 --coordinator 10.0.0.1:7777 train job.toml
  the second of two machines, with eight processes each

Processes started by SLURM, torchrun, Open MPI or as a Kubernetes indexed job find each other without this verb.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "launch",
        help="train a job in several processes",
        description="Train a job in several processes; if one fails, restart from the newest checkpoint.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("-n", "--processes", type=int, required=True, help="processes on this machine")
    verb.add_argument("--restarts", type=int, default=3, help="attempts without a new checkpoint (default 3)")
    verb.add_argument(
        "--nodes", type=int, default=1, help="number of machines, with equally many processes; all share run.dir"
    )
    verb.add_argument("--node", type=int, default=0, help="index of this machine, from 0")
    verb.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="address of process 0; required with --nodes"
    )
    add_allow_import(verb)
    add_json(verb)
    verb.add_argument("command", choices=["train"], help="the verb that each process runs")
    verb.add_argument("job", metavar="JOB", type=job_file, help="a TOML file")
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    verb.set_defaults(run=run_launch)


def run_launch(args: argparse.Namespace) -> tuple[Any, int]:
    """Starts the processes and waits for them."""
    from jaxpar.buckets import local_folder
    from jaxpar.checkpoint import listing
    from jaxpar.cli.output import redirect_on_failure
    from jaxpar.job.file.parse import load
    from jaxpar.job.shrink import fit_processes
    from jaxpar.supervisor import Launch, supervise
    from jaxpar.train.watchdog.thread import report

    allowed = args.allow_import
    folder = local_folder(
        load(args.job, args.overrides, allow_import=allowed).run.dir
    )  # errors are printed once, before processes start
    redirect_on_failure(folder)
    launch = Launch(
        command=[args.command, args.job, *args.overrides], options=["--allow-import"] * allowed,
        processes=args.processes, restarts=args.restarts,
        nodes=args.nodes, node=args.node, coordinator=args.coordinator,
        on_failure=lambda ended: report(folder, ended.process, ended.pid, ended.description),
        shrink=lambda command, count: fit_processes(
            load(command[1], command[2:], allow_import=allowed), processes=count, most=count - 1
        ),
    )  # fmt: skip

    def progress() -> int:
        step = listing.newest(folder / "checkpoints")
        return -1 if step is None else step

    result = supervise(
        launch, progress=progress, log=lambda line: print(f"launch: {line}", file=sys.stderr, flush=True)
    )
    return result, result["status"]
