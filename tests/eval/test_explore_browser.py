"""The explorer in a real browser: what a reader points at, moves or types changes what is drawn."""

import re

import pytest
import torch

from eval.data import scenes
from eval.explore.page import page
from eval.explore.record import Case
from model.differential import graft
from weights.load import load_model

pytestmark = pytest.mark.long
HOSTILE = "</script><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def case(processor):
    """A question, its answers by a twin whose branches differ, with the base beside it, and by the
    base."""
    torch.manual_seed(0)
    model = load_model("embedded")
    base = load_model("embedded")
    graft(model, "twin")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q2" in name or "k2" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    case = Case(scenes.sample("vqa", "test", 192).image, "answer en Where is the dog?", ("never",))
    case.ask("twin", model.eval(), processor, 4)
    case.add_plain("twin", base)
    case.ask("base", base, processor, 4)
    return case


@pytest.fixture
def shown(new_page, tmp_path):
    """A function that opens the page of cases."""

    def open_cases(*cases, anchor="", title="x", **options):
        (tmp_path / "page.html").write_text(page(cases, title), encoding="utf-8")
        shown = new_page((tmp_path / "page.html").as_uri() + anchor, **options)
        shown.wait_for_selector("body[data-ready]")
        return shown

    return open_cases


def changes(shown, before="", number=0):
    """The pixels of a map once they differ from those before."""
    script = "([n, old]) => document.querySelectorAll('canvas.big')[n].toDataURL() !== old"
    shown.wait_for_function(script, arg=[number, before])
    return shown.locator("canvas.big").nth(number).evaluate("canvas => canvas.toDataURL()")


def test_the_explorer_shows_what_is_pointed_at(case, shown):
    """Breaks when another token, layer, head or map than the chosen one is shown, or a number is
    not the model's."""
    shown = shown(case)
    twin = shown.locator("article").first
    first = changes(shown)
    said, maps = case.answers["twin"]
    twin.locator(".tokens button").nth(1).hover()
    second = changes(shown, first)
    shown.mouse.move(700, 5)
    assert changes(shown, second) == first  # what is only pointed at does not stay
    shown.locator("#layer").focus()
    shown.keyboard.press("Home")
    shown.locator("#layer-out", has_text="1 of 4").wait_for()  # says it once it is drawn
    one = changes(shown)
    other = changes(shown, number=1)
    shown.keyboard.press("ArrowRight")
    two = changes(shown, one)
    assert shown.locator("#layer-out").inner_text() == "2 of 4"
    assert changes(shown, other, 1)
    twin.locator(".layers .strip button").first.click()
    assert changes(shown, two) == one
    shown.locator("#head").select_option("1")
    before = changes(shown, one)
    for kind in ("A1", "A2", "plain"):
        shown.locator(f"#kinds button[data-kind={kind}]").click()
        before = changes(shown, before)
        values = [float(text.split()[0]) for text in twin.locator(".mass dd").all_inner_texts()]
        prompt = said.batch.input_ids.shape[1]
        row = 100 * maps.kinds[kind][0, 0, 1]
        sums = row[said.slots].sum(), row[16:prompt].sum(), row[prompt:].sum(), row.sum(), row[0]
        assert values == pytest.approx(sums, abs=0.051)
    texts = twin.locator("svg text").all_text_contents()
    labels = [text.split()[-2] for text in texts if text.endswith("%")]
    # said where the curve ends
    assert labels == [f"{100 * of_layer[-1]:.0f}" for of_layer in maps.laws.values()]


def test_it_opens_beside_the_sink_and_reads_well(case, shown, processor):
    """Breaks when the page opens where a head parks its attention, a number has an exponent, or a
    word falls apart that the vocabulary lacks."""
    question = Case(case.image, "answer en Where at 8 hours is the dog of Schäfer?")
    question.ask("base", load_model("embedded"), processor, 1)
    said, maps = question.answers["base"]
    maps.kinds["A"][:] = 0
    patches = maps.kinds["A"][0, ..., said.slots]  # a copy, (P, L, N)
    patches[maps.apart[2].argmin(), 2, 1] = 1.0  # a sink
    patches[maps.apart[1].argmax(), 1, 2] = 0.6
    maps.kinds["A"][0, ..., said.slots] = patches
    shown = shown(question)
    opened = shown.locator("#layer").input_value(), shown.locator("#head").input_value()
    assert opened == ("2", "2")
    assert "60 % of" in shown.locator(".high").inner_text()
    shown.locator(".layers .strip button").nth(2).click()
    shown.locator("#head").select_option("1")
    shown.locator(".high", has_text=re.compile("^100 % of")).wait_for()
    assert question.prompt in shown.locator(".text").inner_text()
    assert "A sink is" in shown.locator(".mass").inner_text()


@pytest.mark.parametrize("width, scheme", [(390, "light"), (1400, "dark")])
def test_the_page_fits_and_links_hits_and_misses(case, shown, width, scheme):
    """Breaks when a phone scrolls sideways, the dark page is light, HTML is run, or a miss stands
    among the hits."""
    hostile = Case(case.image, HOSTILE, answers=case.answers, hit=True)
    shown = shown(hostile, case, anchor="#2", title=HOSTILE, width=width, scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.title() == HOSTILE
    paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) < 100) == (scheme == "dark")
    assert shown.locator("#verdict.miss").inner_text().endswith("right: never")
    shown.locator("#filter button", has_text="hits").click()
    shown.locator("#cases button:visible").click()  # there is one
    shown.locator("h1", has_text=HOSTILE).wait_for()
    assert shown.url.endswith("#1")
    assert shown.locator("#verdict.hit").count() == 1
