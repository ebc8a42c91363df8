"""`jaxpar report RUN`: writes a run as one HTML page."""

import argparse
from pathlib import Path
from typing import Any

from jaxpar.cli.options import add_json, check_file

EXAMPLE = """\
  $ jaxpar report runs/quickstart
  step 200, loss 1.7990, best eval loss 1.8011 at step 200, 2 checkpoints, 3 events, 0 changes
  page: runs/quickstart/report.html
"""


def add(verbs) -> None:
    """Adds the verb to the subparsers of `jaxpar`."""
    meaning = "show a run on one page: curves, checkpoints, events, configuration, layout"
    verb = verbs.add_parser(
        "report",
        help=meaning,
        description=meaning + ". The page is one file, without scripts; it shows no speed for simulated devices.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("folder", metavar="RUN", help="the folder of a run")
    verb.add_argument("--html", metavar="FILE", help="the page (default: RUN/report.html)")
    add_json(verb)
    verb.set_defaults(run=write_report)


def write_report(args: argparse.Namespace) -> tuple[Any, int]:
    """Writes the page of a run and prints its path."""
    from jaxpar.buckets import READ_ONLY, Bucket, is_address, local_folder
    from jaxpar.files import write_text
    from jaxpar.job.report import page
    from jaxpar.job.report.read import read

    if args.html:
        check_file("--html", args.html, "report.html")
    bucket = Bucket(args.folder, kind=READ_ONLY) if is_address(args.folder) else None
    if bucket:
        bucket.pull()
    contents = read(bucket.local if bucket else local_folder(args.folder))
    file = Path(args.html) if args.html else contents.folder / "report.html"
    write_text(file, page.render(contents))
    if bucket:
        bucket.finish()
    print(page.text(contents), f"page: {file}", sep="\n")
    return {"page": str(file), "rows": len(contents.rows), "events": [vars(event) for event in contents.events]}, 0
