"""
What is put around vLLM's functions: our lines guarded, vLLM's call and its errors untouched.

Each wrapper is a plain closure, the cheapest thing that can stand in for a bound method, and hands every error of
ours to `note`, which swallows it. The variables of a wrapper other than `KEPT` are bodies of ours; `silence` replaces
them, so that a wrapper that somebody else has wrapped can stay where it is and do nothing.
"""

from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

from rankscope_exporter.contract.words import Role

Method = Callable[..., Any]
Note = Callable[[str, Exception], None]
Fail = Callable[[str, BaseException], None]
Measure = Callable[[Any], int]
"""
Columns of the exchange for an input batch, from what the host knows; 0 if that is not known beforehand.
"""

KEPT = frozenset({"dummy_at", "handler", "name", "original", "runner", "width"})
"""
Variables of wrappers that `silence` leaves alone.
"""

_SENDER, _RECEIVER = int(Role.SENDER), int(Role.RECEIVER)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def silence(wrapper: Any) -> None:
    """
    Turn a wrapper of this module into one that only passes calls on.
    """
    for variable, cell in _variables(wrapper):
        if variable not in KEPT:
            cell.cell_contents = _nothing


def is_silent(function: Any) -> bool:
    """
    Whether `function` is a wrapper of this module that was silenced.
    """
    ours = getattr(function, "__globals__", None) is globals()
    return ours and any(cell.cell_contents is _nothing for _, cell in _variables(function))


def _variables(wrapper: Any) -> Iterator[tuple[str, CellType]]:
    return zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)


def wrap_execute_model(
    name: str, original: Method, begin: Method, end: Method, fail: Fail, note: Note, *, dummy_at: int | None = None
) -> Method:
    """
    Begin a step before the call, and end it after a call that leaves nothing to sample.

    `dummy_at` is the position of the parameter `dummy_run` after the scheduler's output, None where there is none: a
    dummy run is no step.
    """

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if dummy_at is not None and (kwargs.get("dummy_run") or (len(args) > dummy_at and args[dummy_at])):
            return original(scheduler_output, *args, **kwargs)
        try:
            begin(scheduler_output)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        try:
            result = original(scheduler_output, *args, **kwargs)
        except BaseException as error:
            fail(name, error)
            raise
        try:
            # None: sample_tokens comes next. Tensors for the next pipeline rank: so it does there.
            if not scheduler_output.total_num_scheduled_tokens or not (result is None or hasattr(result, "tensors")):
                end()
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return execute_model


def wrap_sample_tokens(name: str, original: Method, end: Method, fail: Fail, note: Note) -> Method:
    """
    End the step after the call.
    """

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            fail(name, error)
            raise
        try:
            end()
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return sample_tokens


def wrap_update(name: str, original: Method, update: Method, note: Note) -> Method:
    """
    Read lengths after the call.
    """

    def update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler_output, *args, **kwargs)
        try:
            update(scheduler_output)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return update_states


def wrap_broadcast(
    name: str, original: Method, enter: Method, leave: Method, note: Note, *, width: int | None = None
) -> Method:
    """
    Mark this rank as the sender of the step's exchange, `width` columns wide; None: as wide as the tensor, whose shape
    is metadata on the host.
    """

    def broadcast(sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            enter(_SENDER, sampled_token_ids.shape[-1] if width is None else width)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(sampled_token_ids, *args, **kwargs)
        try:
            leave(0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return broadcast


def wrap_v1_receive(name: str, original: Method, enter: Method, leave: Method, runner: Any, note: Note) -> Method:
    """
    Mark this rank as a receiver of the step's collective; how wide it is shows on what was received.
    """

    def receive(*args: Any, **kwargs: Any) -> Any:
        try:
            enter(_RECEIVER, 0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(*args, **kwargs)
        try:
            received = runner.input_batch.prev_sampled_token_ids
            leave(0 if received is None else received.shape[-1])
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return receive


def wrap_v1_guard(name: str, original: Method, decide: Method, note: Note) -> Method:
    """
    Record what vLLM's own guard answered, before vLLM acts on it.
    """

    def guard(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        try:
            decide(skip=bool(answer))
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return answer

    return guard


def wrap_consume(name: str, original: Method, consume: Method, note: Note) -> Method:
    """
    Look at the slot of the receive queue that the call takes out.
    """

    def get_prev_sampled_outputs(*args: Any, **kwargs: Any) -> Any:
        try:
            consume()
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return original(*args, **kwargs)

    return get_prev_sampled_outputs


def wrap_v2_receive(
    name: str, original: Method, enter: Method, leave: Method, handler: Any, note: Note, *, measure: Measure
) -> Method:
    """
    Mark this rank as a receiver of the step's exchange; where `measure` cannot tell how wide (0), the slot that was made does.

    Releases that decide step by step whether drafts follow (vLLM 0.33) say so in the argument `recv_drafts`.
    """

    def receive(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        columns = 0
        try:
            columns = measure(input_batch)
            enter(columns, args[0] if args else kwargs.get("recv_drafts"))
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(input_batch, *args, **kwargs)
        try:
            slot = handler.queue[-1] if handler.queue and not columns else None
            leave(0 if slot is None else slot.sampled_tokens.shape[-1])
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return receive


def wrap_need_mask(name: str, original: Method, decide: Method, note: Note) -> Method:
    """
    Record which rows vLLM says need what is sampled, before it acts on that.
    """

    def compute_need_sampled_mask(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        needed = original(input_batch, *args, **kwargs)
        try:
            decide(needed, input_batch)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return needed

    return compute_need_sampled_mask


def wrap_drafts(name: str, original: Method, send: Method, leave: Method, note: Note) -> Method:
    """
    Record that the drafts follow, before they do.
    """

    def broadcast_drafts(*args: Any, **kwargs: Any) -> Any:
        try:
            send()
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(*args, **kwargs)
        try:
            leave(0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return broadcast_drafts


def wrap_pp_receive(name: str, original: Method, receive: Method, leave: Method, note: Note) -> Method:
    """
    Record a receive without a guard (vLLM 0.17 to 0.22); its arguments say how many rows, and how wide.
    """

    def pp_receive(num_reqs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            receive(num_reqs, kwargs.get("max_sample_len", args[0] if args else 1))
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(num_reqs, *args, **kwargs)
        try:
            leave(0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return pp_receive


def wrap_pp_broadcast(name: str, original: Method, send: Method, leave: Method, note: Note) -> Method:
    """
    Record a broadcast without a guard; its tensor's shape says how many rows, and how wide.
    """

    def pp_broadcast(sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            send(*sampled_token_ids.shape)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(sampled_token_ids, *args, **kwargs)
        try:
            leave(0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return pp_broadcast
