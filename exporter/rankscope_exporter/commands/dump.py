"""
`rankscope-exporter dump`: what flight files hold, for people and for scripts.
"""

import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from rankscope_exporter.commands.align import Alignment, align
from rankscope_exporter.commands.columns import ALIGNED, COLUMNS, telling_columns
from rankscope_exporter.commands.facts import FIELDS, Facts, step_facts
from rankscope_exporter.commands.header import header_facts, header_lines
from rankscope_exporter.commands.ranks import RankFlight, find_files, open_rank
from rankscope_exporter.commands.text import clock_text, moment_text, printable, table_lines
from rankscope_exporter.flight import FlightError
from rankscope_exporter.flight.areas import RequestTableRow

SHOWN = 40
"""
Newest steps that a table shows unless it is told otherwise.
"""
AROUND = 8
"""
Steps shown before the first difference, where that is not among the newest ones.
"""
WELL, NOT_WELL, DIFFERENT = 0, 1, 3
"""
Exit codes: all was read; something could not be read; ranks differ (`--align`).
"""

_WHOSE = ("file", "engine", "rank")
_STEP_FIELDS = (*FIELDS, "begin_unix")
_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(RequestTableRow))


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """
    What to show, and how: `form` is `table`, `json` or `csv`.
    """

    form: str = "table"
    after: int | None = None
    last: int | None = None
    header: bool = False
    requests: bool = False
    align: bool = False


def dump(places: Sequence[Path], options: DumpOptions, out: TextIO, complain: Callable[[str], None]) -> int:
    """
    Write what the flight files at `places` hold to `out`; the exit code.
    """
    paths, problems = find_files(places)
    with ExitStack() as stack:
        ranks = []
        for path in paths:
            try:
                rank = open_rank(path)
            except FlightError as error:
                problems.append(str(error))
                continue
            stack.callback(rank.flight.close)
            ranks.append(rank)
        for problem in problems:
            complain(printable(problem))
        code = NOT_WELL if problems else WELL
        if options.align:
            return max(code, _dump_aligned(ranks, options, out, complain))
        if options.form == "csv":
            _csv(out, [*_WHOSE, *(_REQUEST_FIELDS if options.requests else _STEP_FIELDS)])
        for number, rank in enumerate(ranks):
            if number and options.form == "table":
                out.write("\n")
            try:
                _dump_one(rank, options, out)
            except FlightError as error:
                complain(printable(str(error)))
                code = NOT_WELL
    return code


def _dump_one(rank: RankFlight, options: DumpOptions, out: TextIO) -> None:
    if options.form == "table":
        _write_lines(out, [title(rank)])
    if options.header:
        facts = header_facts(rank)
        _write_lines(out, header_lines(facts) if options.form == "table" else [_json(facts)])
    if options.requests:
        _dump_requests(rank, options, out)
    if not options.header and not options.requests:
        _dump_steps(rank, options, out)


def title(rank: RankFlight) -> str:
    """
    One line that says whose file this is, and how far the rank came.
    """
    flight, identity = rank.flight, rank.identity
    if identity is None:
        whose = "identity damaged"
    else:
        sizes = f"pp {identity.pp_rank}/{identity.pp_size} tp {identity.tp_rank}/{identity.tp_size} dp {identity.dp_rank}/{identity.dp_size}"
        whose = f"engine {identity.engine}, {sizes}, {identity.model}, vLLM {identity.vllm_version} {identity.runner}, on {identity.host}"
    step = flight.step()
    newest = flight.records(after=max(step - 1, 0))
    phase = f", {step_facts(newest[-1])['phase']}" if len(newest) else ""
    how_far = f"last step {step}{phase}" if step else "no step yet"
    return printable(
        f"{flight.path.name}: {whose}, pid {flight.pid}, since {moment_text(flight.created_unix)}; {how_far}"
    )


