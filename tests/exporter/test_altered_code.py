"""
Copies of vLLM's own files with one thing altered, as forks and coming releases do: every probe and the fix say the right thing.

The copies are made when the test runs, from the vLLM of the lab's environment. They are read as text here and imported by
the interpreter that has vLLM, and both must say the same. What an installation does on such code is shown on the stand-in.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lookalike import Alteration, importer

from rankscope_exporter.contract import HookState, MitigationState
from rankscope_exporter.examination import RUNNERS, RunnerExamination, assess_runner, examine_runner
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.hooks.install import install
from rankscope_exporter.hooks.sources import SourceSubject, SourceTree
from rankscope_exporter.hooks.widths import Width
from rankscope_exporter.settings import WorkerSettings

UPDATE = '    def _update_states(self, scheduler_output: "SchedulerOutput") -> Callable | None:\n'
GATE = "            if not is_last_rank:\n                if not req_data.new_token_ids:\n"
TRIM = "            elif num_output_tokens < len(req_state.output_token_ids):\n"
ALONE = TRIM.replace("elif", "if")
DELETION = "                del req_state.output_token_ids[num_output_tokens:]\n"
BEHIND = "            # Update the block IDs.\n"
AVAILABLE, UNKNOWN, NOT_APPLICABLE = (
    MitigationState.AVAILABLE,
    MitigationState.UNKNOWN_CODE,
    MitigationState.NOT_APPLICABLE,
)
HANDLER_MODULE = "vllm.v1.worker.gpu.pp_utils"


@dataclass(frozen=True, slots=True)
class Case:
    """
    An altered file, and the verdicts that differ from those on the file as it is.
    """

    alteration: Alteration
    runner: str = "V1"
    hooks: dict[str, HookState] = field(default_factory=dict)
    """Hooks that are not on."""
    fix: MitigationState = AVAILABLE
    reason: str = ""
    """Part of the fix's reason."""
    widths: tuple[Width, Width] | None = None
    classified: str = ""
    """What the runner is taken for, if not for what it was."""
    in_handler: bool = False
    """Whether the handler's file is altered, not the runner's."""

    def __str__(self) -> str:
        return f"{self.runner}-{self.alteration}"


def v1(name: str, old: str, new: str, **verdicts: Any) -> Case:
    """An alteration of the V1 runner's file."""
    return Case(Alteration(name, old, new), **verdicts)


def v2(name: str, old: str, new: str, *, off: dict[str, HookState] | None = None, **verdicts: Any) -> Case:
    """An alteration of the V2 runner's file, or of its handler's; this release sends no drafts."""
    hooks = {"PPHandler.broadcast_drafts": HookState.ABSENT} | (off or {})
    widths = verdicts.pop("widths", (Width.AS_SAMPLED, Width.PADDED))
    fix = verdicts.pop("fix", NOT_APPLICABLE)
    return Case(Alteration(name, old, new), "V2", hooks=hooks, fix=fix, widths=widths, **verdicts)


