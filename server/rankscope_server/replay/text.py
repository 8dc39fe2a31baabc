"""
A replay as text, for a tired person at a terminal.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rankscope_server.domain.facts import joined, seconds
from rankscope_server.domain.outlook import Outlook
from rankscope_server.replay.playing import Found, Played
from rankscope_server.replay.verdict import Foreseen, Verdict

REPEATED = 3
"""
Findings of one kind that are told at most: after those, only how many there are.
"""

SHORT_ID = 12
"""
Characters of a request id that are shown.
"""

_INDENT = "    "


def printable(text: str) -> str:
    """
    `text` with everything but printable characters written as escapes: what a file holds cannot steer the terminal.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def engine_lines(played: Played, verdict: Verdict) -> Iterator[str]:
    """
    One engine: who it is, the verdict, what was found, what was foreseen, what is not known.
    """
    identity = played.engine.identity
    labels = joined(rank.label for rank in played.engine.ranks)
    plural = "s" if len(played.engine.ranks) > 1 else ""
    yield printable(
        f"engine {identity.engine}: {identity.model}, vLLM {identity.vllm_version}, {identity.runner} runner, rank{plural} {labels}"
    )
    yield _covered(played)
    yield ""
    yield f"  {printable(verdict.sentence)}"
    told: dict[object, int] = {}
    for found in verdict.found:
        count = told[found.finding.kind] = told.get(found.finding.kind, 0) + 1
        if count <= REPEATED:
            yield ""
            yield from map(printable, _finding_lines(found, verdict.first_drift_unix))
    for kind, count in told.items():
        if count > REPEATED:
            yield ""
            yield f"  and {count - REPEATED} more of {kind.value}"  # type: ignore[attr-defined]
    if verdict.foreseen:
        yield ""
        yield from map(printable, (f"  {foreseen_line(one)}" for one in verdict.foreseen))
    if verdict.notes:
        yield ""
        yield from (printable(f"  Note: {note}.") for note in verdict.notes)


def _covered(played: Played) -> str:
    ranks = [rank for rank in played.facts.ranks if rank.history.last]
    if not ranks:
        return "no step was begun"
    first, last = min(rank.history.first for rank in ranks), max(rank.history.last for rank in ranks)
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    return f"{steps}, {moment_text(played.begun_unix)} to {moment_text(played.ended.unix)} UTC"


def _finding_lines(found: Found, first_drift_unix: float | None) -> Iterator[str]:
    finding = found.finding
    where = "" if finding.step is None else f", step {finding.step}"
    over = "" if found.over_unix is None else f" (over after {seconds(found.over_unix - finding.since_unix)})"
    yield f"  {finding.kind.value}{where}{_after(finding.since_unix, first_drift_unix)}{over}"
    yield f"{_INDENT}{finding.sentence}"
    yield from (f"{_INDENT}{value.label}: {value.value}" for value in finding.evidence.values)
    if finding.evidence.requests:
        yield f"{_INDENT}requests: {', '.join(map(_short, finding.evidence.requests))}"


def _short(request: str) -> str:
    """
    The end of a long request id: the beginnings are alike, and `--json` has the whole.
    """
    return request if len(request) <= SHORT_ID else f"...{request[-SHORT_ID:]}"


def _after(since_unix: float, first_drift_unix: float | None) -> str:
    if first_drift_unix is None or since_unix <= first_drift_unix:
        return f", {moment_text(since_unix)}"
    return f", {seconds(since_unix - first_drift_unix)} after the first drift"


def foreseen_line(foreseen: Foreseen) -> str:
    """
    A forecast and how it came, in a sentence.
    """
    forecast = foreseen.forecast
    if forecast.outlook is not Outlook.IN_SIGHT:
        said = f"the step at which the ranks part was {forecast.outlook.value} ({forecast.reason})"
    else:
        said = (
            f"the ranks would part within {seconds(forecast.earliest_seconds or 0.0)} to {seconds(forecast.latest_seconds or 0.0)} "
            f"({forecast.reason})"
        )
    came = (
        "they did not"
        if foreseen.parted_after_seconds is None
        else f"they did after {seconds(foreseen.parted_after_seconds)}"
    )
    return f"Forecast at {moment_text(foreseen.at_unix)}: {said}; {came}."


def moment_text(unix: float, digits: int = 1) -> str:
    """
    Date and time in UTC, with so many digits of the second's fraction.
    """
    try:
        moment = datetime.fromtimestamp(unix, UTC)
    except (OverflowError, ValueError):  # a file whose clock makes no sense
        return "at an impossible time"
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[: digits - 6]


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """
    Rows of words under their titles, in columns.
    """
    widths = [max(len(title), *(len(row[i]) for row in rows)) for i, title in enumerate(titles)]
    for row in (titles, *rows):
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
