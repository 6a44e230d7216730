"""Pages in Chromium: wide, on a phone, in the dark and in print, and that what the script promises happens."""

import re
import threading

import matplotlib

matplotlib.use("Agg")

import pytest

from tests.core.report.in_browser import CHROMIUM, drawn, in_browser, pages_of
from tltlab.files import write_json
from tltlab.report.server import Runs, Server
from tltlab.report.write import report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
WIDE, TABLET, PHONE = 1280, 800, 390
HEADING = 1.15 * 16 * 72 / 96
"""Points of a section's heading on paper."""
LOOK = """{
    width: document.documentElement.scrollWidth, window: innerWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.querySelector("main")).backgroundColor,
    asked: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
    pictures: [...document.images].map(image => image.naturalWidth),
    ends: [...document.querySelectorAll(".picture:not(.large) > *")].map(one => one.getBoundingClientRect().right),
    tables: [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).map(box =>
        [box.tabIndex, getComputedStyle(box).backgroundAttachment]),
}"""
SORT = """(() => {
    const table = document.querySelector("table"), cells = () => [...table.tBodies[0].rows].map(row =>
        parseFloat(row.children[2].textContent.replaceAll(",", "")));
    const button = table.querySelectorAll("thead th button")[2];
    button.click();
    const up = cells();
    button.click();
    return [up, cells(), table.querySelectorAll("thead th")[2].ariaSort];
})()"""
SLIDE = """(() => {
    const group = document.querySelector(".slides"), slider = group.querySelector("input");
    const all = [...group.querySelectorAll("figure")];
    const shown = () => all.filter(one => one.offsetHeight).map(one => one.dataset.name), first = shown();
    slider.value = slider.max - slider.value;
    slider.dispatchEvent(new Event("input"));
    return [first, shown(), group.querySelector("output").textContent];
})()"""
ENLARGE = """(() => {
    const box = document.querySelector("figure:not([hidden]) .picture");
    const width = () => box.firstElementChild.getBoundingClientRect().width, small = width();
    box.click();
    return [small, width(), document.documentElement.scrollWidth];
})()"""


@pytest.fixture(scope="module")
def pages(run):
    """The page of a RUN with hostile names, and of a comparison."""
    folder = run.parent
    row = {"system": "tlt", "makespan_s": 2.0, "ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9, "lossless": True}
    plain = row | {"system": "verl", "makespan_s": 2.5, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    slow = row | {"system": "long-name-of-a-system", "makespan_s": 12.5, "ratio": 5.0, "ratio_low": None}
    write_json(folder / "compared.json", {"rows": [row, plain, slow], "baseline": "verl"})
    report(run, out=folder / "run.html")
    report(folder / "compared.json", out=folder / "compared.html")
    return folder


@pytest.fixture(scope="module")
def looked(pages):
    """(page, width, dark) -> what each of the scripts gave."""
    scripts = {"run": [LOOK, SORT, SLIDE, LOOK, ENLARGE], "compared": [LOOK, LOOK]}
    cases = [(name, width) for name in scripts for width in (WIDE, TABLET, PHONE)]
    found = {}
    for dark in (False, True):
        loads = [
            {"url": (pages / f"{name}.html").as_uri(), "width": width, "scripts": scripts[name]}
            for name, width in cases
        ]
        loads += [{"url": (pages / "run.html").as_uri(), "width": WIDE, "scripts": [], "pdf": str(pages / "run.pdf")}]
        found |= {
            (*case, dark): answer for case, answer in zip([*cases, ("pdf", 0)], in_browser(loads, dark), strict=True)
        }
    return found


def test_pages_fit_their_window_and_request_nothing(looked):
    for (name, width, dark), answers in looked.items():
        for look in (answer for answer in answers if isinstance(answer, dict)):
            assert look["window"] == width
            assert max([look["width"], *look["ends"]]) <= width, name
            assert look["tables"] == [[0, "local, local, scroll, scroll"]] * len(look["tables"])
            assert look["tables"] or (name, width) != ("run", PHONE)
            assert look["asked"] == []
            assert min(look["pictures"], default=999) > 100
            assert look["dark"] is dark
            assert (look["paper"] == "rgb(255, 255, 255)") is not dark


def test_interactive_parts_of_a_page_work(looked):
    for (name, width, _), answers in looked.items():
        if name != "run":
            continue
        _, (up, down, order), (first, last, told), _, (small, large, page) = answers
        assert up == sorted(up)
        assert down == sorted(up, reverse=True)
        assert order == "descending"
        assert len(first) == 1
        assert last == [told]
        assert first != last
        assert large >= 960
        assert small < width
        assert page <= width


def test_nothing_is_cut_in_print(pages, looked):
    pdf = (pages / "run.pdf").read_bytes()
    for page in pages_of(pdf):
        texts = drawn(page)
        headings = {y for y, size in texts if size == pytest.approx(HEADING, abs=0.1)}
        assert min(texts)[0] not in headings, "a heading is alone at the foot of a page"
    assert 3 <= len(re.findall(rb"/Type /Page\b", pdf)) <= 20
    # The print style on a screen as wide as A4 between its margins: what is wider there would be cut on paper.
    (pages / "print.html").write_text((pages / "run.html").read_text().replace("@media print", "@media all"))
    wide = "Math.max(...[...document.querySelectorAll('html, .scroll table')].map(part => part.scrollWidth))"
    ((found,),) = in_browser([{"url": (pages / "print.html").as_uri(), "width": 687, "scripts": [wide]}])
    assert found <= 687


def test_list_of_runs_is_served_to_browser(pages):
    with Server(Runs(pages)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            names = "[...document.querySelectorAll('tbody a')].map(link => link.textContent)"
            tick = "document.querySelectorAll('thead th button').length"
            ((found, buttons),) = in_browser([{"url": server.url, "width": PHONE, "scripts": [names, tick]}])
        finally:
            server.shutdown()
            thread.join()
    assert found == ["run"]
    assert buttons == 6
