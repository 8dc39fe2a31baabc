"""
What is put around the runner's methods: our lines guarded, vLLM's call and its errors untouched.

Each wrapper is a plain closure, the cheapest thing that can stand in for a bound method, and hands every error of
ours to `note`, which swallows it.
"""

from collections.abc import Callable
from typing import Any

from rankscope_exporter.contract.words import Role

Method = Callable[..., Any]
Note = Callable[[str, Exception], None]


def wrap_execute_model(original: Method, begin: Method, end: Method, note: Note) -> Method:
    """
    Begin a step before the call, and end it after a call that leaves nothing to sample.
    """

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("dummy_run"):
            return original(scheduler_output, *args, **kwargs)
        try:
            begin(scheduler_output)
        except Exception as error:  # noqa: BLE001
            note("execute_model", error)
        result = original(scheduler_output, *args, **kwargs)
        try:
            # None: sample_tokens comes next. Tensors for the next pipeline rank: so it does there.
            if not scheduler_output.total_num_scheduled_tokens or not (result is None or hasattr(result, "tensors")):
                end()
        except Exception as error:  # noqa: BLE001
            note("execute_model", error)
        return result

    return execute_model


def wrap_update_states(original: Method, update: Method, note: Note) -> Method:
    """
    Read lengths after the call.
    """

    def _update_states(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler_output, *args, **kwargs)
        try:
            update(scheduler_output)
        except Exception as error:  # noqa: BLE001
            note("_update_states", error)
        return result

    return _update_states


def wrap_sample_tokens(original: Method, end: Method, note: Note) -> Method:
    """
    End the step after the call.
    """

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            end()
        except Exception as error:  # noqa: BLE001
            note("sample_tokens", error)
        return result

    return sample_tokens


def wrap_broadcast(original: Method, enter: Method, leave: Method, note: Note) -> Method:
    """
    Mark this rank as the sender of the step's collective; its tensor's shape is metadata on the host.
    """
    name = "_pp_broadcast_prev_sampled_token_ids"
    sender = int(Role.SENDER)

    def broadcast(sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            enter(sender, sampled_token_ids.shape[-1])
        except Exception as error:  # noqa: BLE001
            note(name, error)
        result = original(sampled_token_ids, *args, **kwargs)
        try:
            leave(0)
        except Exception as error:  # noqa: BLE001
            note(name, error)
        return result

    return broadcast


def wrap_receive(original: Method, enter: Method, leave: Method, runner: Any, note: Note) -> Method:
    """
    Mark this rank as a receiver of the step's collective; how wide it is shows on what was received.
    """
    name = "_pp_receive_prev_sampled_token_ids_to_input_batch"
    receiver = int(Role.RECEIVER)

    def receive(*args: Any, **kwargs: Any) -> Any:
        try:
            enter(receiver, 0)
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


def wrap_guard(original: Method, decide: Method, note: Note) -> Method:
    """
    Record what vLLM's own guard answered, before vLLM acts on it.
    """

    def _is_all_reqs_chunked_prefill(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        try:
            decide(skip=bool(answer))
        except Exception as error:  # noqa: BLE001
            note("_is_all_reqs_chunked_prefill", error)
        return answer

    return _is_all_reqs_chunked_prefill
