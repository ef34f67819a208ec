"""The page is well-formed and needs nothing from anywhere."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason="draws")

from jaxserve.bench.cells import cells_of
from jaxserve.bench.compare import compare
from jaxserve.bench.config import BenchConfig
from jaxserve.bench.report import comparison_page, result_page
from jaxserve.bench.result import CellResult, CellRun, Result
from jaxserve.bench.traffic import Outcome, Run
from tests.bench.results import CELLS, outcome, result

SVG = "{http://www.w3.org/2000/svg}"


def with_scenarios() -> Result:
    """A result with a scenario in which requests end in every way, beside the matrix."""
    settings = {"a <b>": {"kind": "failure", "requests": 6}, "left": {"kind": "cancellations", "requests": 4}}
    config = BenchConfig.from_mapping({"scenario": settings})
    cells: list[CellResult] = []
    for cell in cells_of(config):
        asks = cell.work(config, 0).asks
        outcomes = [outcome(ask, 0.1, 0.01) for ask in asks]
        outcomes[0] = Outcome(start=0.0, error='500: {"a": "<script>"}')
        outcomes[1].cancelled = True
        run = CellRun.of(0, asks, Run(outcomes, 2.0), config.limits, idle_seconds=0.1)
        cells.append(CellResult(name=cell.name, kind=cell.kind, settings=cell.settings, runs=[run]))
    matrix = result([[1.0, 1.1]] * 2, left_out=["the rest & more"])
    return Result(**vars(matrix) | {"cells": [*matrix.cells, *cells]})


class References(HTMLParser):
    """What a page names: where it would go, and its pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        named = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
        self.targets += [value or "" for name, value in attrs if name in named]


def pictures(page: str) -> Iterator[ET.Element]:
    for target in References(page).targets:
        kind, _, data = target.partition(";base64,")
        assert kind == "data:image/svg+xml", target
        yield ET.fromstring(base64.b64decode(data))


def pages() -> list[str]:
    one, other = with_scenarios(), result([[0.5, 0.6]] * 2)
    return [result_page(one, 1.0, 0.1), comparison_page(compare(one, other, ttft=1.0, tpot=0.1), one, other)]


@pytest.mark.parametrize("page", pages(), ids=["result", "comparison"])
def test_a_page_is_well_formed_and_refers_to_nothing_outside(page: str) -> None:
    ET.fromstring(page.partition("\n")[2])  # All but the line that says that it is HTML.
    assert not {"script", "link", "iframe", "object"} & References(page).tags
    assert "@import" not in page
    assert "url(" not in page
    for picture in pictures(page):
        assert picture.tag == f"{SVG}svg"
        for element in picture.iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith("#"), value
                assert not re.search(r"url\((?!#)", value), value


def test_a_result_s_page_shows_its_cells_checks_scenarios_and_configuration() -> None:
    page, _ = pages()
    assert all(name.replace(">", "&gt;") in page for name in CELLS)
    for text in ("all &lt;well&gt;", "a &lt;b&gt;", "the rest &amp; more", "1 were cancelled", "abacus"):
        assert text in page
    assert "&quot;vocab_size&quot;: 256" in page
    assert len(list(pictures(page))) == 3, "the matrix and two scenarios"


def test_the_same_result_makes_the_same_page() -> None:
    assert pages() == pages()
