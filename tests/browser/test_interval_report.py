"""The report on intervals in a real Chromium: what a person sees, clicks and types."""

import shutil

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from fullconformal import CVPlusRegressor, SplitConformalRegressor, metrics
from fullconformal.report.interval_page import write_interval_report
from fullconformal.report.page import slider_levels

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium found: the report was not looked at", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>"]
LEVELS = slider_levels(0.9)


@pytest.fixture(scope="module")
def methods():
    """Fitted regressors, 221 objects and their values; few enough calibration points that high levels are infinite."""
    frame, y = load_diabetes(return_X_y=True, as_frame=True)
    split = SplitConformalRegressor(random_state=0).fit(frame[::2], y[::2])
    plus = CVPlusRegressor(random_state=0).fit(frame[::2], y[::2])
    return {"split CP": split, "CV+": plus}, frame[1::2], y[1::2].to_numpy()


@pytest.fixture(scope="module")
def folder(methods, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    found, X, y = methods
    found["split CP"].report(X, y, folder / "diabetes.html", others={"CV+": found["CV+"]})
    ends = np.stack([np.tile([-1.0, np.nan, -np.inf], 10), np.tile([1.0, np.nan, np.inf], 10)], axis=1)
    rows = np.array([HOSTILE] * 15 + [HOSTILE[::-1]] * 15, dtype=object)
    write_interval_report(
        folder / "hostile.html", {HOSTILE[0]: np.stack([ends, ends], axis=2)}, np.linspace(-2, 2, 30), [0.8, 0.9], rows=rows,
        feature_names=HOSTILE, title=HOSTILE[0], diagnostics=["! mind the gap", *HOSTILE], guarantee=HOSTILE[1],
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, folder):
    """Opens a report; afterwards there must be no network request, no error in the console, and no dialogue."""
    seen, trouble, contexts = [], [], []

    def visit(name, width=1280, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: seen.append(request.url))
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append("dialogue"), dialog.dismiss()))
        page.goto((folder / f"{name}.html").as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == []
    assert seen and {url.split(":")[0] for url in seen} <= {"file", "data"}


def move(page, level):
    page.locator("#level").fill(str(int(np.abs(LEVELS - level).argmin())))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.975, 0.995])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_numbers_are_those_of_the_metrics_at_every_level(visit, methods, level):
    page = visit("diabetes")
    move(page, level)
    assert page.locator("#level-text").text_content() == f"{100 * level:g}\u00a0%"
    found, X, y = methods
    keys = {"coverage": "interval_coverage", "width": "mean_width", "median": "median_width", "score": "interval_score"}
    for row, reg in enumerate(found.values()):
        told = metrics.interval_summary(reg.predict_interval(X, level), y, level)
        for cell, name in keys.items():
            shown = float(page.locator(f'tr[data-method="{row}"] [data-cell="{cell}"]').get_attribute("value"))
            value = told[name].value
            assert shown == pytest.approx(value, rel=1e-12) if np.isfinite(value) else np.isnan(shown)
            if row == 0:
                assert page.locator(f'[data-number="{cell}"]').get_attribute("value") == str(
                    page.locator(f'tr[data-method="0"] [data-cell="{cell}"]').get_attribute("value")
                )


@pytest.mark.parametrize("level", [0.5, 0.9, 0.999])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_every_object_is_drawn_and_the_missed_ones_are_marked(visit, methods, level):
    page = visit("diabetes")
    move(page, level)
    found, X, y = methods
    ends = found["split CP"].predict_interval(X, level)
    missed = np.flatnonzero(~((ends[:, 0] <= y) & (y <= ends[:, 1])))
    marked = page.evaluate("[...document.querySelectorAll('.object.missed')].map((g) => Number(g.dataset.object))")
    assert sorted(marked) == missed.tolist()
    assert page.locator(".object").count() == len(y)
    assert page.locator("#missed-count").text_content() == f"{len(missed)} of {len(y)} drawn are missed"
    shown = page.locator("[data-missed]").evaluate_all("(rows) => rows.map((row) => Number(row.dataset.missed))")
    outside = np.maximum(ends[:, 0] - y, y - ends[:, 1])
    # The page has the ends in float32.
    np.testing.assert_allclose(outside[shown], np.sort(outside[missed])[::-1][:12], rtol=1e-4, atol=1e-3)
    title = page.locator('[data-object="7"] title').text_content()
    assert title.startswith(f"object 7: {y[7]:.4g}") and ("∞" in title) == (level > 0.99)


