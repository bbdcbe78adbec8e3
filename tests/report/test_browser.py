"""Pages in a real browser: drawn without errors, asking nobody for anything, alive under the mouse, deaf to attacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report import browser as chromium
from tests.report.browser import Browser
from tests.report.sample import HOSTILE
from tests.report.test_headline import SAID, pair
from thinwire.report import page
from thinwire.report.runs import load

PATH = chromium.find()
pytestmark = pytest.mark.skipif(PATH is None, reason="there is no Chromium here: apt-get install chromium")

INK = """(() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, colours = new Set();
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 128) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  return colours.size;
}))()"""
"""How many colours each chart has."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PATH is not None
    with chromium.browser(PATH) as found:
        yield found


def _quiet(browser: Browser, path: Path) -> None:
    assert browser.console == []
    assert browser.requests == [path.as_uri()] or set(browser.requests) <= {path.as_uri(), "data:,"}


def _page(tmp_path: Path, *given: Path) -> Path:
    path = tmp_path / "report.html"
    page.write(path, [load(one) for one in given])
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_a_run(browser: Browser, real_run: Path, tmp_path: Path, dark: bool) -> None:
    path = _page(tmp_path, real_run)
    browser.open(path, dark=dark)
    _quiet(browser, path)
    inks = browser.run(INK)
    assert len(inks) == 7, "loss over time, timeline, split, bytes, density, residual, loss"
    assert all(count > 5 for count in inks), inks
    assert (
        sum(browser.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")) < 200
    ) is dark
    assert len(browser.screenshot()) > 30_000
    text = browser.run("document.body.innerText")
    for word in ("topk", "20.0 ms", "made by hand", "What was chosen for each group", "Ranks", "closed"):
        assert word in text


def test_hover(browser: Browser, real_run: Path, tmp_path: Path) -> None:
    browser.open(_page(tmp_path, real_run), height=3000)
    shown = "getComputedStyle(document.querySelector('.tip')).display"
    assert browser.run(shown) == "none"
    box = "document.querySelector('#gantt .u-over').getBoundingClientRect().toJSON()"
    frame = browser.run(box)
    # The first row, where the training thread waits for the exchange, in the traced step that is shown.
    run = json.loads(browser.run("document.getElementById('data').textContent"))["runs"][0]
    spans = run["traces"][int(browser.run("document.querySelector('select').value"))]["spans"]
    ends = [(start, end) for _, _, _, start, end in [*spans, *run["predicted"]]]
    low, high = min(0.0, *(start for start, _ in ends)), max(end for _, end in ends)
    start, end = next((start, end) for _, name, _, start, end in spans if name == "waiting for the exchange")
    rows = 2 + len(run["groups"])
    across = ((start + end) / 2 - low) / (high - low)
    browser.move(frame["left"] + across * frame["width"], frame["top"] + frame["height"] / rows / 2)
    assert browser.run(shown) == "block"
    tip = browser.run("document.querySelector('.tip').textContent")
    assert tip.startswith("waiting for the exchange\ntraining\n")
    assert "takes" in tip
    browser.move(2, 2)
    assert browser.run(shown) == "none"
    # A line chart: its legend shows the values under the cursor.
    over = "[...document.querySelectorAll('.chart')].find(one => one.innerText.includes('Where a step goes'))"
    frame = browser.run(f"{over}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    legend = "[...document.querySelectorAll('.u-legend')].find(one => one.innerText.includes('computing'))"
    values = f"[...{legend}.querySelectorAll('.u-value')].map(value => value.textContent)"
    browser.move(frame["left"] + frame["width"] / 2, frame["top"] + 20)
    assert all(float(value.replace(",", "")) >= 0 for value in browser.run(values))
    assert browser.console == []


def test_attacks_stay_text(browser: Browser, hostile_run: Path, tmp_path: Path) -> None:
    path = _page(tmp_path, hostile_run)
    browser.open(path)
    _quiet(browser, path)
    assert browser.run("document.title") == "thinwire: hostile"
    assert browser.run("document.querySelectorAll('img').length") == 0
    cells = browser.run("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert HOSTILE in cells
    assert HOSTILE in browser.run("[...document.querySelectorAll('h3')].map(title => title.textContent)")


def test_a_comparison_with_results(browser: Browser, real_run: Path, hostile_run: Path, tmp_path: Path) -> None:
    results = tmp_path / "steps.json"
    common = {"workload": "gpt", "nodes": 2, "ranks_per_node": 1, "rate": "100mbit"}
    rows = [
        {**common, "method": "fp32", "seconds": 3.6, "ci_low": 3.5, "ci_high": 3.7, "ratio_to_fp32": 1.0},
        {**common, "method": HOSTILE, "seconds": 0.2, "ci_low": None, "ci_high": None, "ratio_to_fp32": 0.05},
    ]
    results.write_text(json.dumps({"command": "bench step", "rows": rows}))
    path = _page(tmp_path, real_run, hostile_run, results)
    browser.open(path)
    _quiet(browser, path)
    widths = browser.run("[...document.querySelectorAll('.fill')].map(bar => bar.getBoundingClientRect().width)")
    assert widths[0] / widths[1] == pytest.approx(18, rel=0.02)
    assert HOSTILE in browser.run("[...document.querySelectorAll('.bar code')].map(name => name.textContent)")
    browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    browser.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => done(true)), 100))")
    drawn = [count for count in browser.run(INK) if count > 5]
    assert len(drawn) >= 5 + 6 + 6, "of both together, and of each"
    assert browser.console == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 420])
def test_the_headline_comes_first(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "report.html"
    page.write(path, pair(tmp_path))
    browser.open(path, width=width, dark=dark)
    assert browser.console == []
    assert browser.run("document.querySelector('h1').innerText") == SAID
    shown = browser.run("getComputedStyle(document.querySelector('h1')).color.match(/[0-9]+/g).map(Number)")
    assert (sum(shown) > 500) is dark, "readable on its background"
    first = "document.querySelector('.chart')"
    assert browser.run(f"{first}.querySelector('h3').innerText") == "Loss over time"
    values = f"[...{first}.querySelectorAll('.u-value')].map(value => value.textContent)"
    assert browser.run(values) == ["24", "2.15", "2.15"], "the last ones, without a cursor"
    legend = browser.run(f"{first}.querySelector('.legend').innerText")
    assert "DDP alone, watched: 3.2 s" in legend
    assert "measure and plan: 3 s" in legend
    wide = browser.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], "nothing to scroll sideways"


def test_planning_is_marked_on_the_time_axis(browser: Browser, tmp_path: Path) -> None:
    """Just above the axis the strips are drawn: grey while DDP was alone, orange during the pause, nothing afterwards."""
    path = tmp_path / "report.html"
    page.write(path, pair(tmp_path))
    browser.open(path)
    place = """(seconds) => {
      const canvas = document.querySelector('.chart canvas'), frame = canvas.getBoundingClientRect();
      const over = document.querySelector('.chart .u-over').getBoundingClientRect(), ratio = canvas.width / frame.width;
      const x = over.left - frame.left + over.width * (seconds - 0.4) / 23.6, y = over.bottom - frame.top - 5;
      return [...canvas.getContext('2d').getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data];
    }"""
    red, _, blue, drawn = browser.run(f"({place})(2)")
    assert (drawn > 200, abs(red - blue) < 60) == (True, True), "grey"
    red, _, blue, drawn = browser.run(f"({place})(4.7)")
    assert (drawn > 200, red - blue > 100) == (True, True), "orange"
    assert browser.run(f"({place})(15.2)")[3] == 0
