"""
The hook points, and what the code must look like for each: compatibility is data, and never a version comparison.

The same tables serve the installation on a live runner, `rankscope-exporter doctor` on a class and the version
matrix on source text; `subjects` makes the three look alike.
"""

from dataclasses import dataclass
from typing import Any

from rankscope_exporter.contract.http import HookReport
from rankscope_exporter.contract.words import HookState
from rankscope_exporter.hooks.subjects import HANDLER_ATTRIBUTE, Owner, RunnerSubject, Subject, as_subject

__all__ = [
    "MASK",
    "RANK_HOOK",
    "V1_POINTS",
    "V2_HANDLER_POINTS",
    "V2_MODULE_POINTS",
    "Found",
    "HookPoint",
    "Owner",
    "find",
    "is_v2",
    "points_of",
    "probe",
    "probe_mask",
]

RANK_HOOK = "init_device"


@dataclass(frozen=True, slots=True)
class HookPoint:
    """
    A function that is wrapped, if it takes the `parameters` (after self) that the hook relies on.
    """

    name: str
    """What reports call it; unique."""
    methods: tuple[str, ...]
    """What releases call it, the newest first: the first that is there is wrapped."""
    owner: Owner
    parameters: tuple[str, ...]
    sees: str
    """What is known through it, and so what is not known without it."""
    optional: str = ""
    """Why a release may lack it without anything being missed; empty if its absence makes Rankscope blind."""


@dataclass(frozen=True, slots=True)
class Found:
    """
    Where the wrapper of a hook point goes: `setattr(owner_object, attribute_name, wrapper)`.
    """

    owner_object: Any
    attribute_name: str


def _point(
    method: str,
    parameters: tuple[str, ...],
    sees: str,
    *,
    owner: Owner = Owner.RUNNER,
    older: tuple[str, ...] = (),
    optional: str = "",
) -> HookPoint:
    name = f"PPHandler.{method}" if owner is Owner.HANDLER else method
    return HookPoint(name, (method, *older), owner, parameters, sees, optional)


_STEPS = _point("execute_model", ("scheduler_output",), "steps, batch")
_END = _point("sample_tokens", (), "the end of a step")
_POOL = _point("pool", (), "the end of a step of a pooling model", optional="this release has no pooling models here")
_SENDER, _RECEIVER = (f"the {side}'s side of the sampled-token collective" for side in ("sender", "receiver"))
_V2_UPDATE = _point(
    "update_requests",
    ("scheduler_output",),
    "host-side request lengths",
    older=("update_states",),
)

V1_POINTS = (
    _STEPS,
    _point("_update_states", ("scheduler_output",), "request-state lengths, drift"),
    _END,
    _point("_pp_broadcast_prev_sampled_token_ids", ("sampled_token_ids",), _SENDER),
    _point("_pp_receive_prev_sampled_token_ids_to_input_batch", (), _RECEIVER),
    _point(
        "_is_all_reqs_chunked_prefill",
        (),
        "guard decisions",
        optional="this release has no guard: the collective is always posted",
    ),
)
"""
The V1 runner, which posts its collective itself.
"""

V2_HANDLER_POINTS = (
    _STEPS,
    _V2_UPDATE,
    _END,
    _POOL,
    _point("receive", ("input_batch",), _RECEIVER, owner=Owner.HANDLER),
    _point("broadcast", ("sampled_token_ids",), _SENDER, owner=Owner.HANDLER),
    _point(
        "broadcast_drafts",
        ("draft_tokens",),
        "the sender's side of the draft collective",
        owner=Owner.HANDLER,
        optional="this release sends no drafts to other pipeline ranks",
    ),
    _point("get_prev_sampled_outputs", (), "what becomes of received tokens", owner=Owner.HANDLER),
    _point("compute_need_sampled_mask", ("input_batch",), "guard decisions, masked requests", owner=Owner.MODULE),
)
"""
The V2 runner with a handler that decides and posts.
"""

