"""
Which wrapper goes where, and which method of the recorder each calls: one table per kind of model runner.

A table names hook points (`targets`); what it has no entry for is reported as off, so nothing is forgotten in silence.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rankscope_exporter.hooks import wrappers as w
from rankscope_exporter.hooks.widths import Width, width_rule
from rankscope_exporter.recorder import Recorder, V1Recorder, V2Recorder

Method = Callable[..., Any]
Make = Callable[[Method], Method]
"""
Makes the wrapper for the function that it is given.
"""
Body = Callable[[str, Method], Method]
"""
Gives the body that a hook point calls: the one that it is given, or one that fails where a test asked for that.
"""


def wire_v1(runner: Any, recorder: V1Recorder, body: Body, note: w.Note) -> dict[str, Make]:
    """
    The wrappers of a V1 runner.
    """
    send, receive = "_pp_broadcast_prev_sampled_token_ids", "_pp_receive_prev_sampled_token_ids_to_input_batch"
    update, guard = "_update_states", "_is_all_reqs_chunked_prefill"
    # Where vLLM has no guard, coming to the collective is the decision to post it.
    enter = recorder.enter if hasattr(runner, guard) else recorder.enter_unguarded
    return {
        **_wire_step(runner, recorder, body, note),
        update: lambda original: w.wrap_update(update, original, body(update, recorder.update), note),
        send: lambda original: w.wrap_broadcast(send, original, body(send, enter), body(send, recorder.leave), note),
        receive: lambda original: w.wrap_v1_receive(
            receive, original, body(receive, enter), body(receive, recorder.leave), runner, note
        ),
        guard: lambda original: w.wrap_v1_guard(guard, original, body(guard, recorder.decide), note),
    }


def wire_v2(runner: Any, recorder: V2Recorder, body: Body, note: w.Note) -> dict[str, Make]:
    """
    The wrappers of a V2 runner, with a pipeline handler or with the two functions that came before it.
    """
    handler = getattr(runner, "pp_handler", None)
    rule = width_rule(runner)
    padded = getattr(handler, "max_sample_len", None)
    sent = padded if rule is not None and rule.sender is Width.PADDED else None
    received = _measure(handler, rule.receiver if rule is not None else Width.UNKNOWN)
    update, send, receive = "update_requests", "PPHandler.broadcast", "PPHandler.receive"
    consume, drafts, mask = (
        "PPHandler.get_prev_sampled_outputs",
        "PPHandler.broadcast_drafts",
        "compute_need_sampled_mask",
    )
    old_send, old_receive = "pp_broadcast", "pp_receive"
    lengths = hasattr(runner.req_states, "num_computed_tokens_np")
    read = recorder.update if lengths else recorder.update_blindly
    return {
        **_wire_step(runner, recorder, body, note),
        update: lambda original: w.wrap_update(update, original, body(update, read), note),
        consume: lambda original: w.wrap_consume(consume, original, body(consume, recorder.consume), note),
        send: lambda original: w.wrap_broadcast(
            send, original, body(send, recorder.enter), body(send, recorder.leave), note, width=sent
        ),
        receive: lambda original: w.wrap_v2_receive(
            receive, original, body(receive, recorder.enter_receive), body(receive, recorder.leave), handler, note, measure=received
        ),
        mask: lambda original: w.wrap_need_mask(mask, original, body(mask, recorder.decide), note),
        drafts: lambda original: w.wrap_drafts(
            drafts, original, body(drafts, recorder.send_drafts), body(drafts, recorder.leave), note
        ),
        old_receive: lambda original: w.wrap_pp_receive(
            old_receive, original, body(old_receive, recorder.receive_unguarded), body(old_receive, recorder.leave), note
        ),
        old_send: lambda original: w.wrap_pp_broadcast(
            old_send, original, body(old_send, recorder.send_unguarded), body(old_send, recorder.leave), note
        ),
    }  # fmt: skip


def _measure(handler: Any, width: Width) -> w.Measure:
    """
    How wide the receiver's collective is for a batch; 0 where that shows only on what was received.
    """
    if width is Width.PADDED and handler is not None:
        padded = int(handler.max_sample_len)
        return lambda _: padded
    agreed: w.Measure | None = getattr(handler, "_sample_len", None)
    return agreed if width is Width.AGREED and agreed is not None else lambda _: 0


def _wire_step(runner: Any, recorder: Recorder, body: Body, note: w.Note) -> dict[str, Make]:
    execute, sample = "execute_model", "sample_tokens"
    dummy_at = _dummy_position(getattr(runner, execute, None))

    def fail(name: str, error: BaseException) -> None:
        try:
            recorder.fail(name, error)
        except Exception as fault:  # noqa: BLE001
            note(name, fault)

    return {
        execute: lambda original: w.wrap_execute_model(
            execute, original, body(execute, recorder.begin), body(execute, recorder.end), fail, note,
            dummy_at=dummy_at,
        ),
        **{
            end: partial(_wrap_end, end, end_body=body(end, recorder.end), fail=fail, note=note)
            for end in (sample, "pool")
        },
    }  # fmt: skip


def _wrap_end(name: str, original: Method, *, end_body: Method, fail: w.Fail, note: w.Note) -> Method:
    return w.wrap_sample_tokens(name, original, end_body, fail, note)


def _dummy_position(execute_model: Any) -> int | None:
    """
    Where `execute_model` takes `dummy_run` after the scheduler's output; None where it does not, or cannot be looked at.
    """
    try:
        names = list(inspect.signature(execute_model).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("dummy_run") - 1 if "dummy_run" in names else None