def chosen(records: npt.NDArray[np.void], options: DumpOptions) -> npt.NDArray[np.void]:
    """
    Of all records of a rank, those that are asked for. A table with nothing asked for shows the newest ones.
    """
    if options.after is not None:
        records = records[records["step"] > options.after]
    last = options.last
    if last is None and options.after is None and options.form == "table":
        last = SHOWN
    return records if last is None else records[len(records) - min(last, len(records)) :]


def facts_of(rank: RankFlight, records: npt.NDArray[np.void]) -> list[Facts]:
    """
    The facts of records, with the wall-clock time at which each step began.
    """
    flight = rank.flight
    return [step_facts(record) | {"begin": clock_text(flight.wall_time(int(record["begin_ns"])))} for record in records]


def _dump_steps(rank: RankFlight, options: DumpOptions, out: TextIO) -> None:
    held = rank.flight.records()
    records = chosen(held, options)
    if options.form != "table":
        _dump_step_rows(rank, records, options, out)
        return
    if not len(held):
        _write_lines(out, ["no steps"])
        return
    if not len(records):
        _write_lines(out, [f"no steps among those asked for; the file holds {held['step'][0]} to {held['step'][-1]}"])
        return
    steps = facts_of(rank, records)
    columns = telling_columns(steps)
    rows = [[column.value(facts) for column in columns] for facts in steps]
    _write_lines(out, table_lines([column.title for column in columns], rows))
    if len(records) < len(held):
        shown = f"{len(records)} of {len(held)} steps, {held['step'][0]} to {held['step'][-1]}"
        _write_lines(out, [f"{shown}; --last N and --after STEP choose others"])


def _dump_step_rows(rank: RankFlight, records: npt.NDArray[np.void], options: DumpOptions, out: TextIO) -> None:
    whose = _whose(rank)
    for record in records:
        row = whose | step_facts(record) | {"begin_unix": rank.flight.wall_time(int(record["begin_ns"]))}
        if options.form == "csv":
            _csv(out, [row[name] for name in (*_WHOSE, *_STEP_FIELDS)])
        else:
            _write_lines(out, [_json({"kind": "step"} | row)])


def _whose(rank: RankFlight) -> Facts:
    return dict(zip(_WHOSE, (rank.flight.path.name, rank.engine, rank.rank), strict=True))


def _dump_requests(rank: RankFlight, options: DumpOptions, out: TextIO) -> None:
    drifting, rows = rank.flight.requests()
    whose = _whose(rank)
    if options.form == "table":
        _write_lines(out, [f"{drifting} requests drift" + (f", the worst {len(rows)}:" if rows else "")])
        if rows:
            _write_lines(out, table_lines(_REQUEST_FIELDS, [dataclasses.astuple(row) for row in rows]))
        return
    for row in rows:
        if options.form == "csv":
            _csv(out, [*whose.values(), *dataclasses.astuple(row)])
        else:
            _write_lines(out, [_json({"kind": "request"} | whose | dataclasses.asdict(row))])


def _dump_aligned(ranks: list[RankFlight], options: DumpOptions, out: TextIO, complain: Callable[[str], None]) -> int:
    problem = refusal(ranks)
    if problem is not None:
        complain(f"--align: {problem}")
        return NOT_WELL
    held = [rank.flight.records() for rank in ranks]
    alignment = align(held)
    if not alignment.shared:
        spans = ", ".join(f"{r.rank} {h['step'][0]} to {h['step'][-1]}" if len(h) else f"{r.rank} none" for r, h in zip(ranks, held, strict=True))  # fmt: skip
        complain(f"--align: no two ranks hold the same step, so nothing can be compared: {spans}")
        return NOT_WELL
    indexes = shown_indexes(alignment, options)
    cells = [
        [facts_of(rank, records[row[i] : row[i] + 1])[0] if row[i] >= 0 else None for i in indexes]
        for rank, records, row in zip(ranks, held, alignment.rows, strict=True)
    ]
    if options.form == "json":
        for n, i in enumerate(indexes):
            of_rank = {rank.rank: own[n] for rank, own in zip(ranks, cells, strict=True)}
            _write_lines(out, [_json({"kind": "aligned", "step": int(alignment.steps[i]), "differs": alignment.differences(i), "ranks": of_rank})])  # fmt: skip
    else:
        _write_lines(out, [*(title(rank) for rank in ranks), ""])
        _write_lines(out, _aligned_table(ranks, alignment, indexes, cells))
        _write_lines(out, [verdict(ranks, held, alignment)])
    return WELL if alignment.first is None else DIFFERENT


