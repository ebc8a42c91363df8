"""Layouts, plans, schedules and reports show themselves in a notebook: what the picture says is what JAX does."""

import itertools

import optax
import pytest
from browser import CUT, OPEN, PALE, WIDTHS, Reader, shades
from flax import nnx
from test_page import collective, report

import jaxpar as jp
from jaxpar.html.markup import Markup, document
from jaxpar.inspector.pages.html import page
from jaxpar.parallel.shard_cards import cards, groups, shard_devices
from jaxpar.train.run import Outcome

HOSTILE = """<script>alert(1)</script>"' onload='alert(3)' &amp; </style>"""
HEAD = '<!DOCTYPE html><html><head><meta charset="utf-8"/><meta name="color-scheme" content="light dark"/>'
HEAD += '<meta name="viewport" content="width=device-width, initial-scale=1"/></head><body>'


def decoder(rngs):
    return jp.Decoder(jp.DecoderConfig(layers=4, dim=32, heads=4, seq=16), rngs=rngs)


LAYOUTS = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"fsdp": 8, "zero": 1},
    {"pipe": 2, "fsdp": 2, "tensor": 2},
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_each_piece_is_said_to_be_where_jax_puts_it(sizes):
    layout = jp.compose(decoder, jp.Parallel(**sizes))
    numbers = {device: at for at, device in enumerate(layout.device_mesh.devices.flat)}
    for place in layout.placements.values():
        found: dict = {}
        for device, part in layout.sharding(place.stored).devices_indices_map(place.leaf.shape).items():
            starts = tuple(each.indices(size)[0] for each, size in zip(part, place.leaf.shape, strict=True))
            found.setdefault(starts, []).append(numbers[device])
        held = shard_devices(place.stored, len(place.leaf.shape), layout.sizes)
        assert [sorted(each) for _, each in sorted(found.items())] == [each for _, each in sorted(held.items())]


def test_a_layout_says_what_each_device_holds_and_what_is_sent():
    layout = jp.compose(decoder, jp.Parallel(data=2, fsdp=2, tensor=2))
    page = Reader(layout._repr_html_())
    assert page.wrong == []
    per_device = layout.summary().split(", ")[-1].removesuffix(" per device")
    for words in ("Decoder on data 2 × fsdp 2 × tensor 2, ZeRO-3", "0, 4", "0, 2", "0, 1", per_device,
                  f"gradients are summed: {per_device} on each device", "All 12 arrays"):  # fmt: skip
        assert words in page.said, words
    assert sum(len(group.places) for group in groups(layout.placements, layout.sizes)) == len(layout.placements)
    apart = jp.compose(decoder, jp.Parallel(data=8, exchange=jp.Exchange("diloco")))
    assert "diloco every 20 steps" in Reader(apart._repr_html_()).said


@pytest.mark.slow
def test_each_value_is_one_line_in_text():
    layout, optimizer = jp.compose(decoder, jp.Parallel(data=2, fsdp=4)), optax.adam(1e-3)
    step, state = jp.train_step(layout, jp.next_token_loss, optimizer), jp.init_state(layout, optimizer)
    size = f"{sum(place.leaf.size for place in layout.placements.values()) / 1000:.3g} k parameters in 12 arrays"
    lines = {
        "Parallel(data=2, fsdp=4)": layout.parallel,
        "Pipeline(microbatches=8)": jp.Pipeline(microbatches=8),
        "DecoderConfig(layers=2)": jp.DecoderConfig(layers=2),
        f"<model: Decoder, {size}>": layout.blueprint,
        f"<layout: {layout.summary()}>": layout,
        f"<state: step 0, {size}>": state,
        f"<state: {size}>": step.abstract(),
        f"<outcome: step 0, {size}, loss 2.5, stopped by SIGTERM>": Outcome(
            state=state, last={"loss": 2.5}, stopped_by="SIGTERM"
        ),
        "<step: Decoder on data 2 x fsdp 4, ZeRO-3; loss next_token_loss, fp32, 0 compiled programs>": step,
    }
    assert [repr(value) for value in lines.values()] == [*lines]
    state.step.delete()
    assert repr(state) == f"<state: donated to a step, {size}>"
    assert repr(report()).startswith("<report: ")
    assert "\n" not in repr(report())
    assert step._repr_html_() == step.layout._repr_html_()


