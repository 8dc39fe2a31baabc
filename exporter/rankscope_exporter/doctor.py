"""
What the installed vLLM looks like to every hook, and whether the trim fix is available: known before anything is started.

The same probes that a worker uses run here on the classes of vLLM's model runners; nothing is patched and no device is
touched.
"""

import importlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rankscope_exporter import __version__
from rankscope_exporter.contract.http import HookReport
from rankscope_exporter.contract.words import HookState
from rankscope_exporter.examination import (
    RUNNERS,
    SELECTION,
    RunnerExamination,
    assess_reports,
    assess_runner,
    examine_runner,
)
from rankscope_exporter.hooks import targets
from rankscope_exporter.hooks.subjects import ClassSubject
from rankscope_exporter.identity import read_vllm_version
from rankscope_exporter.plugin import is_off
from rankscope_exporter.settings import WorkerSettings

WORKER_MODULE, WORKER_CLASS = "vllm.v1.worker.worker_base", "WorkerWrapperBase"
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "rankscope"


class Examination(BaseModel):
    """
    What was found; `problems` is empty if every rank can be seen. Each problem names its remedy.
    """

    exporter_version: str
    vllm_version: str
    python: str
    hooks: list[HookReport]
    """What finds the ranks; the hooks on a runner stand with it."""
    runners: list[RunnerExamination]
    """The model runners that this vLLM has."""
    selection: str
    """Which of them runs."""
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
    runners: list[RunnerExamination] = []
    try:
        worker = getattr(importlib.import_module(WORKER_MODULE), WORKER_CLASS)
        for name, (module, class_name) in RUNNERS.items():
            loaded = _import_runner(module)
            runner_class = getattr(loaded, class_name, None)
            if isinstance(runner_class, type):
                runners.append(examine_runner(ClassSubject(runner_class), f"{module}.{class_name}"))
            elif loaded is not None:
                problems.append(f"{name} runner: unknown code, {module} has no class {class_name}: its ranks are blind")
    except ModuleNotFoundError as error:
        installed = (
            "is not installed here" if error.name and error.name.split(".")[0] == "vllm" else "cannot be imported"
        )
        problems.append(f"vLLM {installed} ({error}): run this with the Python that runs vLLM")
    except Exception as error:  # noqa: BLE001  whatever an import may raise is the finding
        problems.append(f"vLLM cannot be imported ({type(error).__name__}: {error}): run this where vLLM runs")
    else:
        hooks = [_probe_worker(worker)]
        problems += assess_reports(hooks, [])
        problems += [problem for runner in runners for problem in assess_runner(runner)]
        if not runners:
            problems.append("this vLLM has none of the model runners that Rankscope knows: every rank is blind")
    flight_dir, problem = _flight_dir()
    problems += [problem] if problem else []
    return Examination(
        exporter_version=__version__,
        vllm_version=read_vllm_version(),
        python=sys.version.split()[0],
        hooks=hooks,
        runners=runners,
        selection=SELECTION,
        flight_dir=flight_dir,
        problems=problems,
    )


def _import_runner(module: str) -> types.ModuleType | None:
    """
    A runner's module; None in a release that does not have it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name != "vllm" and f"{module}.".startswith(f"{error.name}."):
            return None
        raise


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
    lines += [*_table("hooks", found.hooks), ""] if found.hooks else []
    for runner in found.runners:
        lines += _table(f"hooks on the {runner.runner} runner, {runner.runner_class}", runner.hooks)
        if runner.width is not None:
            differ = "; these differ in a step without drafts while speculation is on" if runner.width.differs else ""
            lines += [
                f"  tokens per request: the sender posts {runner.width.sender.value}, the receiver {runner.width.receiver.value}{differ}"
            ]
        for report in runner.mitigations:
            why = f" ({report.reason})" if report.reason else ""
            lines += [f"  {report.mitigation} fix: {report.state.label}{why}"]
        lines += [""]
    lines += [found.selection, ""] if found.runners else []
    lines += [f"flight directory {found.flight_dir}", ""]
    lines += (
        ["Everything can be seen."]
        if found.healthy
        else ["Problems:", *(f"  - {problem}" for problem in found.problems)]
    )
    return "\n".join(lines) + "\n"


def _table(title: str, reports: list[HookReport]) -> list[str]:
    width = max((len(report.hook) for report in reports), default=0)
    return [
        title,
        *(f"  {report.hook:<{width}}  {report.state.value:<7} {report.reason}".rstrip() for report in reports),
    ]