def refusal(ranks: Sequence[RankFlight]) -> str | None:
    """
    Why these files cannot be aligned; None if they can be.
    """
    if len(ranks) < 2:
        return "needs the files of at least two ranks"
    if damaged := [rank.flight.path.name for rank in ranks if rank.identity is None]:
        return f"whose file this is is unknown, as its identity is damaged: {', '.join(damaged)}"
    engines = sorted({rank.engine for rank in ranks})
    if len(engines) > 1:
        return f"files of {len(engines)} engines, whose steps have nothing to do with each other: {', '.join(engines)}; give those of one"
    names = [rank.rank for rank in ranks]
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"several files of {', '.join(twice)}; give one of each rank" if twice else None


def shown_indexes(alignment: Alignment, options: DumpOptions) -> list[int]:
    """
    Which of the aligned steps are shown: those asked for, or else those around the first difference, or else the newest.
    """
    steps = alignment.steps
    indexes = np.arange(len(steps))
    if options.after is not None:
        indexes = indexes[steps > options.after]
    last = options.last
    if last is None and options.after is None and options.form == "table":
        last = SHOWN
        if alignment.first is not None and alignment.first < len(steps) - SHOWN:
            begin = max(alignment.first - AROUND, 0)
            return [int(i) for i in indexes[begin : begin + SHOWN]]
    chosen_indexes = indexes if last is None else indexes[len(indexes) - min(last, len(indexes)) :]
    return [int(i) for i in chosen_indexes]


def _aligned_table(
    ranks: Sequence[RankFlight], alignment: Alignment, indexes: Sequence[int], cells: Sequence[Sequence[Facts | None]]
) -> list[str]:
    columns = [column for column in COLUMNS if column.title in ALIGNED]
    titles: list[str] = ["", "step"]
    values: list[list[Any]] = [
        [">" if i == alignment.first else "!" if alignment.differences(i) else "" for i in indexes],
        [int(alignment.steps[i]) for i in indexes],
    ]
    for column in columns:
        of_ranks = [[None if facts is None else column.value(facts) for facts in own] for own in cells]
        # Side by side only what differs is worth the room, besides phase and guard.
        if column.always or any(len(set(values_of_step)) > 1 for values_of_step in zip(*of_ranks, strict=True)):
            titles += [f"{rank.rank} {column.title}" for rank in ranks]
            values += of_ranks
    titles.append("differs in")
    values.append([", ".join(alignment.differences(i)) for i in indexes])
    return table_lines(titles, list(zip(*values, strict=True)))


def verdict(ranks: Sequence[RankFlight], held: Sequence[npt.NDArray[np.void]], alignment: Alignment) -> str:
    """
    One line: the first step in which two ranks differ, and in what, or that there is none among those compared.
    """
    if alignment.first is None:
        return f"no difference in the {alignment.shared} steps that at least two ranks hold"
    index = alignment.first
    what = alignment.differences(index)
    said = []
    for rank, records, row in zip(ranks, held, alignment.rows, strict=True):
        if row[index] >= 0:
            facts = step_facts(records[row[index]])
            names = {"batch": "batch_hash", "mask": "mask_hash"}
            told = ", ".join(f"{name} {facts[names.get(name, name)]}" for name in what)
            said.append(f"{rank.rank}: {told}" + (f" ({facts['masked']} masked)" if "mask" in what else ""))
    return f"first difference at step {alignment.steps[index]}: {', '.join(what)}; " + "; ".join(said)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _csv(out: TextIO, row: Sequence[object]) -> None:
    csv.writer(out, lineterminator="\n").writerow(row)


def _write_lines(out: TextIO, lines: Sequence[str]) -> None:
    out.writelines(f"{line}\n" for line in lines)