def test_objects_can_be_ordered(visit, methods):
    page = visit("diabetes")
    order = "[...document.querySelectorAll('.object')].map((g) => Number(g.dataset.object))"
    _, _, y = methods
    assert np.all(np.diff(y[page.evaluate(order)]) >= 0)
    page.locator("#order").select_option("index")
    assert page.evaluate(order) == list(range(len(y)))


@pytest.mark.parametrize("level", [0.6, 0.9])
def test_parts_are_those_of_the_metrics(visit, methods, level):
    page = visit("diabetes")
    move(page, level)
    found, X, y = methods
    ends = found["split CP"].predict_interval(X, level)
    options = page.locator("#grouping option").all_text_contents()
    assert options[:2] == ["width of the interval", "true value"] and options[2:] == list(X.columns)
    for name, by in (("true value", "y"), ("bmi", X["bmi"].to_numpy()), ("sex", X["sex"].to_numpy())):
        page.locator("#grouping").select_option(label=name)
        strata = metrics.coverage_by(ends, y, by)
        shown = [float(cell.get_attribute("value")) for cell in page.locator("[data-bin]").all()]
        assert shown == pytest.approx([estimate.value for estimate in strata.coverage.values()], abs=1e-12)
        counts = page.locator("#group-rows td:last-child").all_text_contents()
        assert [int(text.split(" of ")[1]) for text in counts] == list(strata.points.values())


def test_keys_clicks_and_presets_move_the_slider(visit):
    page = visit("diabetes")
    page.locator("#level").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#level-text").text_content() == "90.1\u00a0%"
    page.locator(".presets button").nth(0).press("Enter")
    assert page.locator("#level-text").text_content() == "80\u00a0%"
    lines = page.locator(".marker line")
    assert lines.count() == 2
    place = float(lines.first.get_attribute("x1"))
    move(page, 0.6)
    page.locator("#chart-coverage svg").click(position={"x": place, "y": 60})
    assert page.locator("#level-text").text_content() == "80\u00a0%"


@pytest.mark.parametrize("name", ["diabetes", "hostile"])
def test_no_width_makes_it_scroll_sideways(visit, name):
    page = visit(name)
    for width in (320, 375, 794):
        page.set_viewport_size({"width": width, "height": 812})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Nor is the last column of the table hidden.
        table = page.locator(".scroll:has(#missed-rows)")
        assert name == "hostile" or table.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_hostile_text_is_shown_as_text_and_empty_and_infinite_intervals_are_drawn(visit):
    page = visit("hostile")
    assert page.locator("h1").text_content() == HOSTILE[0] == page.title()
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    assert page.locator("#grouping option").all_text_contents()[2:] == HOSTILE
    assert page.locator("#diagnostics li").all_text_contents() == ["mind the gap", *HOSTILE]
    # A third of the intervals are empty: a dot, no line.
    assert page.locator(".object").count() == 30 and page.locator(".object line").count() == 20


def test_without_javascript_the_numbers_can_be_read(visit, methods):
    page = visit("diabetes", java_script_enabled=False)
    found, X, y = methods
    told = metrics.interval_summary(found["split CP"].predict_interval(X), y)
    text = page.locator("body").inner_text()
    assert f"{100 * told['interval_coverage'].value:.1f}\u00a0%" in text and f"{told['mean_width'].value:.4g}" in text
    assert "need JavaScript" in text and page.locator("#level").is_hidden()
    assert page.locator("#group-rows tr").count() == 5
