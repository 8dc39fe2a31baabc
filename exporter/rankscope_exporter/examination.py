"""
What the probes and the trim fix say of one model runner before it runs: of its class, or of its source text.

`rankscope-exporter doctor` examines classes and the version matrix examines text, both here, so that both say the same
of the same code.
"""

from collections.abc import Iterable

from pydantic import BaseModel

from rankscope_exporter.contract.http import HookReport, MitigationReport
from rankscope_exporter.contract.words import HookState, MitigationState
from rankscope_exporter.hooks import targets
from rankscope_exporter.hooks.sources import SourceSubject
from rankscope_exporter.hooks.subjects import ClassSubject, Owner
from rankscope_exporter.hooks.widths import Width, width_rule
from rankscope_exporter.mitigations import trim

RUNNERS = {
    "V1": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    "V2": ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
}
"""
Module and class of vLLM's two model runners. What a platform runs is a subclass of one of them.
"""
SELECTION = (
    "Which runner vLLM takes is decided by its configuration when it starts: VLLM_USE_V2_MODEL_RUNNER if it is set, "
    "else the release's own rule. Every worker examines the runner that it really has, and reports that."
)


class WidthReport(BaseModel):
    """
    How wide the two sides of a V2 runner's sampled-token collective post.
    """

    sender: Width
    receiver: Width
    differs: bool | None
    """Whether they post different widths in a step without drafts while speculation is on; None where that is unknown."""


class RunnerExamination(BaseModel):
    """
    One model runner.
    """

    runner: str
    """`V1`, `V2`, or `unknown` for a class that keeps the state of neither or both."""
    runner_class: str
    hooks: list[HookReport]
    width: WidthReport | None
    """None for a V1 runner, which always posts one token per request."""
    mitigations: list[MitigationReport]
    fix_class: str
    """The class whose code the trim fix changes; empty where it changes none."""


def examine_runner(subject: ClassSubject | SourceSubject, runner_class: str) -> RunnerExamination:
    """
    Probe everything of `subject`, which is shown as `runner_class`.
    """
    runner = classify(subject)
    reports = [targets.probe(subject, point) for point in targets.points_of(subject)]
    if not targets.is_v2(subject):
        reports.append(targets.probe_mask(subject))
    rule = width_rule(subject)
    fix, fix_class = _examine_fix(subject, runner)
    return RunnerExamination(
        runner=runner,
        runner_class=runner_class,
        hooks=reports,
        width=None if rule is None else WidthReport(sender=rule.sender, receiver=rule.receiver, differs=rule.differs),
        mitigations=[fix],
        fix_class=fix_class,
    )


def classify(subject: ClassSubject | SourceSubject) -> str:
    """
    `V1` or `V2` by the state that the runner keeps, `unknown` where it keeps that of neither or both.
    """
    v1 = subject.find_entry(Owner.RUNNER, "_update_states") is not None
    v2 = subject.keeps("req_states")
    return {(True, False): "V1", (False, True): "V2"}.get((v1, v2), "unknown")


def assess_runner(found: RunnerExamination) -> list[str]:
    """
    What is missing, in words: hooks that see nothing without a good reason, widths that nobody knows, a fix that does not know the code.
    """
    where = f"{found.runner} runner: "
    problems = [where + problem for problem in assess_reports(found.hooks, found.mitigations)]
    if found.width is not None:
        problems += [
            f"{where}how wide the {side} posts is unknown: a width mismatch cannot be foretold"
            for side, width in (("sender", found.width.sender), ("receiver", found.width.receiver))
            if width is Width.UNKNOWN
        ]
    if found.runner == "unknown":
        problems.append(f"{found.runner_class} keeps the state of neither runner, or of both: unknown code")
    return problems


def assess_reports(hooks: Iterable[HookReport], mitigations: Iterable[MitigationReport]) -> list[str]:
    """
    What is missing among hooks and mitigations, in words.
    """
    tables = (targets.V1_POINTS, targets.V2_HANDLER_POINTS, targets.V2_MODULE_POINTS)
    optional = {point.name for table in tables for point in table if point.optional}
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


def _examine_fix(subject: ClassSubject | SourceSubject, runner: str) -> tuple[MitigationReport, str]:
    ruled = trim.rule_out(runner)
    if ruled is not None:
        return MitigationReport(mitigation=trim.NAME, state=ruled.state, reason=ruled.reason), ""
    if isinstance(subject, SourceSubject):
        chosen = trim.choose_definition(
            trim.Definition(each.owner, trim.assess_text(each.text, each.code), trim.leads_on(each.code, each.bases))
            for each in subject.definitions_of(trim.METHOD)
        )
        state, reason, owner = chosen.assessment.state, chosen.assessment.reason, chosen.owner
    else:
        fix = trim.fix_of(subject.runner_class)
        state, reason, owner = fix.state, fix.reason, fix.owner
    changes = state in (MitigationState.AVAILABLE, MitigationState.APPLIED)
    return MitigationReport(mitigation=trim.NAME, state=state, reason=reason), owner if changes else ""
