"""Errors of predictions as a page: one dot a run, groups below each other, and a table of them."""

from collections.abc import Sequence

from jaxpar.html.markup import HOW, Markup, badge, document, join, percent, table, tag, tile

from ..published.judged import Judged, grouped, score
from ..published.show import HEAD, causes

WIDEST = 0.4  # errors past it are drawn at the edge
ROW, DOT = 26, 4  # units: height of a group, radius of a dot
TICKS = (-0.4, -0.2, 0.0, 0.2, 0.4)
_STYLE = """
  .jx-runs { display: grid; grid-template-columns: minmax(8em, 15em) minmax(0, 1fr); gap: 0 1em; align-items: center; }
  .jx-runs svg { width: 100%; height: 26px; }
  .jx-runs .jx-axis { height: 16px; }
  .jx-close { --c: light-dark(#eef2f7, #202a36); }
  .jx-zero { stroke: var(--muted); }
  .jx-run { fill: var(--blue); fill-opacity: .55; stroke: var(--ground); stroke-width: .8px; }
  .jx-run.jx-far { fill: var(--orange); fill-opacity: .95; }
"""


def write(judged: Sequence[Judged], *, title: str, by: str = "group", note: str = "") -> str:
    """Returns the page.

    Args:
      judged: Runs with their predictions.
      title: Of the page; any text.
      by: What groups are made of, one of `judged.BY`.
      note: What the constants were fitted on, in a sentence.
    """
    found, groups = score(judged), grouped(judged, by)
    tiles = tag(
        "div",
        tile("mean error", f"{found.mean:.1%}", f"median {found.median:.1%}, worst {found.worst:.1%}", "modelled"),
        tile("within 20 %", f"{found.within:.1%}", f"of {found.runs} runs; 95 % within {found.most:.1%}", "modelled"),
        tile("rank of MFU", "–" if found.rank is None else f"{found.rank:.3f}", "Spearman", "modelled"),
        cls="jx-tiles",
    )
    legend = tag("ul", *[tag("li", badge(how), f" {HOW[how]}") for how in ("modelled",)], cls="jx-key jx-legend")
    sections = [("Errors", _plot(groups)), ("By group", _scores(judged, by)), ("Every run", _runs(judged))]
    told = [tag("section", tag("h2", name), body) for name, body in sections]
    return document(title, tag("style", Markup(_STYLE)), tag("p", note, cls="jx-where"), tiles, *told, legend)


def place(error: float) -> float:
    """Returns where an error lies, as a share of the width; too fast is left."""
    return 0.5 + 0.48 * max(-1.0, min(1.0, error / WIDEST))


def _plot(groups: dict[str, list[Judged]]) -> Markup:
    cells: list[Markup] = []
    for name, some in groups.items():
        cells += [tag("span", name, cls="jx-small"), _strip(some)]
    words = [
        tag("text", f"{tick:+.0%}" if tick else "0", x=percent(place(tick)), y="12", text_anchor="middle",
            cls="jx-wide" if abs(tick) == WIDEST else None)
        for tick in TICKS
    ]  # fmt: skip
    cells += [tag("span"), tag("svg", *words, cls="jx-axis", aria_hidden="true")]
    under = "predicted over published, less 1: left of 0 the prediction is too fast; the band is ±20 %"
    return join([tag("div", *cells, cls="jx-runs"), tag("div", under, cls="jx-small jx-under")])


def _strip(some: list[Judged]) -> Markup:
    left, right = place(-0.2), place(0.2)
    band = tag("rect", x=percent(left), y="0", width=percent(right - left), height="100%", cls="jx-close")
    zero = tag("line", x1="50%", x2="50%", y1="0", y2="100%", cls="jx-zero")
    dots = []
    for each in some:
        what = f"{each.run.name}, line {each.run.line}: {each.error:+.1%}; {causes(each)}"
        look = "jx-run" + " jx-far" * (abs(each.error) > 0.2)
        dots.append(tag("circle", tag("title", what), cx=percent(place(each.error)), cy="13", r=str(DOT), cls=look))
    return tag("svg", band, zero, *dots, role="img", aria_label=f"errors of {len(some)} runs")


def _scores(judged: Sequence[Judged], by: str) -> Markup:
    rows = []
    for name, some in [*grouped(judged, by).items(), ("all", list(judged))]:
        found = score(some)
        shares = [f"{each:.1%}" for each in (found.mean, found.median, found.most, found.worst, found.within)]
        rank = "" if found.rank is None else f"{found.rank:.3f}"
        rows.append([name, str(found.runs), f"{found.bias:+.1%}", *shares, rank])
    return table("errors by group", [by, *HEAD], rows, "t" + "n" * len(HEAD))


def _runs(judged: Sequence[Judged]) -> Markup:
    rows = [
        [str(each.run.line), each.run.name, f"{each.run.seconds:.4g} s", f"{each.predicted:.4g} s",
         f"{each.error:+.1%}", causes(each), each.run.source]
        for each in judged
    ]  # fmt: skip
    return table(
        "every run",
        ["line", "run", "published", "predicted", "error", "where the time goes", "source"],
        rows,
        "ntnnntw",
    )
