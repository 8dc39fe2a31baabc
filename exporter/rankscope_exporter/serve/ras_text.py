"""
Reading the text that NCCL's RAS port answers `VERBOSE STATUS` with, from 2.24 on.

The text is made for people: a table with one row per group of like communicators, then each communicator in trouble with
the ranks that stand out. What it does not name is not known. Newer releases answer in JSON, so the wordings of the text
are a closed set, and a line that is not among them makes the whole answer unusable.
"""

import re
from dataclasses import dataclass, field

from rankscope_exporter.collectors.nccl import Communicator, NcclRank
from rankscope_exporter.serve.ras_answer import (
    MAX_COMMUNICATORS,
    MAX_RANKS,
    OTHER_RESULT,
    RESULTS,
    VERSION,
    Answer,
    CutShortError,
    RasError,
    UnknownFormatError,
    quoted,
)

ALL_TYPES = "all"
"""
Stands for the type of collective where NCCL (2.24, 2.25) counts all types together.
"""

MAX_LINES = 1 << 16

_N = r"([0-9]{1,10})"
_COUNT = r"([0-9]{1,20})"
_WHERE = r"(?: -- (?:GPU ([0-9]{1,4})(?: \(NVML [0-9]{1,4}\))? managed by process ([0-9]{1,10}) on node ([0-9A-Za-z.:%_-]{0,64})|\[process information not found\]))"
_HEAD = re.compile(rf"NCCL version ({VERSION.pattern}) compiled with CUDA .{{1,40}}")
_ROW = re.compile(
    rf" *{_N} +{_N} +{_N} +[0-9]{{1,6}}(?:-[0-9]{{1,6}})? +{_N} +{_N} +(UNKNOWN|NOCOMM|INIT|RUNNING|FINALIZE|ABORT) +([A-Z]+(?:,[A-Z]+){{0,2}})"
)
_COMMUNICATOR = re.compile(rf"#{_N}-{_N} \(([0-9a-f]{{16}})\) (INCOMPLETE|ERROR|MISMATCH)")
_STATUS = {
    "UNKNOWN": "not a member", "NOCOMM": "not a member", "INIT": "init", "RUNNING": "running", "FINALIZE": "finalize", "ABORT": "abort",
}  # fmt: skip
_TROUBLES = frozenset({"INCOMPLETE", "ERROR", "MISMATCH"})
_TABLE_HEAD = "Group Comms Nodes Ranks Ranks Ranks Status Errors"
_NO_DATA = "No communicator data collected!"

_MISSING = re.compile(rf"  Missing communicator data from {_N} ranks?")
_MISSING_RANKS = re.compile(r"  The missing ranks?: ([0-9,]{1,1100})")
_UNKNOWN_RANKS = re.compile(r"  The unknown ranks: ([0-9,]{1,1100})")
_RANK = re.compile(rf"  Rank {_N}{_WHERE}")
_RANK_STATUS = re.compile(rf"  Rank {_N} has status ([A-Z]+){_WHERE}?")
_RANKS_STATUS = re.compile(rf"  {_N} ranks have status ([A-Z]+)")
_RANK_COUNT = re.compile(rf"  Rank {_N} has (?:launched up to operation {_COUNT}|not launched any operations){_WHERE}")
_RANKS_COUNT = re.compile(rf"  {_N} ranks have (?:launched up to operation {_COUNT}|not launched any operations)")
_RANK_ERROR = re.compile(rf"  Rank {_N} reported ([A-Za-z ]{{1,40}}?){_WHERE}")
_RANKS_ERROR = re.compile(rf"  {_N} ranks reported ([A-Za-z ]{{1,40}})")
_ERRORS = re.compile(rf"  (Initialization|Asynchronous) errors? on {_N} ranks?")
_COUNTS_DIFFER = re.compile(
    r"  Communicator ranks have different (collective|[A-Za-z][0-9A-Za-z]{0,31}) operation counts"
)
_STATUS_DIFFERS = "  Communicator ranks have different status"
_OTHER = re.compile(
    rf"INCOMPLETE|DEAD|TIMEOUT|  Missing communicator data from {_N} job process(?:es)?"
    rf"|  {_N} job process(?: is|es are) considered dead \(unreachable via the RAS network\)"
    rf"|  Process {_N} on node \S{{0,64}} managing GPUs? [0-9, (NVML)]{{1,600}}"
    rf"|  \[could not find information on {_N} process(?:es)?\]"
    rf"|  Encountered {_N} communication timeouts? while gathering communicator data"
)
"""
Lines about processes, not communicators: the communicators that they belong to say the same.
"""


