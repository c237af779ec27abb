"""The explorer in a real browser: what a reader points at, moves or types changes what is drawn."""

import re

import pytest
import torch

from eval import scenes
from eval.explore.command import add_answer, add_plain
from eval.explore.gallery import Question
from eval.explore.page import Case, page
from model.differential import graft
from weights.load import load_model

pytestmark = pytest.mark.long
HOSTILE = "</script><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def case(processor):
    """A question, its answer by a twin whose branches differ, and the base beside it."""
    torch.manual_seed(0)
    model = load_model("embedded")
    graft(model, "twin")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q2.b", "k2.b", "q2.lora_b", "k2.lora_b")) or "q2" in name or "k2" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    question = Question(scenes.sample("vqa", "test", 192).image, "answer en Where is the dog?")
    found = Case(question.image, question.prompt)
    add_answer(found, question, model.eval(), processor, "twin", 4)
    add_plain(found, "twin", load_model("embedded"))
    return found


@pytest.fixture(scope="module")
def other(processor):
    question = Question(scenes.sample("vqa", "test", 192).image, "detect dog", "dog", "never".__eq__)
    found = Case(question.image, question.prompt, truth="dog")
    add_answer(found, question, load_model("embedded"), processor, "base", 6)
    return found


def written(folder, *cases, title="x") -> str:
    file = folder / "page.html"
    file.write_text(page(cases, title), encoding="utf-8")
    return file.as_uri()


def opened(new_page, url, **options):
    shown = new_page(url, **options)
    shown.wait_for_selector("body[data-ready]")
    return shown


def drawn(shown, selector="canvas.big", number=0) -> str:
    """The pixels of a map."""
    return shown.locator(selector).nth(number).evaluate("canvas => canvas.toDataURL()")


def changes(shown, before: str, selector="canvas.big", number=0) -> str:
    """The pixels of a map once they differ from those before."""
    script = "([selector, number, old]) => document.querySelectorAll(selector)[number].toDataURL() !== old"
    shown.wait_for_function(script, arg=[selector, number, before])
    return drawn(shown, selector, number)


def test_the_explorer_shows_what_is_pointed_at(case, new_page, tmp_path):
    """Nothing happens, or the page shows another token, layer, head or map than the one that is chosen."""
    shown = opened(new_page, written(tmp_path, case))
    tokens = shown.locator(".tokens button")
    assert tokens.last.get_attribute("aria-label").startswith("‹end›, probability ")
    first = drawn(shown)
    tokens.nth(1).hover()
    second = changes(shown, first)
    shown.mouse.move(700, 5)
    assert changes(shown, second) == first  # what is only pointed at does not stay
    tokens.nth(0).focus()
    shown.keyboard.press("ArrowRight")
    assert changes(shown, first) == second
    assert tokens.nth(1).get_attribute("aria-checked") == "true"

    shown.locator("#layer").focus()
    shown.keyboard.press("Home")
    one = changes(shown, second) if shown.locator("#layer-out").inner_text() != "1 of 4" else drawn(shown)
    shown.keyboard.press("ArrowRight")
    two = changes(shown, one)
    assert shown.locator("#layer-out").inner_text() == "2 of 4"
    shown.locator(".layers .strip button").first.click()
    assert changes(shown, two) == one
    shown.locator("#head").select_option("2")
    three = changes(shown, one)
    assert "head 3" in shown.locator("#live").inner_text(timeout=5000)
    for kind in ("A1", "A2", "change", "plain"):
        shown.locator(f"#kinds button[data-kind={kind}]").click()
        three = changes(shown, three)
    low = shown.locator(".low").inner_text()
    assert low == "0"  # no negative end where nothing can be negative
    shown.locator("#play").click()
    changes(shown, three)
    shown.locator("#play").click()


def test_numbers_are_those_of_the_model(case, new_page, tmp_path):
    """The page says another share of the picture than the model has."""
    shown = opened(new_page, written(tmp_path, case))
    said, maps = case.answers["twin"]
    shown.locator("#head").select_option("1")
    for kind in ("A1", "mix", "plain"):
        shown.locator(f"#kinds button[data-kind={kind}]").click()
        shown.wait_for_function(
            "kind => state.kind === kind && document.getElementById('live').textContent.includes('head 2')", arg=kind
        )
        shown.wait_for_timeout(100)
        layer = int(shown.locator("#layer").input_value()) - 1
        row = maps.kinds[kind][0, layer, 1]
        values = [float(text.split()[0]) for text in shown.locator(".mass dd").all_inner_texts()]
        prompt = said.batch.input_ids.shape[1]
        expected = row[said.slots].sum(), row[16:prompt].sum(), row[prompt:].sum(), row.sum(), row[0]
        assert values == pytest.approx([100 * float(value) for value in expected], abs=0.051)


def test_two_models_move_together(case, other, new_page, tmp_path):
    """The models beside each other show different layers, or one with a single map shows nothing."""
    case = Case(case.image, case.prompt, case.answers | {"base": other.answers["base"]})
    shown = opened(new_page, written(tmp_path, case))
    assert shown.locator("article").count() == 2
    before = [drawn(shown, number=number) for number in range(2)]
    at = shown.locator("#layer-out").inner_text()
    shown.locator("article").nth(1).locator(".layers .strip button").nth(0 if at[0] != "1" else 1).click()
    for number in range(2):
        changes(shown, before[number], number=number)
    assert [text[:4] for text in shown.locator(".scale .low").all_inner_texts()][1] == "0"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "dark")])
def test_the_page_fits_and_text_stays_text(case, new_page, tmp_path, width, scheme):
    """A phone scrolls sideways, the dark page is light, or a prompt of HTML is run."""
    hostile = Case(case.image, HOSTILE, case.answers)
    shown = opened(new_page, written(tmp_path, hostile, title=HOSTILE), width=width, scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator("h1").inner_text() == HOSTILE == shown.title()
    paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) < 100) == (scheme == "dark")
    unnamed = shown.evaluate(
        "[...document.querySelectorAll('button')].filter(b => !(b.ariaLabel || b.innerText).trim()).length"
    )
    assert unnamed == 0 and len(shown.locator("canvas.big").get_attribute("aria-label")) > 40


def test_a_gallery_links_hits_and_misses(case, other, new_page, tmp_path):
    """A miss stands among the hits, or its link opens another question."""
    case = Case(case.image, case.prompt, case.answers, hit=True)
    shown = opened(new_page, written(tmp_path, case, other) + "#2")
    assert shown.locator("h1").inner_text() == "detect dog" and "right: dog" in shown.locator("#verdict").inner_text()
    shown.locator("#filter button", has_text="hits").click()
    assert shown.locator("#cases button:visible").count() == 1
    shown.locator("#cases button:visible").click()
    shown.locator("h1", has_text="Where").wait_for()
    assert shown.url.endswith("#1") and shown.locator("#verdict.hit").count() == 1
