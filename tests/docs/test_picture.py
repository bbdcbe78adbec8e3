"""The picture of README.md: made from the demo's result, and as new as that."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools import picture

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def result(headline: str = "4.1 times faster to the same loss") -> dict[str, object]:
    rows = [
        {"label": "plain DDP", "rate": "100mbit", "nodes": 2, "steps": 200, "total_seconds": 80.0, "loss": 1.25},
        {"label": "thinwire", "rate": "100mbit", "nodes": 2, "steps": 200, "total_seconds": 19.5, "loss": 1.26},
    ]
    curves = [
        {"seconds": [0.4, 40.0, 80.0], "loss": [5.5, 2.0, 1.25]},
        {"seconds": [0.4, 10.0, 19.5], "loss": [5.5, 2.0, 1.26]},
    ]
    return {"rows": rows, "summary": {"headline": headline, "curves": curves}}


def test_the_picture_is_that_of_the_result() -> None:
    assert picture.main(["--check"]) == 0, "stale: run make tables"


@pytest.mark.parametrize("name", picture.THEMES)
def test_what_it_shows(name: str) -> None:
    root = ElementTree.fromstring(picture.draw(result(), picture.THEMES[name]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for said in ("4.1 times faster to the same loss", "2 nodes, 100 Mbit/s, 200 steps"):
        assert said in texts
    assert {"plain DDP: 80 s, loss 1.25", "thinwire: 20 s, loss 1.26"} <= set(texts)
    assert root.find(f"{SVG}desc") is not None, "for those who cannot see it"
    lines = root.findall(f"{SVG}polyline")
    ends = [float(line.attrib["points"].split()[-1].split(",")[0]) for line in lines]
    assert ends[0] == picture.WIDTH - picture.RIGHT
    assert (ends[1] - picture.LEFT) / (ends[0] - picture.LEFT) == pytest.approx(19.5 / 80, abs=0.01)
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.attrib["x"]) <= picture.WIDTH
        assert 0 <= float(element.attrib["y"]) <= picture.HEIGHT


def test_texts_are_escaped() -> None:
    attack = "</text><script>alert(1)</script>"
    root = ElementTree.fromstring(picture.draw(result(attack), picture.THEMES["light"]))
    assert root.find(f"{SVG}script") is None
    assert attack in [element.text for element in root.iter(f"{SVG}text")]


def test_a_changed_result_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, light, dark = tmp_path / "demo.json", tmp_path / "light.svg", tmp_path / "dark.svg"
    source.write_text(json.dumps(result()))
    places = [str(source), str(light), str(dark)]
    assert picture.main([*places, "--check"]) == 1
    assert not light.exists()
    assert picture.main(places) == 0
    assert light.read_text() != dark.read_text()
    assert picture.main([*places, "--check"]) == 0
    source.write_text(json.dumps(result("slower")))
    assert picture.main([*places, "--check"]) == 1
    assert "light.svg, dark.svg" in capsys.readouterr().out


def test_the_readme_shows_both() -> None:
    text = (ROOT / "README.md").read_text()
    assert "docs/demo-dark.svg" in text
    assert "docs/demo-light.svg" in text
    assert "prefers-color-scheme: dark" in text