@dataclass(slots=True)
class _Rank:
    host: str = ""
    pid: int | None = None
    cuda_device: int | None = None
    state: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    """
    What the sections say of one communicator.
    """

    id: str
    ranks: dict[int, _Rank] = field(default_factory=dict)
    unanswered: int = 0
    """Ranks that did not answer."""
    strangers: int = 0
    """Ranks that answered and know nothing of the communicator."""
    values: dict[str, set[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Context:
    """
    What the lines about ranks that follow are about: a status, a count of a type, an error of a kind.
    """

    state: str | None = None
    type: str | None = None
    count: int | None = None
    kind: str | None = None
    result: str | None = None

    def turn_to(self, *, state: str | None = None, type: str | None = None, kind: str | None = None) -> None:  # noqa: A002
        """
        Be about something else.
        """
        self.state, self.type, self.kind = state, type, kind
        self.count = self.result = None


def parse_text(text: str) -> Answer:
    """
    The answer in `text`.

    Raises:
        CutShortError: the text ends before its end.
        UnknownFormatError: it is not what is known here.
        RasError: it has too many lines.

    """
    lines = text.split("\n", MAX_LINES)
    head = _HEAD.fullmatch(lines[0])
    if not head:
        msg = f"the first line is {quoted(lines[0])}"
        raise UnknownFormatError(msg)
    version = head[1]
    if len(lines) > MAX_LINES:
        msg = f"the answer has more than {MAX_LINES} lines"
        raise RasError("too large", msg, version)
    try:
        return _parse(lines, version)
    except UnknownFormatError as error:
        raise UnknownFormatError(str(error), version) from error


def _parse(lines: list[str], version: str) -> Answer:
    if lines[-1] or "Warnings" not in lines:
        msg = f"the text ends with {quoted(next((line for line in reversed(lines) if line), ''))}"
        raise CutShortError(msg, version)
    start = next((at for at, line in enumerate(lines) if line.startswith("Communicators...")), None)
    if start is None:
        msg = "there is no heading for communicators"
        raise UnknownFormatError(msg)
    errors_at, warnings_at = _heading(lines, "Errors", start), _heading(lines, "Warnings", start)
    if warnings_at < errors_at:
        msg = "the warnings stand before the errors"
        raise UnknownFormatError(msg)
    groups = _groups(lines[start + 1 : errors_at])
    blocks: dict[tuple[int, int], _Block] = {}
    for line_range in ((errors_at + 2, warnings_at), (warnings_at + 2, len(lines))):
        _section(lines[slice(*line_range)], blocks)
    return _answer(groups, blocks, version)


def _heading(lines: list[str], name: str, start: int) -> int:
    for at in range(start, len(lines) - 1):
        if lines[at] == name and lines[at + 1] == "=" * len(name):
            return at
    msg = f"there is no heading {name}"
    raise UnknownFormatError(msg)


@dataclass(frozen=True, slots=True)
class _Group:
    communicators: int
    size: int
    status: str
    troubles: frozenset[str]


def _groups(lines: list[str]) -> dict[int, _Group]:
    groups: dict[int, _Group] = {}
    seen_head = empty = False
    for line in lines:
        words = " ".join(line.split())
        if not words or set(words) == {"="} or words == "# in group per comm per node per comm in group":
            continue
        if words == _TABLE_HEAD:
            seen_head = True
        elif words == _NO_DATA:
            empty = True
        elif seen_head and (row := _ROW.fullmatch(line.rstrip())):
            troubles = frozenset(row[7].split(",")) - {"OK"}
            if not troubles <= _TROUBLES or int(row[1]) in groups or len(groups) >= MAX_COMMUNICATORS:
                raise _unknown(line)
            groups[int(row[1])] = _Group(int(row[2]), int(row[4]), _STATUS[row[6]], troubles)
        else:
            raise _unknown(line)
    if not groups and not empty:
        msg = "there is no table of communicators"
        raise UnknownFormatError(msg)
    return groups


def _unknown(line: str) -> UnknownFormatError:
    return UnknownFormatError(f"a line is not known: {quoted(line)}")


def _section(lines: list[str], blocks: dict[tuple[int, int], _Block]) -> None:
    block: _Block | None = None
    about = _Context()
    for line in lines:
        if head := _COMMUNICATOR.fullmatch(line):
            block = blocks.setdefault((int(head[1]), int(head[2])), _Block(head[3]))
            if block.id != head[3]:
                raise _unknown(line)
            about = _Context()
        elif line and not _OTHER.fullmatch(line) and (block is None or not _detail(line, block, about)):
            raise _unknown(line)


def _detail(line: str, block: _Block, about: _Context) -> bool:
    """
    Take in a line about a communicator; False if it is not known.
    """
    return _opens(line, block, about) or _about_many(line, block, about) or _about_one(line, block, about)


def _opens(line: str, block: _Block, about: _Context) -> bool:
    if match := _MISSING.fullmatch(line):
        block.unanswered = int(match[1])
        about.turn_to(state="unresponsive")
    elif match := _MISSING_RANKS.fullmatch(line):
        _listed(match[1], block, "unresponsive")
    elif match := _COUNTS_DIFFER.fullmatch(line):
        about.turn_to(type=ALL_TYPES if match[1] == "collective" else match[1])
    elif match := _ERRORS.fullmatch(line):
        about.turn_to(kind="init" if match[1] == "Initialization" else "async")
    elif line == _STATUS_DIFFERS:
        about.turn_to()
    else:
        return False
    return True


def _about_many(line: str, block: _Block, about: _Context) -> bool:
    if match := _RANKS_STATUS.fullmatch(line):
        about.state = _STATUS.get(match[2])
        if about.state == "not a member":
            block.strangers = int(match[1])
        return about.state is not None
    if (match := _RANKS_COUNT.fullmatch(line)) and about.type is not None:
        about.count = int(match[2] or 0)
        block.values.setdefault(about.type, set()).add(about.count)
        return True
    if (match := _RANKS_ERROR.fullmatch(line)) and about.kind is not None:
        about.result = _result(match[2])
        return about.result is not None
    if match := _UNKNOWN_RANKS.fullmatch(line):
        _listed(match[1], block, "not a member")
        return True
    return False


def _about_one(line: str, block: _Block, about: _Context) -> bool:
    if match := _RANK_STATUS.fullmatch(line):
        state = _STATUS.get(match[2])
        if state == "not a member":
            block.strangers = 1
        _rank(block, match[1], match.group(3, 4, 5)).state = state
        return state is not None
    if (match := _RANK_COUNT.fullmatch(line)) and about.type is not None:
        count = int(match[2] or 0)
        block.values.setdefault(about.type, set()).add(count)
        _rank(block, match[1], match.group(3, 4, 5)).counts[about.type] = count
        return True
    if (match := _RANK_ERROR.fullmatch(line)) and about.kind is not None:
        result = _result(match[2])
        if result is not None:
            _add_error(_rank(block, match[1], match.group(3, 4, 5)), about.kind, result)
        return result is not None
    if match := _RANK.fullmatch(line):
        rank = _rank(block, match[1], match.group(2, 3, 4))
        if about.state is not None:
            rank.state = about.state
        elif about.type is not None and about.count is not None:
            rank.counts[about.type] = about.count
        elif about.kind is not None and about.result is not None:
            _add_error(rank, about.kind, about.result)
        else:
            return False
        return True
    return False


def _rank(block: _Block, number: str, where: tuple[str | None, ...]) -> _Rank:
    rank = block.ranks.setdefault(int(number), _Rank())
    device, pid, host = where
    if pid is not None:
        rank.pid, rank.host, rank.cuda_device = int(pid), host or "", int(device or 0)
    return rank


def _add_error(rank: _Rank, kind: str, result: str) -> None:
    if (kind, result) not in rank.errors:
        rank.errors.append((kind, result))


def _listed(numbers: str, block: _Block, state: str) -> None:
    for number in numbers.split(","):
        if not number.isdigit():
            raise _unknown(numbers)
        # A long list is cut in the middle of a number by NCCL, so that its last one may be no rank at all.
        block.ranks.setdefault(int(number), _Rank(state=state))


def _result(words: str) -> str | None:
    name = words.lower()
    return name if name in RESULTS.values() or name == OTHER_RESULT else None


def _answer(groups: dict[int, _Group], blocks: dict[tuple[int, int], _Block], version: str) -> Answer:
    summary: dict[tuple[str, str], int] = {}
    for group in groups.values():
        key = (group.status, _communicator(_Block(""), group, shown=False).errors)
        summary[key] = summary.get(key, 0) + group.communicators
    shown: dict[str, Communicator] = {}
    processes: set[tuple[str, int]] = set()
    budget, left_out = MAX_RANKS, 0
    for (number, _), block in blocks.items():
        if number not in groups:
            msg = f"communicator {block.id} belongs to no group"
            raise UnknownFormatError(msg)
        processes.update((rank.host, rank.pid) for rank in block.ranks.values() if rank.pid is not None)
        if len(shown) >= MAX_COMMUNICATORS or block.id in shown:
            left_out += len(block.ranks)
            continue
        fits = len(block.ranks) <= budget
        if fits:
            budget -= len(block.ranks)
        else:
            left_out += len(block.ranks)
        shown[block.id] = _communicator(block, groups[number], shown=fits)
    return Answer(version, "text", summary, tuple(shown.values()), frozenset(processes), left_out)


def _communicator(block: _Block, group: _Group, *, shown: bool) -> Communicator:
    ranges = {name: (min(values), max(values)) for name, values in block.values.items()}
    ranks = tuple(
        NcclRank(number, rank.host, rank.pid, rank.cuda_device, rank.state, rank.counts, tuple(rank.errors))
        for number, rank in sorted(block.ranks.items())
    )
    counts = tuple((rank.rank, *sorted(rank.counts.items())) for rank in ranks)
    return Communicator(
        id=block.id,
        size=group.size,
        status=group.status,
        ranks=ranks if shown else (),
        missing=block.unanswered + block.strangers,
        mismatch="MISMATCH" in group.troubles,
        incomplete="INCOMPLETE" in group.troubles,
        error="ERROR" in group.troubles,
        ranges=ranges,
        fingerprint=hash((counts, tuple(sorted(ranges.items())))) if ranges else None,
    )
