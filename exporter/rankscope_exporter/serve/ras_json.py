"""
Reading the JSON that NCCL's RAS port answers with from 2.28.7 on.

2.28.9 forgets a comma in its list of missing ranks; that one fault is known and mended. Fields that are not known are
passed over, as later releases add some; a field that is missing or of another type makes the whole answer unusable.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from rankscope_exporter.collectors.nccl import Communicator, NcclRank
from rankscope_exporter.serve.ras_answer import (
    HOST,
    MAX_COMMUNICATORS,
    MAX_RANKS,
    MAX_TYPES,
    NO_ERROR,
    TYPE,
    VERSION,
    Answer,
    CutShortError,
    UnknownFormatError,
    quoted,
    result_name,
)

_FORGOTTEN_COMMA = re.compile(r'("nvml_dev": -?[0-9]{1,6})(\s{1,40}"status")')
_HASH = re.compile(r"0x([0-9a-fA-F]{1,16})")
_NOWHERE = "unknown"
"""
What NCCL writes for the host of a process that it does not know.
"""
_MAX_COUNT = 1 << 64
_MAX_NUMBER = 1 << 31


def parse_json(text: str) -> Answer:
    """
    The answer in `text`.

    Raises:
        CutShortError: the text ends before its end.
        UnknownFormatError: it is not what is known here.

    """
    document = _load(text)
    version = _version(document)
    try:
        return _answer((_Part(value, "communicators[]") for value in document.items("communicators")), version)
    except UnknownFormatError as error:
        raise UnknownFormatError(str(error), version) from error


class _Part:
    """
    A JSON object whose fields are checked when they are taken.
    """

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            msg = f"{path or 'the answer'} is no object"
            raise UnknownFormatError(msg)
        self._value = value
        self._path = path

    def _wrong(self, name: str, wanted: str) -> UnknownFormatError:
        return UnknownFormatError(f"{self._path}{'.' if self._path else ''}{name} is not {wanted}")

    def number(self, name: str, below: int = _MAX_NUMBER) -> int:
        value = self._value.get(name)
        if type(value) is not int or not -1 <= value < below:
            raise self._wrong(name, f"a number from -1 to {below - 1}")
        return value

    def flag(self, name: str) -> bool:
        value = self._value.get(name)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self._wrong(name, "a text of the known form")
        return value

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def part(self, name: str) -> "_Part":
        return _Part(self._value.get(name), f"{self._path}{'.' if self._path else ''}{name}")

    def names(self) -> Iterable[str]:
        return self._value.keys()


def _load(text: str) -> _Part:
    try:
        return _Part(_decode(text), "")
    except (ValueError, RecursionError):
        try:
            return _Part(_decode(_FORGOTTEN_COMMA.sub(r"\1,\2", text)), "")
        except (ValueError, RecursionError) as error:
            # NCCL writes the last brace, and no other, at the beginning of a line.
            is_cut = text.lstrip().startswith("{") and not text.rstrip().endswith("\n}")
            if is_cut and isinstance(error, json.JSONDecodeError):
                msg = f"the JSON ends with {quoted(text.rstrip()[-20:])}"
                raise CutShortError(msg) from error
            msg = f"not JSON: {quoted(str(error))}"
            raise UnknownFormatError(msg) from error


def _decode(text: str) -> Any:
    return json.loads(text, parse_int=_integer, parse_constant=_constant)


def _integer(digits: str) -> int:
    if len(digits) > 20:
        msg = "a number with more than 20 digits"
        raise ValueError(msg)
    return int(digits)


def _constant(name: str) -> float:
    msg = f"{name} is no JSON"
    raise ValueError(msg)


def _version(document: _Part) -> str:
    return document.text("nccl_version", VERSION)


def _answer(parts: Iterable[_Part], version: str) -> Answer:
    summary: dict[tuple[str, str], int] = {}
    shown: dict[str, Communicator] = {}
    processes: set[tuple[str, int]] = set()
    budget = MAX_RANKS
    left_out = 0
    for part in parts:
        communicator = _communicator(part)
        key = (communicator.status, communicator.errors)
        summary[key] = summary.get(key, 0) + 1
        processes.update((rank.host, rank.pid) for rank in communicator.ranks if rank.pid is not None)
        count = len(communicator.ranks)
        # The hash alone is not quite unique; a second communicator with it would be a second series of the same name.
        if len(shown) >= MAX_COMMUNICATORS or communicator.id in shown:
            left_out += count
            continue
        if count > budget:
            left_out += count
            communicator = _without_ranks(communicator)
        else:
            budget -= count
        shown[communicator.id] = communicator
    return Answer(version, "json", summary, tuple(shown.values()), frozenset(processes), left_out)


def _communicator(part: _Part) -> Communicator:
    match = _HASH.fullmatch(part.text("hash", _HASH))
    assert match
    present = [_present(_Part(value, "ranks[]")) for value in part.items("ranks")]
    absent = [_absent(_Part(value, "missing_ranks[]")) for value in part.items("missing_ranks")]
    ranks = sorted((*present, *absent), key=lambda rank: rank.rank)
    if len({rank.rank for rank in ranks}) != len(ranks):
        msg = "a rank stands in its communicator twice"
        raise UnknownFormatError(msg)
    size = part.number("size")
    if size < len(ranks):
        msg = "a communicator has more ranks than its size"
        raise UnknownFormatError(msg)
    states = {rank.state for rank in present} | ({"not a member"} & {rank.state for rank in absent})
    ranges = _ranges(present)
    unlisted = size - len(ranks)
    return Communicator(
        id=match[1].lower().zfill(16),
        size=size,
        status=next((state for state in ("abort", "finalize", "running", "init") if state in states), "not a member"),
        ranks=tuple(ranks),
        missing=len(absent) + unlisted,
        mismatch=len(states) > 1 or any(low != high for low, high in ranges.values()),
        incomplete=unlisted > 0 or any(rank.state != "not a member" for rank in absent),
        error=any(rank.errors for rank in present),
        ranges=ranges,
        fingerprint=hash(tuple((rank.rank, *sorted(rank.counts.items())) for rank in present)) if present else None,
    )


def _present(part: _Part) -> NcclRank:
    status = part.part("status")
    init, asynchronous = status.number("init_state"), status.number("async_error")
    destroyed, finalized = status.flag("destroy_flag"), status.flag("finalize_called")
    if status.flag("abort_flag"):
        state = "abort"
    elif destroyed or finalized:
        state = "finalize"
    else:
        state = "running" if init == 0 else "init"
    errors = tuple(
        (kind, result_name(number)) for kind, number in (("init", init), ("async", asynchronous)) if number not in NO_ERROR
    )  # fmt: skip
    counts = part.part("collective_counts")
    types = list(counts.names())
    if len(types) > MAX_TYPES or not all(TYPE.fullmatch(name) for name in types):
        msg = "collective_counts has names or numbers of them that are not known"
        raise UnknownFormatError(msg)
    return _rank(part, state, {name: counts.number(name, _MAX_COUNT) for name in types}, errors)


def _absent(part: _Part) -> NcclRank:
    status = part.part("status")
    silent = "unresponsive" if status.flag("unresponsive") else "not a member"
    return _rank(part, "dead" if status.flag("considered_dead") else silent, {}, ())


def _rank(part: _Part, state: str, counts: dict[str, int], errors: tuple[tuple[str, str], ...]) -> NcclRank:
    host, pid, device = part.text("host", HOST), part.number("pid"), part.number("cuda_dev")
    return NcclRank(
        rank=part.number("rank"),
        host="" if host == _NOWHERE else host,
        pid=None if pid < 0 else pid,
        cuda_device=None if device < 0 else device,
        state=state,
        counts=counts,
        errors=errors,
    )


def _ranges(ranks: list[NcclRank]) -> dict[str, tuple[int, int]]:
    values: dict[str, list[int]] = {}
    for rank in ranks:
        for name, count in rank.counts.items():
            values.setdefault(name, []).append(count)
    return {name: (min(counts), max(counts)) for name, counts in values.items()}


def _without_ranks(communicator: Communicator) -> Communicator:
    return Communicator(
        communicator.id, communicator.size, communicator.status, (), communicator.missing, communicator.mismatch,
        communicator.incomplete, communicator.error, communicator.ranges, communicator.fingerprint,
    )  # fmt: skip