V2_MODULE_POINTS = (
    _STEPS,
    _V2_UPDATE,
    _END,
    _POOL,
    _point("pp_receive", ("num_reqs", "max_sample_len"), _RECEIVER, owner=Owner.MODULE),
    _point("pp_broadcast", ("sampled_token_ids",), _SENDER, owner=Owner.MODULE),
)
"""
The V2 runner before it had a handler: two functions in its module, and no guard, so the collective is always posted.
"""

MASK = "discard_request_mask"
"""
The V1 runner's mask of requests whose sampled token is discarded: read, not wrapped.
"""


def is_v2(subject: Any) -> bool:
    """
    Whether `subject` (a runner, its class or a `Subject`) is to be probed as a V2 runner.

    `_update_states` says V1. Any of what only V2 has says V2, so that a fork that renamed one is still looked at in the right places.
    """
    subject = as_subject(subject)
    if subject.find_entry(Owner.RUNNER, "_update_states") is not None:
        return False
    return any(subject.keeps(attribute) for attribute in ("req_states", HANDLER_ATTRIBUTE)) or any(
        subject.find_entry(Owner.RUNNER, method) is not None for method in _V2_UPDATE.methods
    )


def points_of(subject: Any) -> tuple[HookPoint, ...]:
    """
    The hook points of `subject`: a runner, its class or a `Subject`.
    """
    subject = as_subject(subject)
    if not is_v2(subject):
        return V1_POINTS
    return V2_HANDLER_POINTS if subject.keeps(HANDLER_ATTRIBUTE) else V2_MODULE_POINTS


def find(subject: Any, point: HookPoint) -> Found | None:
    """
    Where to put the wrapper of `point` on a live runner; None where the code that it would wrap is not there.

    Raises:
        TypeError: `subject` is not a live runner.

    """
    subject = as_subject(subject)
    if not isinstance(subject, RunnerSubject):
        msg = f"only a live runner can be hooked, not {type(subject).__name__}"
        raise TypeError(msg)
    for method in point.methods:
        owner_object = subject.locate(point.owner, method)
        if owner_object is not None:
            return Found(owner_object, method)
    return None


def probe(subject: Any, point: HookPoint) -> HookReport:
    """
    Whether `point` can be hooked on `subject`: a runner, its class or a `Subject`. Calls nothing.
    """
    subject = as_subject(subject)
    entry = next((e for method in point.methods if (e := subject.find_entry(point.owner, method)) is not None), None)
    if entry is None:
        return HookReport(hook=point.name, state=HookState.ABSENT, reason=_explain_absence(subject, point))
    if entry.problem:
        return HookReport(hook=point.name, state=HookState.OFF, reason=f"{entry.problem}: {point.sees} unknown")
    if entry.parameters[: len(point.parameters)] != point.parameters:
        found = ", ".join(entry.parameters) or "nothing"
        wanted = ", ".join(point.parameters)
        return HookReport(
            hook=point.name,
            state=HookState.OFF,
            reason=f"takes ({found}) where ({wanted}) was expected: {point.sees} unknown",
        )
    return HookReport(hook=point.name, state=HookState.ON)


def probe_mask(subject: Any) -> HookReport:
    """
    Whether masked requests can be read on `subject`, a V1 runner, its class or a `Subject`.
    """
    subject = as_subject(subject)
    if isinstance(subject, RunnerSubject):
        there = hasattr(getattr(subject.runner, MASK, None), "np")
    else:
        there = subject.keeps(MASK)
    if there:
        return HookReport(hook=MASK, state=HookState.ON)
    return HookReport(
        hook=MASK, state=HookState.ABSENT, reason=f"{subject.label} keeps no {MASK}: masked requests unknown"
    )


def _explain_absence(subject: Subject, point: HookPoint) -> str:
    # What a handler calls in its module is missed no more than the handler itself.
    owner = Owner.HANDLER if point.owner is Owner.MODULE and subject.keeps(HANDLER_ATTRIBUTE) else point.owner
    if reason := subject.explain_absence(owner):
        return reason
    if point.optional:
        return point.optional
    kind = "function" if point.owner is Owner.MODULE else "method"
    return f"{subject.name_owner(point.owner)} has no such {kind}: {point.sees} unknown"
