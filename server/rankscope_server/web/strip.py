"""
The strip of guard decisions: rank by step, to the geometry of an SVG.
"""

from dataclasses import dataclass

from rankscope_server.domain.model import Strip, StripCell

PITCH = 16
"""
Width of a step.
"""
ROW_HEIGHT = 22
HEAD_HEIGHT = 14
"""
Room above the rows, for the marks of differing steps.
"""
FOOT_HEIGHT = 18
"""
Room below the rows, for step numbers.
"""
TICK_STEPS = 8


@dataclass(frozen=True, slots=True)
class DrawnCell:
    """
    One decision, where it is drawn.
    """

    x: int
    y: int
    guard: str
    title: str


@dataclass(frozen=True, slots=True)
class DifferingStep:
    """
    A step at which ranks decided differently.
    """

    step: int
    x: int
    sentence: str


@dataclass(frozen=True, slots=True)
class DrawnStrip:
    """
    What the template draws.
    """

    width: int
    height: int
    rows: tuple[tuple[str, int], ...]
    """Rank label and the y of its row."""
    cells: tuple[DrawnCell, ...]
    differing: tuple[DifferingStep, ...]
    ticks: tuple[tuple[int, int], ...]
    """x and step number."""
    summary: str


def draw_strip(strip: Strip) -> DrawnStrip:
    """
    Lay the strip out, oldest step at the left.
    """
    cells: list[DrawnCell] = []
    differing: dict[int, list[str]] = {}
    for row, (label, row_cells) in enumerate(strip.rows):
        for column, cell in enumerate(row_cells):
            cells.append(DrawnCell(column * PITCH, HEAD_HEIGHT + row * ROW_HEIGHT, cell.guard, cell_title(label, cell)))
            if cell.differs:
                differing.setdefault(column, []).append(f"{label} {_decision(cell.guard)}")
    steps = strip.steps
    return DrawnStrip(
        width=max(1, len(steps)) * PITCH,
        height=HEAD_HEIGHT + len(strip.rows) * ROW_HEIGHT + FOOT_HEIGHT,
        rows=tuple((label, HEAD_HEIGHT + row * ROW_HEIGHT) for row, (label, _) in enumerate(strip.rows)),
        cells=tuple(cells),
        differing=tuple(
            DifferingStep(steps[column], column * PITCH, f"step {steps[column]}: {', '.join(said)}")
            for column, said in sorted(differing.items())
        ),
        ticks=tuple((column * PITCH + PITCH // 2, step) for column, step in enumerate(steps) if step % TICK_STEPS == 0),
        summary=_summary(strip, len(differing)),
    )


def cell_title(label: str, cell: StripCell) -> str:
    """
    One decision in words.
    """
    said = [f"{label}, step {cell.step}: {_decision(cell.guard)}"]
    if cell.masked is not None and cell.requests is not None:
        said.append(f"{cell.masked} of {cell.requests} requests masked")
    if cell.drift_max is not None:
        said.append(f"drift {cell.drift_max}")
    if cell.differs:
        said.append("another rank decided otherwise")
    return "; ".join(said)


def _decision(guard: str) -> str:
    return {"none": "no decision yet", "missing": "no record"}.get(guard, guard)


def _summary(strip: Strip, differing: int) -> str:
    if not strip.steps:
        return "No step yet."
    span = f"Guard decisions of {len(strip.rows)} ranks over steps {strip.steps[0]} to {strip.steps[-1]}"
    return f"{span}: {'all equal' if not differing else f'different at {differing}'}."
