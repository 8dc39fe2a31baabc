"""
What the installed vLLM looks like to every hook, and whether the trim fix is available: known before anything is started.

The same probes that a worker uses run here on vLLM's runner class; nothing is patched and no device is touched.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rankscope_exporter import __version__
from rankscope_exporter.contract.http import HookReport, MitigationReport
from rankscope_exporter.contract.words import HookState, MitigationState
from rankscope_exporter.hooks import targets
from rankscope_exporter.identity import read_vllm_version
from rankscope_exporter.mitigations import trim
from rankscope_exporter.plugin import is_off
from rankscope_exporter.settings import WorkerSettings

RUNNER_MODULE, RUNNER_CLASS = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
WORKER_MODULE, WORKER_CLASS = "vllm.v1.worker.worker_base", "WorkerWrapperBase"
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "rankscope"


class Examination(BaseModel):
    """
    What was found; `problems` is empty if every rank can be seen. Each problem names its remedy.
    """

    exporter_version: str
    vllm_version: str
    python: str
    runner_class: str
    hooks: list[HookReport]
    mitigations: list[MitigationReport]
    flight_dir: str
    problems: list[str]

    @property
    def healthy(self) -> bool:
        """
        Whether nothing is in the way.
        """
        return not self.problems


def examine(*, as_json: bool, write: Callable[[str], Any] = sys.stdout.write) -> int:
    """
    Examine this environment and tell; 0 if everything can be seen, 1 if not.
    """
    found = examine_environment(os.environ)
    write(found.model_dump_json(indent=2) + "\n" if as_json else render(found))
    return 0 if found.healthy else 1


def examine_environment(environment: Mapping[str, str]) -> Examination:
    """
    Everything that stands between this environment and a rank that can be seen.
    """
    problems = [*_plugin_problems(environment)]
    hooks: list[HookReport] = []
    mitigations: list[MitigationReport] = []
    runner = f"{RUNNER_MODULE}.{RUNNER_CLASS}"
    try:
        owner = getattr(importlib.import_module(RUNNER_MODULE), RUNNER_CLASS)
        worker = getattr(importlib.import_module(WORKER_MODULE), WORKER_CLASS)
    except ModuleNotFoundError as error:
        installed = (
            "is not installed here" if error.name and error.name.split(".")[0] == "vllm" else "cannot be imported"
        )
        problems.append(f"vLLM {installed} ({error}): run this with the Python that runs vLLM")
    except Exception as error:  # noqa: BLE001  whatever an import may raise is the finding
        problems.append(f"vLLM cannot be imported ({type(error).__name__}: {error}): run this where vLLM runs")
    else:
        hooks = [
            _probe_worker(worker),
            *(targets.probe(owner, point) for point in targets.HOOK_POINTS),
            targets.probe_mask(owner),
        ]
        mitigations = [_examine_fix(owner)]
        problems += assess_reports(hooks, mitigations)
    flight_dir, problem = _flight_dir()
    problems += [problem] if problem else []
    return Examination(
        exporter_version=__version__,
        vllm_version=read_vllm_version(),
        python=sys.version.split()[0],
        runner_class=runner,
        hooks=hooks,
        mitigations=mitigations,
        flight_dir=flight_dir,
        problems=problems,
    )


def assess_reports(hooks: list[HookReport], mitigations: list[MitigationReport]) -> list[str]:
    """
    What is missing, in words: hooks that see nothing without a good reason, and a fix that does not know the code.
    """
    optional = {point.method for point in targets.HOOK_POINTS if point.optional}
    problems = [
        f"hook {report.hook} is {report.state.value}: {report.reason}"
        for report in hooks
        if report.state != HookState.ON and not (report.state == HookState.ABSENT and report.hook in optional)
    ]
    problems += [
        f"{report.mitigation} fix: {report.state.label} ({report.reason}); it stays off"
        for report in mitigations
        if report.state == MitigationState.UNKNOWN_CODE
    ]
    return problems


def _plugin_problems(environment: Mapping[str, str]) -> list[str]:
    problems = []
    if is_off(environment):
        problems.append("RANKSCOPE_ENABLED turns Rankscope off: unset it")
    if PLUGIN_NAME not in {point.name for point in metadata.entry_points(group=PLUGIN_GROUP)}:
        problems.append(
            f"no plugin {PLUGIN_NAME} among {PLUGIN_GROUP}: install rankscope-exporter into vLLM's environment with pip"
        )
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed} leaves {PLUGIN_NAME} out: add it, or unset VLLM_PLUGINS")
    return problems


def _probe_worker(worker: Any) -> HookReport:
    if callable(getattr(worker, targets.RANK_HOOK, None)):
        return HookReport(hook=targets.RANK_HOOK, state=HookState.ON)
    return HookReport(
        hook=targets.RANK_HOOK,
        state=HookState.ABSENT,
        reason=f"{WORKER_CLASS} has no such method: no rank can be found",
    )


def _examine_fix(owner: Any) -> MitigationReport:
    method = getattr(owner, "_update_states", None)
    if method is None:
        return MitigationReport(
            mitigation=trim.NAME, state=MitigationState.UNKNOWN_CODE, reason="there is no _update_states"
        )
    fix = trim.TrimFix(method)
    return MitigationReport(mitigation=trim.NAME, state=fix.state, reason=fix.reason)


def _flight_dir() -> tuple[str, str]:
    """
    The flight directory, and why it cannot be used; empty if it can.
    """
    try:
        directory = Path(WorkerSettings().flight_dir)
    except ValidationError as error:
        first = error.errors()[0]
        return "unknown", f"RANKSCOPE_{str(first['loc'][0]).upper()} is not valid: {first['msg']}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return (
            str(directory),
            f"flight directory {directory}: {error.strerror}; make it writable for vLLM's user, or set RANKSCOPE_FLIGHT_DIR",
        )
    return str(directory), ""


def render(found: Examination) -> str:
    """
    An examination for a person to read.
    """
    lines = [f"rankscope-exporter {found.exporter_version}, vLLM {found.vllm_version}, Python {found.python}", ""]
    if found.hooks:
        width = max(len(report.hook) for report in found.hooks)
        lines += [f"hooks on {found.runner_class}"]
        lines += [
            f"  {report.hook:<{width}}  {report.state.value:<7} {report.reason}".rstrip() for report in found.hooks
        ]
        lines += ["", "mitigations"]
        lines += [
            f"  {report.mitigation:<{width}}  {report.state.label} {report.reason}".rstrip()
            for report in found.mitigations
        ]
        lines += [""]
    lines += [f"flight directory {found.flight_dir}", ""]
    lines += (
        ["Everything can be seen."]
        if found.healthy
        else ["Problems:", *(f"  - {problem}" for problem in found.problems)]
    )
    return "\n".join(lines) + "\n"
