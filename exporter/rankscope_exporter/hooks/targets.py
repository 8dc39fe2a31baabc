"""
The hook points, and what the code must look like for each: compatibility is data, and never a version comparison.

The same table serves the installation on a live runner and `rankscope-exporter doctor` on a class.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from rankscope_exporter.contract.http import HookReport
from rankscope_exporter.contract.words import HookState

RANK_HOOK = "init_device"


@dataclass(frozen=True, slots=True)
class HookPoint:
    """
    A method of the model runner that is wrapped, if it takes the `parameters` (after self) that the hook relies on.
    """

    method: str
    parameters: tuple[str, ...]
    sees: str
    """What is known through it, and so what is not known without it."""
    optional: str = ""
    """Why a release may lack it without anything being missed; empty if its absence makes Rankscope blind."""


HOOK_POINTS = (
    HookPoint("execute_model", ("scheduler_output",), "steps, batch"),
    HookPoint("_update_states", ("scheduler_output",), "request-state lengths, drift"),
    HookPoint("sample_tokens", (), "the end of a step"),
    HookPoint(
        "_pp_broadcast_prev_sampled_token_ids",
        ("sampled_token_ids",),
        "the sender's side of the sampled-token collective",
    ),
    HookPoint(
        "_pp_receive_prev_sampled_token_ids_to_input_batch", (), "the receiver's side of the sampled-token collective"
    ),
    HookPoint(
        "_is_all_reqs_chunked_prefill",
        (),
        "guard decisions",
        optional="this release has no guard: the collective is always posted",
    ),
)

MASK = "discard_request_mask"
"""
The runner's mask of requests whose sampled token is discarded: read, not wrapped.
"""


def probe(owner: Any, point: HookPoint) -> HookReport:
    """
    Whether `point` can be hooked on `owner`, a model runner or its class. Calls nothing.
    """
    method = getattr(owner, point.method, None)
    if method is None:
        reason = point.optional or f"{_name(owner)} has no such method: {point.sees} unknown"
        return HookReport(hook=point.method, state=HookState.ABSENT, reason=reason)
    if not callable(method) or inspect.iscoroutinefunction(method):
        return HookReport(hook=point.method, state=HookState.OFF, reason=f"not a plain method: {point.sees} unknown")
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError) as error:
        return HookReport(
            hook=point.method, state=HookState.OFF, reason=f"no signature ({error}): {point.sees} unknown"
        )
    if inspect.isclass(owner):
        names = names[1:]
    if tuple(names[: len(point.parameters)]) != point.parameters:
        found = ", ".join(names) or "nothing"
        wanted = ", ".join(point.parameters)
        return HookReport(
            hook=point.method,
            state=HookState.OFF,
            reason=f"takes ({found}) where ({wanted}) was expected: {point.sees} unknown",
        )
    return HookReport(hook=point.method, state=HookState.ON)


def probe_mask(owner: Any) -> HookReport:
    """
    Whether masked requests can be read on `owner`, a model runner or its class.
    """
    if inspect.isclass(owner):
        code = getattr(owner.__init__, "__code__", None)
        there = code is not None and MASK in code.co_names
    else:
        there = hasattr(getattr(owner, MASK, None), "np")
    if there:
        return HookReport(hook=MASK, state=HookState.ON)
    return HookReport(
        hook=MASK, state=HookState.ABSENT, reason=f"{_name(owner)} keeps no {MASK}: masked requests unknown"
    )


def _name(owner: Any) -> str:
    return owner.__name__ if inspect.isclass(owner) else type(owner).__name__
