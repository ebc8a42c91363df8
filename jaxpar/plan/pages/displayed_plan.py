"""A plan with its representations: text when printed, a picture in a notebook, a page in a file."""

from dataclasses import dataclass, fields
from pathlib import Path

from jaxpar.files import write_page
from jaxpar.plan.pages.html import fragment, write
from jaxpar.plan.pages.text import page
from jaxpar.plan.search import Plan, describe


@dataclass(frozen=True, kw_only=True)
class DisplayedPlan(Plan):
    """A plan with its pages; further fields are those of `Plan`.

    Attributes:
      title: Title of its page.
      command: Command that trains the first layout.
    """

    title: str = "a plan"
    command: str = ""

    @classmethod
    def from_plan(cls, plan: Plan, *, title: str, command: str) -> "DisplayedPlan":
        """Adds title and command to a plan."""
        values = {entry.name: getattr(plan, entry.name) for entry in fields(Plan)}
        return cls(**values, title=title, command=command)

    def __repr__(self) -> str:
        first = self.best[0]
        return f"<plan: {self.fitting:,} of {self.considered:,} layouts fit; first {describe(first.candidate)}>"

    def __str__(self) -> str:
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self, title=self.title, command=self.command)

    def html(self, path: str | Path | None = None) -> str:
        """Returns the plan as one self-contained HTML file, and writes it to `path` if given."""
        text = write(self, title=self.title, command=self.command)
        if path is not None:
            write_page(path, text)
        return text
