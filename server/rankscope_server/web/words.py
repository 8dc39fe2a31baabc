"""
Values to what people read: numbers, ages, times, names. Unknown is said as unknown.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from markupsafe import Markup

from rankscope_server.domain.model import ActedMark, State, ToggleProgress

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


def slug(words: str) -> str:
    """
    Words as part of a class or symbol name.
    """
    return words.replace(" ", "-")


def sentence(text: str) -> str:
    """
    A phrase as a sentence: a capital first, a full stop last.
    """
    text = text.strip()
    first_word = text.partition(" ")[0].rstrip(",:;")
    # Names keep their case, as they are written everywhere else: pp0, vLLM, http://node.
    if first_word.isalpha() and first_word.islower():
        text = text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".!?" else f"{text}."


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
