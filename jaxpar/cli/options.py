"""Options that several verbs share: the job, --allow-import, --json, and settings of the process."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpar import files


def add_job(verb: argparse.ArgumentParser) -> None:
    """Adds JOB, its overrides, --allow-import and --json."""
    verb.add_argument("job", metavar="JOB", type=job_file, help="a TOML file")
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    add_allow_import(verb)
    add_json(verb)


def job_file(name: str) -> str:
    """Returns the path of a job file; a missing file of `configs/` is replaced by the file that jaxpar ships.

    So the commands in the help texts run in any folder. A message on stderr reports the replacement.
    """
    from jaxpar.job.file.parse import replacement_note, shipped_job

    shipped = shipped_job(Path(name))
    if shipped is None:
        return name
    print(replacement_note(name), file=sys.stderr)
    return str(shipped)


def add_allow_import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--allow-import",
        action="store_true",
        help="let the job name Python objects of any module, not only of the working directory; this can run any code",
    )


def add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", metavar="FILE", help="also write the result as JSON")


def check_file(option: str, path: str | None, example: str, *, must_be_new: bool = False) -> None:
    """Raises if an output file cannot be written, before any work is done for it.

    Args:
      option: The option as typed, such as --html.
      path: Its value; None if the option is absent.
      example: A valid file name, for the message.
      must_be_new: Whether the file must not exist yet.

    Raises:
      JaxparError: If the path is a folder, its parent does not exist, or (with `must_be_new`) it exists.
    """
    from jaxpar.errors import refuse

    if path is None:
        return
    file = Path(path)
    unusable = file.exists() if must_be_new else not path or file.is_dir()
    if unusable or not file.absolute().parent.is_dir():
        rule = (
            "a file that does not exist yet, in a folder that exists"
            if must_be_new
            else "it is a file, in a folder that exists"
        )
        raise refuse(f"{option} {path}", rule=rule, fix=f"{option} {example}")


def wants_colour() -> bool:
    """Whether stdout is a terminal with colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def prefer_huge_pages() -> None:
    """Restarts this process once, with transparent huge pages for malloc; used with simulated devices.

    XLA's temporaries on the CPU are large, and every step touches them page by page again.
    glibc reads the setting only at start. Call this before JAX is imported, so that JAX is imported once.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "hugetlb" in tunables or os.environ.get("JAXPAR_NO_HUGE_PAGES"):
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def simulates_devices(job: str, overrides: Sequence[str]) -> bool:
    """Whether a job file or an override sets mesh.simulate; imports no JAX.

    Returns False for a file that cannot be read: loading the job reports its error.
    """
    values = [word.partition("=")[2].strip() for word in overrides if word.startswith("mesh.simulate=")]
    try:
        mesh = files.parse_toml(Path(job).read_text(encoding="utf-8-sig")).get("mesh")
    except (OSError, ValueError, RecursionError):
        return False
    return values[-1] != "0" if values else isinstance(mesh, dict) and bool(mesh.get("simulate"))
