"""
Values to what people read: numbers, ages, times, names. Unknown is said as unknown.
"""

import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from markupsafe import Markup

from rankscope_server.domain.alert import AlertState, AlertView, ReceiverView
from rankscope_server.domain.incident import IncidentCard, IncidentLife
from rankscope_server.domain.model import ActedMark, Severity, State, ToggleProgress
from rankscope_server.domain.outlook import OPEN_SECONDS, Forecast

UNKNOWN = Markup('<span class="unknown">unknown</span>')

TONES = {
    State.HEALTHY: "good",
    State.IDLE: "quiet",
    State.BLIND: "blind",
    State.DRIFTING: "warning",
    State.STALLED: "warning",
    State.MITIGATION_MIXED: "critical",
    State.OUTPUT_WRONG: "critical",
    State.PARTED: "critical",
    State.RANK_LOST: "critical",
    State.WEDGED: "critical",
}
"""
Which colours a state wears; its shape is its own.
"""

SEVERITY_TONES = {Severity.WARNING: "warning", Severity.CRITICAL: "critical"}
LIFE_TONES = {
    IncidentLife.WORSENING: "critical",
    IncidentLife.WEDGED: "critical",
    IncidentLife.RECOVERED: "good",
    IncidentLife.CLOSED: "quiet",
}
"""
The same for incidents; one that is merely open wears the colours of its severity.
"""

ENGINE_ID_CHARACTERS = 18
FRESH_SECONDS = 3.0
"""
Data younger than this is called live: exporters are polled several times a second.
"""


def known(value: object, unit: str = "") -> str | Markup:
    """
    A value with its unit, or the word unknown.
    """
    if value is None or value == "":
        return UNKNOWN
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text}\N{NO-BREAK SPACE}{unit}" if unit else text


def signed_drift(value: float | None) -> str | Markup:
    """
    A drift with its sign: above zero is wrong, below zero is not.
    """
    if value is None:
        return UNKNOWN
    if value > 0:
        return f"+{value:g}"
    return f"\N{MINUS SIGN}{-value:g}" if value < 0 else "0"


def rate(value: float | None) -> str | Markup:
    """
    Steps per second.
    """
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def age(seconds: float | None) -> str:
    """
    How long ago, coarse enough to be read.
    """
    if seconds is None:
        return "never"
    if seconds < FRESH_SECONDS:
        return "just now"
    return f"{duration(seconds)} ago"


def sample_age(seconds: float | None) -> str | Markup:
    """
    How long ago a sample was taken: to the second, as it may be the newest that is known for a while.
    """
    return Markup('<span class="unknown">age unknown</span>') if seconds is None else f"{duration(seconds)} ago"


def marks(acted: Iterable[ActedMark]) -> list[dict[str, object]]:
    """
    Marks of the chart, as its script reads them.
    """
    return [{"at": mark.at_unix, "label": "fix on" if mark.desired else "fix off"} for mark in acted]


def duration(seconds: float) -> str:
    """
    A span of time in its largest unit.
    """
    whole = int(seconds)
    if whole < 120:
        return f"{whole}\N{NO-BREAK SPACE}s"
    if whole < 7200:
        return f"{whole // 60}\N{NO-BREAK SPACE}min"
    return f"{whole // 3600}\N{NO-BREAK SPACE}h"


def span(earliest_seconds: float, latest_seconds: float) -> str:
    """
    When something comes, between two times from now: never narrower than what was said.
    """
    early, early_unit = _coarse(earliest_seconds, math.floor)
    late, late_unit = _coarse(max(1.0, latest_seconds), math.ceil)
    if early == 0:
        return f"within {late}\N{NO-BREAK SPACE}{late_unit}"
    if (early, early_unit) == (late, late_unit):
        return f"in about {late}\N{NO-BREAK SPACE}{late_unit}"
    first = f"{early}" if early_unit == late_unit else f"{early}\N{NO-BREAK SPACE}{early_unit}"
    return f"in {first} to {late}\N{NO-BREAK SPACE}{late_unit}"


def _coarse(seconds: float, rounded: Callable[[float], int]) -> tuple[int, str]:
    """
    A span in few digits, so that it does not flicker as it is estimated anew.
    """
    if seconds < 20:
        return rounded(max(0.0, seconds)), "s"
    if seconds <= 90:
        return rounded(seconds / 5) * 5, "s"
    if seconds <= 5400:
        return rounded(seconds / 60), "min"
    return rounded(seconds / 3600), "h"