def test_names_of_a_model_are_escaped():
    class Net(nnx.Module):
        def __init__(self, rngs):
            setattr(self, HOSTILE, nnx.Linear(8, 8, rngs=rngs))

        def __call__(self, x):
            return getattr(self, HOSTILE)(x)

    page = Reader(jp.compose(Net, jp.Parallel(fsdp=8))._repr_html_())
    assert page.wrong == []
    assert "script" not in page.tags
    assert HOSTILE in page.said


def shown():
    """Returns (name, HTML) of each thing that a notebook shows."""
    yield from ((str(sizes), jp.compose(decoder, jp.Parallel(**sizes))._repr_html_()) for sizes in LAYOUTS[::3])
    yield "schedule", jp.schedule(jp.schedule("interleaved", stages=2, microbatches=4))._repr_html_()
    yield "plan", jp.plan("configs/gpu_llama_8b_fsdp8.toml", devices=16, top=2)._repr_html_()


@pytest.mark.slow
def test_in_a_browser_nothing_that_shows_itself_is_cut_off_or_pale(browser, tmp_path):
    for number, (name, html) in enumerate(shown()):
        file = tmp_path / f"{number}.html"
        file.write_text(HEAD + html + "</body></html>")
        for width, theme in itertools.product(WIDTHS.values(), ("light", "dark")):
            browser.show(file, width=width, theme=theme)
            browser.ask(OPEN)
            browser.picture(file.with_suffix(".png"))
            assert shades(file.with_suffix(".png")) > 16, name
            assert browser.ask("document.documentElement.scrollWidth") <= width, name
            assert browser.ask(CUT) == [], name
            assert browser.ask(PALE) == [], name
            assert browser.complaints(file) == [], name


WIDER = """[...document.querySelectorAll('.jx-scroll')].filter(box => box.scrollWidth > box.clientWidth)
  .map(box => `${box.firstElementChild.ariaLabel ?? box.ariaLabel}: ${box.scrollWidth} in ${box.clientWidth}`)"""


def test_at_a_thousand_pixels_schedules_and_the_ledger_fit_the_page(browser, tmp_path):
    facts = {"cause": "Attention._project_out: bshk,hkd->bsd/dot_general", "source": "custom_gradients.py:158"}
    made = report(ledger=(collective("collective-permute", ("fsdp", "tensor"), payload=1234567, **facts),))
    drawn = [jp.schedule(name, stages=4, microbatches=16)._repr_html_() for name in ("1f1b", "interleaved")]
    pages = {"schedules": document("schedules", *map(Markup, drawn)), "report": page(made)}
    for name, html in pages.items():
        (tmp_path / name).with_suffix(".html").write_text(html)
        browser.show((tmp_path / name).with_suffix(".html"), width=1000, theme="light")
        assert browser.ask(WIDER) == [], name


FULL = """[...document.querySelectorAll('.jx-cell')].filter(cell => cell.scrollWidth > cell.clientWidth)
  .map(cell => `${cell.title}: ${cell.scrollWidth} in ${cell.clientWidth}`)"""


def test_at_any_width_the_place_of_a_device_fits_its_cell(browser, tmp_path):
    sizes = {"pipe": 2, "data": 16, "fsdp": 2, "tensor": 2}
    (tmp_path / "layout.html").write_text(HEAD + jp.compose(decoder, jp.Parallel(**sizes), 128)._repr_html_())
    for width in (500, 1000, 1400):
        browser.show(tmp_path / "layout.html", width=width, theme="light")
        assert browser.ask("document.querySelectorAll('.jx-cell').length") == 16
        assert browser.ask(FULL) == [], width


@pytest.mark.nightly
def test_an_inspection_shows_who_holds_what_as_well():
    layout = jp.compose(decoder, jp.Parallel(data=2, fsdp=2, tensor=2))
    made = report(cards=tuple(cards(layout.placements, layout.sizes)))
    page = Reader(made._repr_html_())
    assert page.wrong == []
    assert "Who holds what" in page.text
    assert "blocks/mlp/gate" in "".join(page.text)  # it may break after a slash
    assert "cards" not in made.to_dict()
    assert "Who holds what" not in Reader(report()._repr_html_()).text
