"""Writes the pages of the site: the README, the page of each room, the notebooks, and the reference from docstrings."""

import ast
import re
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # file of the repository to page of the site
    "README.md": "index.md",
    "tests/bench/README.md": "benches.md",
    "jaxpar/README.md": "tests.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PAGES |= {
    str(path.relative_to(ROOT)): f"guides/{'_'.join(path.relative_to(ROOT / 'jaxpar').parent.parts)}.md"
    for path in sorted((ROOT / "jaxpar").rglob("*/README.md"))
}
PAGES |= {f"notebooks/{path.name}": f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def write_page(source: str, page: str) -> None:
    """Copies a page; links to other pages follow, and links to files without a page become plain text."""

    def follow(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if "://" in target:
            return link[0]
        file = (ROOT / source).parent.joinpath(target).resolve()
        up = "../" * page.count("/")
        if image:
            name = f"pictures/{file.name}"
            with mkdocs_gen_files.open(name, "wb") as copy:
                copy.write(file.read_bytes())
            return f"![{text}]({up}{name})"
        name = str(file.relative_to(ROOT))
        known = PAGES.get(name) or PAGES.get(f"{name}/README.md") or ("course.md" if name == "notebooks" else None)
        return f"[{text}]({up}{known}{anchor})" if known else f"{text} (`{name}`)"

    text = (ROOT / source).read_text(encoding="utf-8")
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text if page.endswith(".ipynb") else LINK.sub(follow, text))


def public_names() -> dict[str, str]:
    """Returns each public name of jaxpar and the module that defines it, read without importing jaxpar."""
    for node in ast.parse((ROOT / "jaxpar/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MODULES":
            return ast.literal_eval(node.value)
    raise SystemExit("jaxpar/__init__.py has no _MODULES")


def write_reference() -> list[str]:
    """Writes a page of the public names and one for each room, and returns the lines of the navigation."""
    names = public_names()
    with mkdocs_gen_files.open("reference/jaxpar.md", "w") as file:
        file.write("# import jaxpar as jp\n\n")
        for name in sorted(names, key=str.lower):
            module = names[name] if names[name] != f"jaxpar.{name}" else "jaxpar.job.plan_api"
            file.write(f"::: {module}.{name}\n\n")
    lines = ["- [import jaxpar as jp](jaxpar.md)"]
    for room in sorted(path.parent for path in (ROOT / "jaxpar").glob("*/__init__.py")):
        page = f"reference/{room.name}.md"
        with mkdocs_gen_files.open(page, "w") as file:
            file.write(f"# jaxpar.{room.name}\n\n::: jaxpar.{room.name}\n    options: {{members: false}}\n\n")
            for path in sorted(room.rglob("*.py")):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                if path.name != "__init__.py" and not path.name.startswith("_"):
                    elsewhere = [f"!^{name}$" for name, place in names.items() if place == module]  # on the first page
                    filters = ", ".join(f"'{pattern}'" for pattern in ["!^_", *elsewhere])
                    file.write(f"::: {module}\n    options: {{filters: [{filters}]}}\n\n")
        lines.append(f"- [jaxpar.{room.name}]({room.name}.md)")
    return lines


for source, page in PAGES.items():
    write_page(source, page)
with mkdocs_gen_files.open("course.md", "w") as file:
    file.write("# Course\n\n")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        title = path.stem.partition("_")[2].replace("_", " ").capitalize()
        file.write(f"* [{title}](notebooks/{path.name})\n")
reference = write_reference()
with mkdocs_gen_files.open("reference/index.md", "w") as file:
    file.write("# Reference\n\n" + "\n".join(reference) + "\n")
