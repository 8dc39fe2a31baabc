"""
A case: what happened to an engine, made from the description of a public report with data of our own, and the verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_engine import BOOT_NS, SECOND_NODE_NS, CaseEngine, RankTape, Shape

from rankscope_exporter.contract import RankLife
from rankscope_exporter.flight import compose_flight
from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.model import FindingKind
from rankscope_server.incidents.manifest import MANIFEST_NAME, CaptureClock, CaptureManifest, CaptureRank

BOOTED_UNIX = 1_790_000_000.0
"""Wall-clock second at which the first steps begin."""

V1_HOOKS = (
    "execute_model",
    "_update_states",
    "_is_all_reqs_chunked_prefill",
    "_pp_broadcast_prev_sampled_token_ids",
    "_pp_receive_prev_sampled_token_ids_to_input_batch",
    "sample_tokens",
)
V2_HOOKS = ("execute_model", "update_requests", "PPHandler.receive", "PPHandler.broadcast", "compute_need_sampled_mask")


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What must be found: a kind, the first step at which it was so, and the ranks concerned.
    """

    kind: FindingKind
    step: int | None
    ranks: tuple[str, ...]
    """Labels, in order; empty where it does not matter which."""


@dataclass(frozen=True, slots=True)
class Made:
    """
    The data of a case, and the verdict that it must get: whatever is neither in `verdicts` nor in `along` must not be found.
    """

    shape: Shape
    tapes: list[RankTape]
    verdicts: tuple[Verdict, ...] = ()
    along: tuple[FindingKind, ...] = ()
    """What may be found beside, as it follows from what happened."""
    waited_seconds: float | None = 30.0
    """Between the last thing that a rank did and the copy; None where the copy does not say when it was made."""


@dataclass(frozen=True, slots=True)
class Case:
    """
    One row of the table.
    """

    name: str
    happened: str
    """What happened, in a sentence."""
    reports: tuple[str, ...]
    """Public reports that it was made from; empty for what only must not be mistaken for a fault."""
    make: Callable[[], Made | list[Made]]
    """One engine, or several."""


def ran(steps: int, shape: Shape) -> tuple[CaseEngine, list[RankTape]]:
    """
    An engine that took so many steps, and what its ranks recorded.
    """
    engine = CaseEngine(shape).run(steps)
    return engine, engine.tapes()


def make_case(case: Case) -> list[Made]:
    """
    The engines of a case.
    """
    made = case.make()
    return [made] if isinstance(made, Made) else made


def write_case(case: Case, engines: Sequence[Made], directory: Path) -> Path:
    """
    Write the flight files of a case, and what the copy says of itself, into a folder of its name.
    """
    folder = directory / case.name
    folder.mkdir(parents=True)
    for number, engine in enumerate(engines):
        _write_engine(engine, f"{case.name}-{number}", folder)
    return folder


def _write_engine(made: Made, name: str, folder: Path) -> None:
    last = max(_last_ns(tape) for tape in made.tapes)
    ranks = []
    for tape in made.tapes:
        node = _node(made.shape, tape)
        key = f"{name}-dp{made.shape.dp_rank}-pp{tape.pp_rank}-tp{tape.tp_rank}"
        (folder / f"{key}.flight").write_bytes(_compose(made.shape, tape, name, node))
        if made.waited_seconds is not None:
            ranks.append(_captured(tape, made, key, last + round(made.waited_seconds * 1e9), node))
    if ranks:
        _write_manifest(folder / MANIFEST_NAME, name, ranks)


def _node(shape: Shape, tape: RankTape) -> int:
    """
    0 for the first node, 1 for the second one: engines of more than two stages have their later half there.
    """
    return int(shape.pp_size > 2 and tape.pp_rank >= shape.pp_size // 2)


def _last_ns(tape: RankTape) -> int:
    if len(tape.records) == 0:
        return BOOT_NS
    return max(int(tape.records[field].max()) for field in ("begin_ns", "decide_ns", "end_ns"))


def _compose(shape: Shape, tape: RankTape, name: str, node: int) -> bytes:
    hooks = V2_HOOKS if shape.runner == "V2" else V1_HOOKS
    on = [{"hook": hook, "state": "on", "reason": ""} for hook in hooks]
    report = {
        "hooks": on if tape.hooks is None else tape.hooks,
        "mitigations": [{"mitigation": "trim", "state": int(tape.trim), "reason": tape.trim_reason}],
        "failure": tape.failure,
    }
    records, device = tape.records.copy(), tape.device
    for field in ("begin_ns", "decide_ns", "end_ns"):
        records[field][records[field] > 0] += node * SECOND_NODE_NS
    if device is not None:
        device = device | {"taken_ns": device["taken_ns"] + node * SECOND_NODE_NS}
    return compose_flight(
        _identity(shape, tape, name, node) | tape.identity, report, records,
        created_unix=BOOTED_UNIX - 5, created_monotonic_ns=BOOT_NS - 5_000_000_000 + node * SECOND_NODE_NS,
        pid=5000 + tape.pp_rank * shape.tp_size + tape.tp_rank, table=tape.table, drifting=len(tape.table), device=device,
    )  # fmt: skip


def _identity(shape: Shape, tape: RankTape, name: str, node: int) -> dict[str, Any]:
    number = tape.pp_rank * shape.tp_size + tape.tp_rank
    return {
        "engine": name, "dp_rank": shape.dp_rank, "pp_rank": tape.pp_rank, "tp_rank": tape.tp_rank, "pp_size": shape.pp_size,
        "tp_size": shape.tp_size, "dp_size": shape.dp_size, "global_rank": number, "host": f"node-{'ab'[node]}", "pid": 5000 + number,
        "model": "made/model", "vllm_version": shape.vllm_version, "runner": shape.runner, "runner_class": "GPUModelRunner", "device": "cuda",
        "async_scheduling": shape.async_scheduling, "spec_method": "eagle3" if shape.draft_tokens else None,
        "spec_tokens": shape.draft_tokens, "exporter_version": "0.1.0",
    }  # fmt: skip


def _captured(tape: RankTape, made: Made, key: str, taken_ns: int, node: int) -> CaptureRank:
    return CaptureRank(
        file=f"{key}.flight",
        key=key,
        label=f"pp{tape.pp_rank}",
        dp_rank=made.shape.dp_rank,
        pp_rank=tape.pp_rank,
        tp_rank=tape.tp_rank,
        life=tape.life,
        clock=CaptureClock(
            monotonic_ns=taken_ns + node * SECOND_NODE_NS, unix=BOOTED_UNIX + (taken_ns - BOOT_NS) / 1e9
        ),
        age_seconds=0.0,
        exporter=f"http://node-{'ab'[node]}:9610",
        first_step=int(tape.records["step"][0]) if len(tape.records) else 0,
        last_step=tape.last_step,
    )


def _write_manifest(path: Path, name: str, ranks: Sequence[CaptureRank]) -> None:
    """
    Write what the copy says of itself; engines of one case share a folder, so what is there is added to.
    """
    known = CaptureManifest.model_validate_json(path.read_bytes()).ranks if path.exists() else ()
    manifest = CaptureManifest(
        format=1,
        deployment="cases",
        engine=name,
        incident="i-made",
        life=IncidentLife.OPEN,
        captured_unix=max(rank.clock.unix for rank in (*known, *ranks)),
        sentence="",
        ranks=(*known, *ranks),
        missing_ranks=0,
        missing_exporters=(),
        findings=(),
    )
    path.write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


def gone(tape: RankTape) -> None:
    """
    Its process is gone when the copy is made.
    """
    tape.life = RankLife.GONE
