"""`jaxpar plan JOB`: which layout would be fastest on GPUs that nobody has paid for yet."""

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

All of it is modelled; --verify compiles the first layouts and shows what XLA made of them beside it.
Ends with status 1 where nothing fits.
"""


def add(verbs) -> None:
    """Adds the verb."""
    verb = verbs.add_parser(
        "plan",
        help="the best layout for a job on GPUs that need not be there: which, how fast, why",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(verb)
    verb.add_argument("--devices", metavar="N", type=int, required=True, help="how many GPUs")
    verb.add_argument(
        "--chip",
        default="h100",
        help="of jaxpar's table, such as h200, or the file of a chip: mine.toml (default: h100)",
    )
    verb.add_argument("--per-node", metavar="N", type=int, help="GPUs that NVLink joins (default: 8, or the file's)")
    verb.add_argument(
        "--inside", metavar="BYTES", help="per second and GPU inside a node, one way, as collectives reach: 300GB"
    )
    verb.add_argument("--between", metavar="BYTES", help="the same between nodes, of one GPU's NIC: 3GB, 10Gb/s")
    verb.add_argument("--memory", metavar="BYTES", help="of a GPU, that a program may use: 70GiB")
    verb.add_argument(
        "--attention",
        choices=["unfused", "fused"],
        help="fused: with cuDNN's kernel where a run has it, not for gathered keys (default); unfused: XLA's own, as "
        "--verify compiles it here (default with --verify)",
    )
    verb.add_argument(
        "--price", metavar="MONEY", help="of a GPU-hour, for what the job costs beside its GPU-hours: 2.5"
    )
    verb.add_argument("--schedules", metavar="NAMES", help="of pipelines to weigh: zb_h1,1f1b_phased, or all of them")
    verb.add_argument("--top", metavar="N", type=int, default=10, help="layouts to show (default: 10)")
    verb.add_argument("--verify", metavar="N", type=int, default=0, help="compile the first N, and compare")
    verb.add_argument("--advise", action="store_true", help="also what the published rules of thumb say, and the gap")
    verb.add_argument("--write", metavar="FILE", help="write the job with the first layout")
    verb.add_argument(
        "--html", metavar="FILE", help="also write a page with pictures, one file that needs nothing else"
    )
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> tuple[Any, int]:
    """Prints the plan."""
    from jaxpar.errors import refuse
    from jaxpar.job.file.dump import dumps
    from jaxpar.job.file.parse import load
    from jaxpar.job.parts.plan_model import needs_jax
    from jaxpar.job.plan import apply_layout, command, compiled_chip, question
    from jaxpar.plan.pages.html import write
    from jaxpar.plan.pages.text import page
    from jaxpar.plan.rules.advice import advise
    from jaxpar.plan.search import search
    from jaxpar.plan.speed import speed
    from jaxpar.plan.validation import agreement, comparison, proposal

    for key, number, least in (("--top", args.top, 1), ("--verify", args.verify, 0)):
        if number < least:
            raise refuse(f"{key} {number}", rule=f"a whole number, at least {least}", fix=f"{key} 3")
    check_file("--write", args.write, "planned.toml", anew=True)
    check_file("--html", args.html, "plan.html")
    job = load(args.job, args.overrides, allow_import=args.allow_import)
    if args.verify or needs_jax(job):
        from jaxpar.mesh.devices import use_cpu_only

        use_cpu_only()
    attention = args.attention or "fused"
    asked = question(
        job, devices=args.devices, chip=args.chip, per_node=args.per_node,
        options={"inside": args.inside, "between": args.between, "memory": args.memory, "attention": attention,
               "price": args.price, "schedules": args.schedules},
    )  # fmt: skip
    if args.verify:
        compiled_chip(asked.hardware)
    plan = search(asked, top=args.top)
    print(page(plan, colour=wants_colour()))
    result: dict[str, Any] = plan.to_dict() | {"attention": asked.model.attention(asked.software)}
    for row, each in zip(result["best"], plan.best, strict=True):
        row["speed"] = speed(asked, each).to_dict()
    if args.advise:
        advice = advise(plan)
        print(fold(f"\n{advice}", terminal_width()))
        result["advice"] = advice.to_dict()
    checked = []
    if args.verify:
        from jaxpar.job.verify import verify

        checked = list(verify(job, asked, plan.best[: args.verify]))
        print(fold("\n" + comparison(checked), terminal_width()))
        result |= {"verified": [each.to_dict() for each in checked], "agreement": agreement(checked)}
    first = proposal(plan, checked).candidate
    made = apply_layout(job, first, asked.model.layers, asked.hardware)
    train = command(args.job, args.overrides, job, made)
    print(f"\nTrain it so:\n  {train}")
    if args.write:
        Path(args.write).write_text(dumps(made))
        print(f"job: {args.write}")
    if args.html:
        page_of_plan = write(plan, title=f"{Path(args.job).stem}: a plan", command=train, checked=checked)
        Path(args.html).write_text(page_of_plan)
        print(f"page: {args.html}")
    return result, 0
