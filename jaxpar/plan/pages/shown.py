"""A plan that shows itself: as text where it is printed, as a picture in a notebook, as a page in a file."""

from dataclasses import dataclass, fields
from pathlib import Path

from jaxpar.files import write_page
from jaxpar.plan.pages.html import fragment, write
from jaxpar.plan.pages.text import page
from jaxpar.plan.search import Plan, describe


@dataclass(frozen=True, kw_only=True)
class ShownPlan(Plan):
    """A plan, and its pages; see `Plan` for what it holds.

    Attributes:
      title: Of its page.
      command: What trains the first layout.
    """

    title: str = "a plan"
    command: str = ""

    @classmethod
    def of(cls, plan: Plan, *, title: str, command: str) -> "ShownPlan":
        """Returns a plan as one that shows itself."""
        held = {each.name: getattr(plan, each.name) for each in fields(Plan)}
        return cls(**held, title=title, command=command)

    def __repr__(self) -> str:
        first = self.best[0]
        return f"<plan: {self.fitting:,} of {self.considered:,} layouts fit; first {describe(first.candidate)}>"

    def __str__(self) -> str:
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self, title=self.title, command=self.command)

    def html(self, path: str | Path | None = None) -> str:
        """Returns the plan as one HTML file that needs nothing else, and writes it to `path`."""
        text = write(self, title=self.title, command=self.command)
        if path is not None:
            write_page(path, text)
        return text
