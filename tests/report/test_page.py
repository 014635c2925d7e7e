import base64
import re
import xml.etree.ElementTree as ET

import pytest
from summaries import draw_without_pixels, run_summary, sweep_summary, tune_summary

from specjax.report.page import page


@pytest.fixture(scope="module")
def run_page():
    return page(run_summary())


def test_it_needs_nothing_beside_itself(run_page):
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', run_page)
    assert len(sources) == 10  # five pictures in two schemes
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ET.fromstring(base64.b64decode(data)).tag == "{http://www.w3.org/2000/svg}svg"
    assert "<script" not in run_page
    assert "@import" not in run_page


def test_it_holds_words_tables_and_surroundings(run_page):
    assert "Speed-up 1.29x over plain decoding" in run_page
    assert "<td>qa</td><td>2.67</td>" in run_page
    assert "&lt;tiny&gt;" in run_page
    assert "<tiny>" not in run_page
    assert "prefers-color-scheme: dark" in run_page


@pytest.fixture
def without_pixels(monkeypatch):
    draw_without_pixels(monkeypatch)


@pytest.mark.usefixtures("without_pixels")
@pytest.mark.parametrize("build", [sweep_summary, tune_summary])
def test_other_commands(build):
    assert page(build()).count("<figure>") >= 3


@pytest.mark.usefixtures("without_pixels")
def test_what_was_simulated_is_said_at_the_top(run_page):
    marked = page(run_summary() | {"synthetic_acceptance": 0.8})
    assert "Simulated acceptance 0.8. A coin, not the target, decided what was kept: not lossless." in marked
    assert marked.index("not lossless") < marked.index("<figure>")
    assert "imulated" not in run_page
