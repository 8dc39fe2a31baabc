"""
The sparkline of a deployment: numbers to the geometry of a small SVG.
"""

from dataclasses import dataclass

LEAST_SCALE = 8.0
"""
Drift that fills the height at least: a drift of one or two tokens shall not look like a mountain.
"""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """
    What the template draws, in units of the picture.
    """

    width: int
    height: int
    line: str
    """Path of the line, broken where nothing was known."""
    area: str
    """The same, closed down to the base."""
    gaps: tuple[tuple[float, float], ...]
    """Stretches in which nothing was known: x and width."""
    peak: float | None
    """Largest value; None where none is known."""
    last: float | None
    summary: str
    """The picture in words."""


def draw_sparkline(values: tuple[float | None, ...], *, width: int = 160, height: int = 36) -> Sparkline:
    """
    Draw one value a second, oldest first, from the left edge to the right.
    """
    known = [value for value in values if value is not None]
    peak = max(known, default=None)
    last = values[-1] if values else None
    scale = max(LEAST_SCALE, peak or 0.0)
    pitch = width / max(1, len(values) - 1)

    def point(index: int, value: float) -> str:
        return f"{index * pitch:.1f} {height - 1 - max(0.0, value) / scale * (height - 3):.1f}"

    line: list[str] = []
    area: list[str] = []
    for first, run in _runs(values):
        points = [point(first + offset, value) for offset, value in enumerate(run)]
        line.append("M" + "L".join(points))
        left, right = first * pitch, (first + len(run) - 1) * pitch
        area.append(f"M{left:.1f} {height}L{'L'.join(points)}L{right:.1f} {height}Z")
    return Sparkline(
        width=width,
        height=height,
        line="".join(line),
        area="".join(area),
        gaps=_gaps(values, pitch),
        peak=peak,
        last=last,
        summary=_summary(values, peak, last),
    )


def _runs(values: tuple[float | None, ...]) -> list[tuple[int, list[float]]]:
    runs: list[tuple[int, list[float]]] = []
    open_run = False
    for index, value in enumerate(values):
        if value is None:
            open_run = False
            continue
        if not open_run:
            runs.append((index, []))
            open_run = True
        runs[-1][1].append(value)
    return runs


def _gaps(values: tuple[float | None, ...], pitch: float) -> tuple[tuple[float, float], ...]:
    gaps: list[tuple[float, float]] = []
    start: int | None = None
    for index, value in enumerate((*values, 0.0)):
        if value is None and start is None:
            start = index
        elif value is not None and start is not None:
            gaps.append((round(start * pitch, 1), round(max(pitch, (index - 1 - start) * pitch), 1)))
            start = None
    return tuple(gaps)


def _summary(values: tuple[float | None, ...], peak: float | None, last: float | None) -> str:
    if peak is None:
        return "Largest drift: unknown so far"
    now = "unknown now" if last is None else f"now {last:g}"
    return f"Largest drift over the last {len(values)} s: peak {peak:g}, {now}"
