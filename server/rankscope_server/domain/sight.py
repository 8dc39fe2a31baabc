"""
What can be seen of a rank, and what cannot: told by its hooks.
"""

from collections.abc import Iterator, Sequence

from rankscope_exporter.contract import Detail, HookReport, HookState, MitigationState
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined

SUBJECTS = (
    ("steps and batches", ("execute_model",)),
    ("request-state lengths and drift", ("_update_states",)),
    ("lengths on the host", ("update_requests",)),
    (
        "guard decisions",
        (
            "_pp_broadcast_prev_sampled_token_ids",
            "_pp_receive_prev_sampled_token_ids_to_input_batch",
            "PPHandler.broadcast",
            "PPHandler.receive",
            "pp_broadcast",
            "pp_receive",
        ),
    ),
    ("masked requests", ("discard_request_mask", "compute_need_sampled_mask")),
)
"""
What is watched, and the hooks that show it, on whichever runner.
"""


def split_sight(hooks: Sequence[HookReport]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    What these hooks still show, and what they do not: a subject counts as seen if one of its hooks is on and none is lost.
    """
    seen: list[str] = []
    unseen: list[str] = []
    for subject, names in SUBJECTS:
        states = [hook.state for hook in hooks if hook.hook in names]
        if not states:
            continue
        whole = HookState.ON in states and not any(state in (HookState.OFF, HookState.REMOVED) for state in states)
        (seen if whole else unseen).append(subject)
    return tuple(seen), tuple(unseen)


def unknown_code(rank: RankFacts) -> bool:
    """
    Whether a rank to which it matters runs code that Rankscope does not know.
    """
    return rank.at_risk and (
        rank.trim is MitigationState.UNKNOWN_CODE or rank.report.identity.runner not in ("V1", "V2")
    )


def describe_unknown_code(engine: EngineFacts) -> str:
    """
    Which ranks run unknown code, what is still observed of them, and what to do; empty if none does.
    """
    ranks = [rank for rank in engine.ranks if unknown_code(rank)]
    if not ranks:
        return ""
    first = ranks[0]
    verb = "run" if len(ranks) > 1 else "runs"
    reason = first.trim_reason or f"its model runner is {first.report.identity.runner_class}"
    seen, unseen = split_sight(first.report.hooks)
    parts = [
        f"{joined(rank.label for rank in ranks)} {verb} code that Rankscope does not know: {reason}.",
        "The trim fix is off and cannot be turned on here.",
        f"Still observed: {joined(seen)}." if seen else "Nothing of the steps is observed.",
        f"Not observed: {joined(unseen)}." if unseen and seen else "",
        "Run rankscope-exporter doctor beside vLLM and report what it prints.",
    ]
    return " ".join(part for part in parts if part)


def assess_sight(rank: RankFacts) -> Iterator[str]:
    """
    What should be seen of a rank and is not, each with the remedy.
    """
    lost = rank.lost_hooks
    if lost:
        first = lost[0]
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        _, unseen = split_sight(lost)
        missing = f", so {joined(unseen)} cannot be seen" if unseen else ""
        remedy = (
            "it stays off until vLLM is restarted"
            if first.state is HookState.REMOVED
            else "rankscope-exporter doctor shows what the code looks like"
        )
        reason = first.reason or "no reason given"
        yield f"hook {first.hook} of {rank.label} is {first.state.value}{more}: {reason}{missing} ({remedy})"
    if rank.report.detail is not Detail.FULL:
        cut = (
            "and took its costliest hook out" if rank.report.detail is Detail.CUT else "and keeps no drifting requests"
        )
        yield (
            f"{rank.label} is over its budget of own time {cut}: "
            "raise RANKSCOPE_BUDGET_MICROSECONDS in vLLM's environment and restart it, or take load off the machine"
        )
