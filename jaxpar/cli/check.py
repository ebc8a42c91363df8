"""`jaxpar check JOB`: every problem at once, before any compile, on any machine."""

import argparse
from typing import Any

from jaxpar.cli.options import add_job

EXAMPLE = """\
  $ jaxpar check configs/quickstart.toml
  ok: Decoder on data 2 x fsdp 2 x tensor 2, ZeRO-3: ...
  $ jaxpar check configs/quickstart.toml --explain
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "check",
        help="report every problem of a job",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--explain", action="store_true", help="show where every parameter goes, and why")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Returns the problems; raises if there are any."""
    import jax

    from jaxpar.errors import JaxparError
    from jaxpar.job.build import check, device_count, resolve_loss, resolve_model
    from jaxpar.job.schema import read
    from jaxpar.parallel.compose import compose

    job, problems = read(args.job, args.overrides)
    if job is None:
        raise JaxparError(*problems)
    if job.mesh.simulate or job.mesh.devices:  # the devices need not be there, so do not look for them
        jax.config.update("jax_platforms", "cpu")
    if not any(problem.got.startswith(("parallel.", "mesh.")) for problem in problems):  # else sizes are not known
        problems += check(job, whole=not problems)
    if problems:
        raise JaxparError(*problems)
    layout = compose(resolve_model(job, resolve_loss(job)), job.parallel, device_count(job))
    print(f"ok: {layout.summary()}")
    if args.explain:
        print(layout.explain().partition("\n\n")[2])
    placed = {path: layout.describe(path) for path in layout.placements}
    return {"problems": [], "summary": layout.summary(), "parameters": placed}, 0
