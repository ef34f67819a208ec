"""What a server's metrics say now."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """Every sample, by name and labels."""

    def __init__(self, url: str) -> None:
        answer = httpx.get(f"{url}/metrics")
        answer.raise_for_status()
        self.text = answer.text
        self._found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self._found, f"{key} twice"
                self._found[key] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._found}

    def labels(self, name: str) -> list[dict[str, str]]:
        """Label sets of a metric's samples."""
        return [dict(labels) for known, labels in self._found if known == name]

    def value(self, name: str, **labels: str) -> float:
        """Of the sample that has these labels and, unless it is another, the fake model's name."""
        return self._found[name, frozenset(({"model_name": "fake"} | labels).items())]
