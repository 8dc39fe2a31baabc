"""
Text for terminals: whatever a file holds, it cannot steer the terminal, and columns stay in line.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

UNKNOWN = "-"


def printable(text: str) -> str:
    """
    `text` with everything but printable characters written as escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def clock_text(unix: float | None) -> str:
    """
    Time of day in UTC, to the millisecond; `-` if it is not known.
    """
    if unix is None:
        return UNKNOWN
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%H:%M:%S.%f")[:-3]


def moment_text(unix: float) -> str:
    """
    Date and time in UTC, to the second; `-` if it makes no sense.
    """
    if not 0 < unix < 1 << 34:
        return UNKNOWN
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def cell(value: object) -> str:
    """
    A value as a table shows it.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return printable(str(value))


def says_something(values: Iterable[object]) -> bool:
    """
    Whether any of the values is known, and not just zero.
    """
    return any(value not in {None, 0, ""} for value in values)


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """
    Titles and rows as lines, numbers to the right, words to the left.
    """
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max([len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(titles)]
    right = [all(row[i] is None or isinstance(row[i], (int, float)) for row in rows) for i in range(len(titles))]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if numbers else text.ljust(width)
            for text, width, numbers in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line(titles), *(line(row) for row in cells)]
