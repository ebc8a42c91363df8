"""`jaxpar specs JOB`: the dims of a job's model that `tensor` and `context` should split, by an integer program."""

import argparse
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_job, check_file

EXAMPLE = """\
  $ jaxpar specs configs/quickstart.toml
  $ jaxpar specs configs/quickstart.toml --write found.toml
  $ jaxpar specs configs/quickstart.toml --verify h100:1x8

The loss and its gradients are traced, and the dims are chosen exactly: by FLOP, bytes over the link, launches and
memory on the chip. The result is a name for each dim: of parameters by their paths, of activations by lines of the
source. --write adds these names to the job; with `specs = "found"` under [parallel] every start of the job finds them
anew. All seconds are modelled.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "specs",
        help="the dims that `tensor` and `context` should split: found for any model, with a certificate",
        description="Find the dims of parameters and activations that `tensor` and `context` should split.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--chip", default="h100", help="a chip of jaxpar's table, such as h200 (default: h100)")
    verb.add_argument("--memory", metavar="BYTES", help="memory for parameters, their state and kept activations: 8GiB")
    verb.add_argument("--examples", action="store_true", help="let the axes split examples too, where that is cheaper")
    verb.add_argument(
        "--verify", metavar="TARGET", help="compile with and without the specs, for CHIP:NODESxGPUS or cpu, and compare"
    )
    verb.add_argument("--write", metavar="FILE", help="write the job with the names that were found")
    verb.set_defaults(run=run_specs)


def run_specs(args: argparse.Namespace) -> tuple[Any, int]:
    """Finds the specs of a job, prints them with their reasons, and writes the job with them."""
    from jaxpar.job.file.dump import dumps
    from jaxpar.job.file.parse import load
    from jaxpar.mesh.devices import use_cpu_only
    from jaxpar.units import parse_bytes

    check_file("--write", args.write, "found.toml", must_be_new=True)
    memory = None if args.memory is None else parse_bytes(args.memory)
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    use_cpu_only()  # nothing runs
    from jaxpar.job.specs import compare_specs, specs_of_job, with_specs

    found = specs_of_job(job, chip=args.chip, memory=memory, examples=args.examples)
    print(found.explain())
    solution = found.solution
    result: dict[str, Any] = {
        "paths": found.specs.paths, "activations": found.specs.activations, "rules": found.specs.rules,
        "seconds": solution.cost, "bound": solution.bound, "gap": solution.gap, "memory": solution.memory,
        "traffic": solution.traffic, "reasons": found.reasons, "not_followed": found.unknown, "note": found.note,
    }  # fmt: skip
    if args.verify:
        compared = compare_specs(job, found, args.verify)
        print(f"\n{compared}")
        result["verified"] = {"compiled": compared.compiled, "without": compared.without, "memory": compared.memory}
    if args.write:
        Path(args.write).write_text(dumps(with_specs(job, found)))
        print(f"job: {args.write}")
    return result, 0