def forecast_phrase(forecast: Forecast) -> str:
    """
    What is in sight, and when; only for a forecast whose outlook is `in sight`.
    """
    where = f" on {forecast.rank}" if forecast.rank else ""
    earliest, latest = forecast.earliest_seconds or 0.0, forecast.latest_seconds
    if latest is not None and latest <= OPEN_SECONDS:
        when = span(earliest, latest)
    else:
        size, unit = _coarse(earliest, math.floor)
        when = f"at any time from {size}\N{NO-BREAK SPACE}{unit} on" if size else "at any time"
    return f"all requests masked{where} {when}"


def elapsed(seconds: float) -> str:
    """
    A time after another one: `+41 s`, `+2 min 5 s`.
    """
    whole = max(0, int(seconds))
    if whole < 120:
        return f"+{whole}\N{NO-BREAK SPACE}s"
    if whole < 7200:
        rest = f" {whole % 60}\N{NO-BREAK SPACE}s" if whole % 60 else ""
        return f"+{whole // 60}\N{NO-BREAK SPACE}min{rest}"
    rest = f" {whole % 3600 // 60}\N{NO-BREAK SPACE}min" if whole % 3600 // 60 else ""
    return f"+{whole // 3600}\N{NO-BREAK SPACE}h{rest}"


def file_size(size_bytes: int) -> str:
    """
    The size of a file, as file managers tell it.
    """
    if size_bytes < 1000:
        return f"{size_bytes}\N{NO-BREAK SPACE}B"
    if size_bytes < 1_000_000:
        return f"{size_bytes / 1000:.0f}\N{NO-BREAK SPACE}kB"
    return f"{size_bytes / 1_000_000:.1f}\N{NO-BREAK SPACE}MB"


def is_fresh(seconds: float | None) -> bool:
    """
    Whether data of this age may be called live.
    """
    return seconds is not None and seconds < FRESH_SECONDS


def moment(unix: float | None) -> str | Markup:
    """
    A time: UTC in the markup and the title; the page's script puts the reader's own time in its place.
    """
    if unix is None:
        return UNKNOWN
    at = datetime.fromtimestamp(unix, UTC)
    shown = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return Markup('<time datetime="{iso}" title="{shown}" data-unix="{unix:.0f}">{shown}</time>').format(
        iso=f"{at:%Y-%m-%dT%H:%M:%SZ}", shown=shown, unix=unix
    )


def short_engine(engine: str) -> str:
    """
    An engine's id, cut in its middle: ids that begin alike differ at the end, and the other way round.
    """
    return engine if len(engine) <= ENGINE_ID_CHARACTERS else f"{engine[:8]}\N{HORIZONTAL ELLIPSIS}{engine[-4:]}"


def tone(state: State) -> str:
    """
    Which colours a state wears.
    """
    return TONES[state]


def life_tone(card: IncidentCard) -> str:
    """
    Which colours an incident wears.
    """
    return LIFE_TONES.get(card.life, SEVERITY_TONES[card.severity])


def alert_tone(alert: AlertView) -> str:
    """
    Which colours an alert wears: those of its severity only while somebody is told.
    """
    return SEVERITY_TONES[alert.severity] if alert.state is AlertState.FIRING else "quiet"


def severity_tone(severity: Severity) -> str:
    """
    Which colours a severity wears.
    """
    return SEVERITY_TONES[severity]


def receiver_state(receiver: ReceiverView) -> str:
    """
    How a receiver does, in words: nothing that was never tried is called healthy.
    """
    match receiver.healthy:
        case None:
            return "not used yet"
        case True:
            return "healthy"
        case False:
            return "failing"


def slug(words: str) -> str:
    """
    Words as part of a class or symbol name.
    """
    return words.replace(" ", "-")


def sentence(text: str) -> str:
    """
    A phrase as a sentence: a capital first, a full stop last.
    """
    text = capital(text.strip())
    return text if not text or text[-1] in ".!?" else f"{text}."


def capital(text: str) -> str:
    """
    A phrase with a capital first, unless it begins with a name: pp0, vLLM, http://node are written alike everywhere.
    """
    first_word = text.partition(" ")[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first_word.isalpha() and first_word.islower() else text


def plural(count: int, one: str, many: str | None = None) -> str:
    """
    A count with its noun.
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def progress_sentence(progress: ToggleProgress) -> str:
    """
    How far a toggle has come, in one sentence.
    """
    step = "at once" if progress.effective_step == 0 else f"at step {progress.effective_step}"
    if progress.acknowledged < progress.ranks:
        return f"Pending: {progress.acknowledged} of {progress.ranks} ranks have acted; they act {step}"
    done = "Applied" if progress.desired else "Taken back"
    match progress.applied_step_spread:
        case None:
            return "Every rank has answered, and not all have acted: each says why"
        case 0:
            return (
                f"{done} {step} on every rank" if progress.effective_step else f"{done} on every rank at the same step"
            )
        case spread:
            return f"{done}, but ranks acted up to {plural(spread, 'step')} apart"
