"""
Label sets that remember how they are written.
"""

MOST_DERIVED = 256
"""
Label sets kept per rank: some fifty are in use, the rest is for reasons of hooks that change.
"""


class Labels(dict[str, str]):
    """
    The labels of samples, never changed, with their text as `text`.

    A rank's labels stay the same from scrape to scrape, and so do those with one more label that are made from them.
    """

    __slots__ = ("_derived", "_series", "text")

    def __init__(self, labels: dict[str, str]) -> None:
        super().__init__(labels)
        self.text = label_text(labels)
        self._derived: dict[tuple[tuple[str, str], ...], Labels] = {}
        self._series: dict[tuple[str, tuple[str, ...]], tuple[Labels, ...]] = {}

    def more(self, **labels: str) -> "Labels":
        """
        These labels and others, the same object whenever the others are the same.
        """
        key = tuple(labels.items())
        derived = self._derived.get(key)
        if derived is None:
            if len(self._derived) >= MOST_DERIVED:
                self._derived.clear()
            derived = self._derived[key] = Labels({**self, **labels})
        return derived

    def each(self, name: str, values: tuple[str, ...]) -> "tuple[Labels, ...]":
        """
        These labels and one more, for each of `values`, which are the same from scrape to scrape.
        """
        series = self._series.get((name, values))
        if series is None:
            series = self._series[name, values] = tuple(self.more(**{name: value}) for value in values)
        return series


def label_text(labels: dict[str, str]) -> str:
    """
    Labels as they stand in a scrape, sorted by name; empty for none.
    """
    return (
        "{" + ",".join([f'{name}="{_escape(value)}"' for name, value in sorted(labels.items())]) + "}" if labels else ""
    )


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
