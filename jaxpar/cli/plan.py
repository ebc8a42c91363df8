"""`jaxpar plan JOB`: predicts the fastest layout of a job on GPUs that this machine need not have."""

import argparse
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_job, check_file, wants_colour
from jaxpar.columns import fold, terminal_width

EXAMPLE = """\
  $ jaxpar plan configs/gpu_llama_8b_fsdp8.toml --devices 64 --chip h100
  $ jaxpar plan configs/gpu_llama_8b_fsdp8.toml --devices 64 --chip h100 --verify 3
  $ jaxpar plan configs/gpu_llama_8b_fsdp8.toml --devices 64 --between 3GB --write planned.toml
  $ jaxpar plan configs/gpu_llama_8b_fsdp8.toml --devices 8 --advise --price 2.5
  $ jaxpar plan configs/gpu_llama_8b_fsdp8.toml --devices 8 --chip mine.toml

mine.toml is what `jaxpar measure gemm --write mine.toml` and `jaxpar measure links --write mine.toml` measured.

All numbers are modelled; --verify compiles the first layouts and shows the numbers of XLA next to them.
Exits with status 1 if nothing fits.
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    verb = verbs.add_parser(
        "plan",
        help="the best layout for a job on GPUs that need not be there: which, how fast, why",
        description="Predict the fastest layouts of a job on GPUs that this machine need not have.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--devices", metavar="N", type=int, required=True, help="number of GPUs")
    verb.add_argument(
        "--chip",
        default="h100",
        help="a chip of jaxpar's table, such as h200, or a chip file: mine.toml (default: h100)",
    )
    verb.add_argument("--per-node", metavar="N", type=int, help="GPUs that NVLink joins (default: 8, or the file's)")
    verb.add_argument(
        "--inside",
        metavar="BYTES",
        help="bandwidth that collectives reach inside a node, per second and GPU, one way: 300GB",
    )
    verb.add_argument("--between", metavar="BYTES", help="bandwidth between nodes, of one GPU's NIC: 3GB, 10Gb/s")
    verb.add_argument("--memory", metavar="BYTES", help="memory of a GPU that a program may use: 70GiB")
    verb.add_argument(
        "--attention",
        choices=["unfused", "fused"],
        help="fused: with cuDNN's kernel where a run has it, not for gathered keys (default); unfused: XLA's own, as "
        "--verify compiles it here (default with --verify)",
    )
    verb.add_argument("--price", metavar="MONEY", help="price of a GPU-hour, to show the cost of the job: 2.5")
    verb.add_argument("--schedules", metavar="NAMES", help="pipeline schedules to consider: zb_h1,1f1b_phased, or all")
    verb.add_argument("--top", metavar="N", type=int, default=10, help="number of layouts to show (default: 10)")
    verb.add_argument("--verify", metavar="N", type=int, default=0, help="compile the first N layouts, and compare")
    verb.add_argument(
        "--advise", action="store_true", help="also show the layouts of published rules of thumb, and the gap"
    )
    verb.add_argument("--write", metavar="FILE", help="write the job with the first layout")
    verb.add_argument("--html", metavar="FILE", help="also write a self-contained page with pictures")
    verb.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> tuple[Any, int]:
    """Searches the layouts of a job and prints the fastest."""
    from jaxpar.errors import refuse
    from jaxpar.job.file.dump import dumps
    from jaxpar.job.file.parse import load
    from jaxpar.job.parts.plan_model import needs_jax
    from jaxpar.job.plan import apply_layout, command, compiled_chip, question
    from jaxpar.plan.decision_table import advise
    from jaxpar.plan.pages.html import write
    from jaxpar.plan.pages.terminal import page
    from jaxpar.plan.search import search
    from jaxpar.plan.speed import speed
    from jaxpar.plan.validation import agreement, comparison, proposal

    for key, number, least in (("--top", args.top, 1), ("--verify", args.verify, 0)):
        if number < least:
            raise refuse(f"{key} {number}", rule=f"a whole number, at least {least}", fix=f"{key} 3")
    check_file("--write", args.write, "planned.toml", must_be_new=True)
    check_file("--html", args.html, "plan.html")
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    if args.verify or needs_jax(job):
        from jaxpar.mesh.devices import use_cpu_only

        use_cpu_only()
    attention = args.attention or "fused"
    request = question(
        job, devices=args.devices, chip=args.chip, per_node=args.per_node,
        options={"inside": args.inside, "between": args.between, "memory": args.memory, "attention": attention,
               "price": args.price, "schedules": args.schedules},
    )  # fmt: skip
    if args.verify:
        compiled_chip(request.hardware)
    plan = search(request, top=args.top)
    print(page(plan, colour=wants_colour()))
    result: dict[str, Any] = plan.to_dict() | {"attention": request.costs.attention}
    for row, scored in zip(result["best"], plan.best, strict=True):
        row["speed"] = speed(request, scored).to_dict()
    if args.advise:
        advice = advise(plan)
        print(fold(f"\n{advice}", terminal_width()))
        result["advice"] = advice.to_dict()
    verified = []
    if args.verify:
        from jaxpar.job.inspect import verify

        verified = list(verify(job, request, plan.best[: args.verify]))
        print(fold("\n" + comparison(verified), terminal_width()))
        result |= {"verified": [scored.to_dict() for scored in verified], "agreement": agreement(verified)}
    first = proposal(plan, verified).candidate
    planned_job = apply_layout(job, first, request.model.layers, request.hardware, named=request.model.named_axes)
    train = command(args.job, args.overrides, job, planned_job)
    print(f"\nTrain it so:\n  {train}")
    if args.write:
        Path(args.write).write_text(dumps(planned_job))
        print(f"job: {args.write}")
    if args.html:
        page_of_plan = write(plan, title=f"{Path(args.job).stem}: a plan", command=train, checked=verified)
        Path(args.html).write_text(page_of_plan)
        print(f"page: {args.html}")
    return result, 0