ABSENT, OFF = HookState.ABSENT, HookState.OFF
CASES = [
    v1("nothing", UPDATE, UPDATE),
    v1("renamed field", "output_token_ids", "emitted_ids", fix=UNKNOWN, reason="0 trims"),
    v1("renamed count of drafts", "prev_num_draft_len", "prev_drafts", fix=UNKNOWN, reason="grow"),
    v1("extra decorator", UPDATE, "    @torch.inference_mode()\n" + UPDATE, fix=UNKNOWN, reason="decorated"),
    v1("if instead of elif", TRIM, ALONE, fix=NOT_APPLICABLE, reason="every rank already"),
    v1("second trim", BEHIND, ALONE + DELETION + BEHIND, fix=UNKNOWN, reason="2 trims"),
    v1("no trim", TRIM, "            elif num_output_tokens < 0:\n", fix=UNKNOWN, reason="0 trims"),
    v1("another gate", GATE, GATE.replace("is_last_rank", "is_tail"), fix=UNKNOWN, reason="not known: not is_tail"),
    v1("closure", UPDATE, UPDATE + "        __class__\n", fix=UNKNOWN, reason="closure"),
    v1("renamed parameter", UPDATE, UPDATE.replace("scheduler_output", "sched"), hooks={"_update_states": OFF}),
    v1("missing guard", "_is_all_reqs_chunked_prefill", "_skips", hooks={"_is_all_reqs_chunked_prefill": ABSENT}),
    v1("missing mask", "discard_request_mask", "dropped", hooks={"discard_request_mask": ABSENT}),
    v1(
        "missing sender", "def _pp_broadcast_prev_sampled", "def _pp_send_sampled",
        hooks={"_pp_broadcast_prev_sampled_token_ids": ABSENT},
    ),
    v1(
        "missing update", "_update_states(", "_refresh(",
        hooks={"_update_states": ABSENT}, fix=UNKNOWN, reason="neither V1 nor V2", classified="unknown",
    ),
    v1("async method", "    def execute_model(", "    async def execute_model(", hooks={"execute_model": OFF}),
    v2("nothing", "class PPHandler", "class PPHandler", in_handler=True),
    v2(
        "no receive", "    def receive(", "    def take(", in_handler=True,
        off={"PPHandler.receive": ABSENT}, widths=(Width.AS_SAMPLED, Width.UNKNOWN),
    ),
    v2(
        "renamed parameter", "sampled_token_ids", "tokens", in_handler=True,
        off={"PPHandler.broadcast": OFF}, widths=(Width.UNKNOWN, Width.PADDED),
    ),
    v2(
        "renamed rule", "compute_need_sampled_mask", "need_mask", in_handler=True,
        off={"compute_need_sampled_mask": ABSENT},
    ),
    v2(
        "no queue", "get_prev_sampled_outputs", "take_outputs", in_handler=True,
        off={"PPHandler.get_prev_sampled_outputs": ABSENT},
    ),
    v2("another sender", ".contiguous()", ".clone()", in_handler=True, widths=(Width.UNKNOWN, Width.PADDED)),
    v2("renamed state", "req_states", "states", fix=UNKNOWN, classified="unknown", reason="neither V1 nor V2"),
    v2("missing update", "def update_requests", "def refresh", off={"update_requests": ABSENT}),
    v2("update of before", "update_requests", "update_states"),
    v2("extra decorator", "    def update_requests", "    @torch.inference_mode()\n    def update_requests"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lab:
    """
    The lab's interpreter and the vLLM that it has.
    """

    python: Path
    packages: Path

    def read(self, module: str) -> str | None:
        """The text of one of vLLM's modules."""
        path = self.packages / (module.replace(".", "/") + ".py")
        return path.read_text(encoding="utf-8") if path.exists() else None


@pytest.fixture(scope="module")
def lab() -> Lab:
    """The lab's environment."""
    environment = pytest.importorskip(
        "rankscope_lab.environment", reason="the lab is not installed here: run `make setup`"
    ).default(os.environ)
    found = [*environment.directory.glob("lib/python*/site-packages/vllm")]
    if not environment.ready() or not found:
        pytest.skip(f"no vLLM in {environment.directory}: run `make lab-setup`")
    return Lab(environment.python, found[0].parent)


@dataclass(frozen=True, slots=True)
class Copy:
    """
    An altered copy: the texts of its modules by name, and the module of the runner.
    """

    texts: dict[str, str]
    module: str
    class_name: str


@pytest.fixture(scope="module")
def copies(lab: Lab) -> list[Copy]:
    """A copy for each case."""
    made = []
    for number, case in enumerate(CASES):
        module, class_name = RUNNERS[case.runner]
        text, handler = lab.read(module), lab.read(HANDLER_MODULE)
        assert text is not None
        assert handler is not None
        package = module.rpartition(".")[0]
        text = text.replace("\nfrom .", f"\nfrom {package}.")
        names = f"altered_{number}", f"altered_{number}_handler"
        if case.in_handler:
            handler = case.alteration.apply(handler)
        else:
            text = case.alteration.apply(text)
        made.append(Copy({names[0]: text.replace(HANDLER_MODULE, names[1]), names[1]: handler}, names[0], class_name))
    return made


@pytest.fixture(scope="module")
def from_text(lab: Lab, copies: list[Copy]) -> list[RunnerExamination]:
    """What is said of each copy as text."""

    def reader(texts: dict[str, str]) -> Callable[[str], str | None]:
        return lambda name: texts[name] if name in texts else lab.read(name)

    return [
        examine_runner(SourceSubject(SourceTree(reader(copy.texts)), copy.module, copy.class_name), copy.class_name)
        for copy in copies
    ]


IMPORT = """
import importlib, json, sys
from rankscope_exporter.examination import examine_runner
from rankscope_exporter.hooks.subjects import ClassSubject

sys.path.insert(0, sys.argv[1])
found = []
for module, class_name in json.loads(sys.argv[2]):
    loaded = getattr(importlib.import_module(module), class_name)
    found.append(examine_runner(ClassSubject(loaded), class_name).model_dump(mode="json"))
with open(sys.argv[3], "w") as file:
    json.dump(found, file)
"""


@pytest.mark.vllm
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_an_altered_copy_gets_the_right_verdicts(number, from_text):
    """Hooks that still fit are on, each other one says why not, the fix is available only where its code is as known, and nothing unknown is silent."""
    case, found = CASES[number], from_text[number]
    assert {report.hook: report.state for report in found.hooks if report.state != HookState.ON} == case.hooks
    assert all(report.reason for report in found.hooks if report.state != HookState.ON)
    [fix] = found.mitigations
    assert fix.state == case.fix
    assert case.reason in fix.reason
    assert (found.width and (found.width.sender, found.width.receiver)) == case.widths
    assert found.runner == (case.classified or case.runner)
    harmless = {"PPHandler.broadcast_drafts", "_is_all_reqs_chunked_prefill"}
    unknown = (
        set(case.hooks) - harmless or case.fix == UNKNOWN or case.classified or Width.UNKNOWN in (case.widths or ())
    )
    assert bool(assess_runner(found)) == bool(unknown)


@pytest.mark.vllm
@pytest.mark.timeout(600)  # imports vLLM, and a copy of its largest module for each case
def test_the_imported_copies_are_judged_like_their_text(lab, copies, from_text, tmp_path):
    """Every altered copy, imported by the interpreter that has vLLM, gets the verdicts and reasons of its text."""
    for copy in copies:
        for name, text in copy.texts.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    answer = tmp_path / "answer.json"
    wanted = json.dumps([(copy.module, copy.class_name) for copy in copies])
    done = subprocess.run(
        [lab.python, "-c", IMPORT, str(tmp_path), wanted, str(answer)],
        env=os.environ | {"RANKSCOPE_ENABLED": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    imported = [RunnerExamination.model_validate(each) for each in json.loads(answer.read_text())]
    assert {str(case): each for case, each in zip(CASES, imported, strict=True)} == {
        str(case): each for case, each in zip(CASES, from_text, strict=True)
    }


@pytest.mark.parametrize(
    ("alteration", "sees_lengths"),
    [
        (Alteration("renamed field", "output_token_ids", "emitted_ids"), False),
        (
            Alteration(
                "second trim",
                "        for i, req_id",
                "        for state in ():\n            if 1 < len(state.output_token_ids):\n"
                "                del state.output_token_ids[1:]\n        for i, req_id",
            ),
            True,
        ),
        (Alteration("another gate", "if not is_last_rank:", "if not is_last_rank is True:"), True),
        (Alteration("extra decorator", "    def _update_states", "    @(lambda f: f)\n    def _update_states"), True),
    ],
    ids=str,
)
def test_an_installation_on_unknown_code_sees_what_can_be_seen(alteration, sees_lengths, tmp_path):
    """Steps and guard are recorded, lengths where they can be read; the fix stays off though the settings want it, and the host never notices."""
    text = (Path(__file__).parents[1] / "support" / "standin.py").read_text(encoding="utf-8")
    standin = importer(tmp_path)(alteration.apply(text))
    runner = standin.StandInRunner()
    code = standin.StandInRunner._update_states.__code__
    scheduled = standin.schedule(runner)
    installation = install(runner, standin.identity(), WorkerSettings(flight_dir=tmp_path / "flight", trim_fix="on"))
    for _ in range(3):
        standin.take_step(runner, scheduled)
    assert installation.fix_report.state == MitigationState.UNKNOWN_CODE
    assert installation.fix_report.reason
    assert standin.StandInRunner._update_states.__code__ is code
    assert all(report.state == HookState.ON for report in installation.hooks.values())
    assert installation.flight is not None
    with FlightFile(installation.flight.path) as flight:
        records = flight.records()
    assert [int(step) for step in records["step"]] == [1, 2, 3]
    assert set(records["broadcasts_total"]) == {1, 2, 3}
    assert bool(installation.faults.total) != sees_lengths
    assert set(records["state_sum"] > 0) == {sees_lengths}
