"""Options that several verbs share: the job on the command line, and the process it runs in."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpar import toml

SHIPPED = Path(__file__).parent.parent / "configs"  # in a checkout, a link to its configs/


def add_job(verb: argparse.ArgumentParser) -> None:
    """Adds JOB, its overrides, --allow-import and --json."""
    verb.add_argument("job", metavar="JOB", type=job_file, help="a TOML file")
    verb.add_argument("overrides", metavar="section.key=value", nargs="*", help="override keys of the job")
    add_allow_import(verb)
    add_json(verb)


def job_file(name: str) -> str:
    """Returns the file of a job; `configs/NAME.toml`, where there is none, is the one that jaxpar was installed with.

    So that the commands of the help run anywhere. It says so, as the file is not where it was looked for.
    """
    path = Path(name)
    if not name or path.exists() or path.parent != Path("configs") or not (SHIPPED / path.name).is_file():
        return name
    print(f"{name}: not in this folder; taken from {SHIPPED / path.name}", file=sys.stderr)
    return str(SHIPPED / path.name)


def add_allow_import(verb: argparse.ArgumentParser) -> None:
    """Adds --allow-import."""
    verb.add_argument(
        "--allow-import",
        action="store_true",
        help="let the job name Python objects of any module, not only the working directory's own; it may run anything",
    )


def add_json(verb: argparse.ArgumentParser) -> None:
    """Adds --json FILE."""
    verb.add_argument("--json", metavar="FILE", help="also write the result as JSON")


def check_file(option: str, path: str | None, example: str, *, anew: bool = False) -> None:
    """Refuses a file that could not be written, before any work is done for it.

    Args:
      option: As it is written, such as --html.
      path: What was given; None where nothing was.
      example: A name that would do.
      anew: Whether it must not be there yet.

    Raises:
      JaxparError: If it is a folder, has none to lie in, or is there already.
    """
    from jaxpar.errors import refuse

    if path is None:
        return
    file = Path(path)
    taken = file.exists() if anew else not path or file.is_dir()
    if taken or not file.absolute().parent.is_dir():
        rule = "a file to be, in a folder that exists" if anew else "it is a file, in a folder that exists"
        raise refuse(f"{option} {path}", rule=rule, fix=f"{option} {example}")


def wants_colour() -> bool:
    """Returns whether what is printed is read on a screen that has colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def prefer_huge_pages() -> None:
    """Starts this process again with transparent huge pages for malloc, once, where devices are simulated.

    XLA's temporaries on the processor are large and touched anew in every step, page by page.
    glibc reads the setting only at start. Called before JAX is imported, so that it is imported once.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "hugetlb" in tunables or os.environ.get("JAXPAR_NO_HUGE_PAGES"):
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def simulates(job: str, overrides: Sequence[str]) -> bool:
    """Returns whether a job's file, or an override, asks for simulated devices; read without what imports JAX.

    A file that cannot be read asks for none here: whoever loads the job says what is wrong with it.
    """
    said = [word.partition("=")[2].strip() for word in overrides if word.startswith("mesh.simulate=")]
    try:
        mesh = toml.loads(Path(job).read_text(encoding="utf-8-sig")).get("mesh")
    except (OSError, ValueError, RecursionError):
        return False
    return said[-1] != "0" if said else isinstance(mesh, dict) and bool(mesh.get("simulate"))
