"""The report in a real browser: every picture there, a silent console, no network, and nothing wider than the screen.

That a page with a fault is found out is tested too, with a copy for each kind of fault.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, browser
from reported import measured, write_sweep

from fedmpi.commands import main

DESK, PHONE = 1280, 360
MASKS: dict[str, dict[str, Any]] = {"mean": {"mask": "mean"}, "gma": {"mask": "gma"}}
LOOK = """({
  pictures: [...document.images].map(
    i => [i.closest("figure")?.id, i.complete, i.naturalWidth, i.getBoundingClientRect().width]),
  across: document.documentElement.scrollWidth, screen: innerWidth,
  wide: [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, details:not([open])") &&
    e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + "#" + e.id),
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section."""
    base = tmp_path_factory.mktemp("report")

    def rounds(labels: dict[str, str], seed: int) -> list[dict[str, Any]]:
        return [measured(n, 0.3 + 0.05 * n + 0.01 * seed, seed) for n in range(1, 9)]

    said = {"source": "a paper", "measure": "best", "columns": "mask", "rows": [{"mean": 70.0, "gma": 71.0}]}
    home = write_sweep(base / "a-sweep-with-a-rather-long-name", {"mask": MASKS}, 3, rounds, published=said)
    result = '{"accuracy": 0.55, "auc": 0.6, "advantage": 0.1}'
    for run in home.glob("*_s*"):
        (run / "attack.json").write_text(f'{{"logistic": {result}, "loss": {result}}}')
    assert main(["report", str(home), "--out", str(base / "out"), "--formats", "none"]) == 0
    return base / "out" / "index.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def faults(tab: Browser, page: Path, width: int, **how: str) -> list[str]:
    """What is wrong with a page on a screen of that width."""
    tab.open(page, width, **how)
    seen = tab.run(LOOK)
    found = [
        f"picture {name} is not there"
        for name, done, natural, shown in seen["pictures"]
        if not (done and natural and shown)
    ]
    found += [] if seen["pictures"] else ["there is no picture"]
    found += [f"console: {text}" for text in tab.complaints()]
    found += [f"asked for {address}" for address in tab.addresses() if address != page.resolve().as_uri()]
    found += [f"{seen['across']} wide"] if seen["across"] > seen["screen"] else []
    return found + [f"{name} is outside" for name in seen["wide"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_page_has_no_fault(width: int, scheme: str, report: Path, tab: Browser) -> None:
    assert faults(tab, report, width, scheme=scheme) == []
    pictures = tab.run(LOOK)["pictures"]
    assert len(pictures) == len(re.findall("<img ", report.read_text())) >= 12


def test_pictures_scroll_in_their_box_on_a_phone(report: Path, tab: Browser) -> None:
    tab.open(report, PHONE)
    assert min(shown for _, _, _, shown in tab.run(LOOK)["pictures"]) > 500, "letters can be read"


def test_all_folds_can_be_opened_on_a_phone(report: Path, tab: Browser) -> None:
    tab.open(report, PHONE)
    tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    seen = tab.run(LOOK)
    assert seen["wide"] == [] and seen["across"] == PHONE


def test_a_dark_screen_has_a_dark_page_with_light_letters(report: Path, tab: Browser) -> None:
    colours = "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    found = {}
    for scheme in ("light", "dark"):
        tab.open(report, DESK, scheme=scheme)
        found[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in tab.run(colours)]
    assert found["light"][0] < 200 < 700 < found["light"][1]
    assert found["dark"][1] < 200 < 600 < found["dark"][0]


def test_it_prints(report: Path, tab: Browser) -> None:
    tab.open(report, DESK, media="print")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert base64.b64decode(tab.ask("Page.printToPDF")["data"]).startswith(b"%PDF")


def test_headings_and_links_work_from_the_keyboard(report: Path, tab: Browser) -> None:
    tab.open(report, DESK)
    assert tab.run("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))")
    tab.run("document.querySelector('.scroll').focus()")
    assert tab.run("document.activeElement.className") == "scroll"


# A page with a fault is found out


def spoilt(report: Path, tmp_path: Path, old: str, new: str) -> Path:
    """A copy of the page with something else in it, and without the policy that would keep it from being loaded."""
    text = report.read_text()
    assert old in text
    bare = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = tmp_path / "spoilt.html"
    copy.write_text(bare.replace(old, new, 1))
    return copy


def test_a_broken_picture_is_noticed(report: Path, tmp_path: Path, tab: Browser) -> None:
    page = spoilt(report, tmp_path, 'src="data:image/svg+xml;base64,', 'src="data:image/svg+xml;base64,AAAA')
    assert [text for text in faults(tab, page, DESK) if "is not there" in text]


def test_a_missing_picture_is_noticed(report: Path, tmp_path: Path, tab: Browser) -> None:
    page = spoilt(report, tmp_path, "</main>", '<figure id="lost"><img src="lost.png" alt=""></figure></main>')
    found = faults(tab, page, DESK)
    assert "picture lost is not there" in found and any("lost.png" in text for text in found if "asked" in text)


@pytest.mark.parametrize("script", ["console.error('oops')", "console.warn('oops')", "throw new Error('oops')"])
def test_a_word_on_the_console_is_noticed(script: str, report: Path, tmp_path: Path, tab: Browser) -> None:
    page = spoilt(report, tmp_path, "</main>", f"<script>{script}</script></main>")
    assert [text for text in faults(tab, page, DESK) if "oops" in text]


@pytest.mark.parametrize(
    "tag", ['<img src="http://127.0.0.1:9/x.png">', '<link rel="stylesheet" href="http://127.0.0.1:9/x.css">']
)
def test_an_address_of_a_network_is_noticed(tag: str, report: Path, tmp_path: Path, tab: Browser) -> None:
    page = spoilt(report, tmp_path, "</main>", f"{tag}</main>")
    assert [text for text in faults(tab, page, DESK) if text.startswith("asked for http://127.0.0.1:9/x")]


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_what_is_too_wide_is_noticed(width: int, report: Path, tmp_path: Path, tab: Browser) -> None:
    page = spoilt(report, tmp_path, "</main>", '<div id="wide" style="width: 1500px">x</div></main>')
    assert "DIV#wide is outside" in faults(tab, page, width)


def test_the_policy_of_the_page_itself_keeps_everything_out(report: Path, tmp_path: Path, tab: Browser) -> None:
    copy = tmp_path / "attacked.html"
    copy.write_text(report.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>"))
    found = faults(tab, copy, DESK)
    assert tab.run("document.title") != "taken" and any("Content Security Policy" in text for text in found)
