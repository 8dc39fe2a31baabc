"""
What the areas of a flight file hold, as values.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope_exporter.contract.words import ControlOutcome, MitigationState
from rankscope_exporter.flight import layout


@dataclass(frozen=True, slots=True)
class RequestTableRow:
    """
    One row of the request table; `margin` is None where it is not known.
    """

    request_id: str
    state_length: int
    scheduler_length: int
    drift: int
    masked: bool
    margin: int | None
    first_drift_step: int
    step: int


@dataclass(frozen=True, slots=True)
class Control:
    """
    The control area: what was asked for, and what the rank did with it.
    """

    requested_word: int
    observed_word: int
    acted_word: int
    acted_step: int
    outcome: ControlOutcome
    mitigation_state: MitigationState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The lengths' histograms (counts per bucket of `layout.BUCKET_BOUNDS`, not summed up).

    The rank fills them in place: what is read while it does can hold a part of the sample that is being added.
    """

    state: tuple[int, ...]
    scheduler: tuple[int, ...]
    state_sum: int
    scheduler_sum: int
    samples: int


@dataclass(frozen=True, slots=True)
class OwnTime:
    """
    Measured steps per bucket of `layout.OWN_BOUNDS` (not summed up), and their time in seconds.
    """

    steps: tuple[int, ...]
    seconds: float


def control_of(words: tuple[int, ...]) -> Control:
    """
    The control area out of its words. A number that this reader does not know is taken as nothing done, nothing known.
    """
    return Control(
        requested_word=words[layout.CONTROL_REQUEST],
        observed_word=words[layout.ACK_OBSERVED],
        acted_word=words[layout.ACK_WORD],
        acted_step=words[layout.ACK_STEP],
        outcome=member(ControlOutcome, words[layout.ACK_OUTCOME], ControlOutcome.NONE),
        mitigation_state=member(MitigationState, words[layout.ACK_STATE], MitigationState.UNKNOWN_CODE),
    )


def request_rows(table: npt.NDArray[np.void]) -> list[RequestTableRow]:
    """
    The rows of a request table (`layout.REQUEST_DTYPE`), without those whose id cannot be as long as they say.
    """
    return [_row(row) for row in table if row["id_length"] <= layout.REQUEST_ID_BYTES]


def _row(row: np.void) -> RequestTableRow:
    margin = int(row["margin"])
    return RequestTableRow(
        request_id=row["request_id"].tobytes()[: int(row["id_length"])].decode(errors="replace"),
        state_length=int(row["state_length"]),
        scheduler_length=int(row["scheduler_length"]),
        drift=int(row["drift"]),
        masked=bool(row["masked"]),
        margin=None if margin == layout.MARGIN_UNKNOWN else margin,
        first_drift_step=int(row["first_drift_step"]),
        step=int(row["step"]),
    )


def member(kind: Any, value: int, default: Any) -> Any:
    """
    The member of an enumeration with this value, `default` if it has none.
    """
    try:
        return kind(value)
    except ValueError:
        return default


def json_mapping(raw: bytes) -> dict[str, Any]:
    """
    The JSON object in UTF-8 that fills `raw`.

    Raises:
        ValueError: it is none, or holds what JSON has no word for (NaN, infinity), or is nested too deep to be read.

    """
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        msg = "nested too deep"
        raise ValueError(msg) from error
    if not isinstance(value, dict):
        msg = "not an object"
        raise ValueError(msg)  # noqa: TRY004  one kind of error for one kind of damage
    return value


def _refuse(name: str) -> float:
    msg = f"{name} is not JSON"
    raise ValueError(msg)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)
