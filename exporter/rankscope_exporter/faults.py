"""
Our own errors inside a worker: swallowed, counted, said once, and after a few the hook is taken out.

The host comes first, as in `capture_internal_exceptions` of error reporters: an error of ours never becomes vLLM's.
"""

import logging
from collections.abc import Callable

LOGGER = "vllm.rankscope"
"""
A child of vLLM's logger: what we say stands in vLLM's log, in its format. Root loggers of workers swallow warnings.
"""

KINDS = 4
"""
Classes of errors that are told apart per hook.
"""
KIND_LENGTH = 64
"""
Most characters of a class's name: the report has a fixed size.
"""

logger = logging.getLogger(LOGGER)


def kind_of(error: BaseException) -> str:
    """
    The name of an error's class, in a size that is known.
    """
    return type(error).__name__.encode("ascii", "backslashreplace").decode()[:KIND_LENGTH]


class Faults:
    """
    Counts errors by hook and kind; `remove(hook, reason)` is called once a hook has failed `limit` times.
    """

    __slots__ = ("_limit", "_remove", "kinds", "total")

    def __init__(self, limit: int, remove: Callable[[str, str], None]) -> None:
        self._limit = limit
        self._remove = remove
        self.kinds: dict[str, dict[str, int]] = {}
        """Errors of each hook, by the name of their class; those beyond the first `KINDS` classes together as `other`."""
        self.total = 0

    def count(self, hook: str) -> int:
        """
        Errors of `hook` so far.
        """
        return sum(self.kinds.get(hook, {}).values())

    def note(self, hook: str, error: Exception) -> None:
        """
        Count an error of `hook`; never raises.
        """
        try:
            self.total += 1
            kinds = self.kinds.setdefault(hook, {})
            kind = kind_of(error)
            kind = kind if kind in kinds or len(kinds) < KINDS else "other"
            kinds[kind] = kinds.get(kind, 0) + 1
            count = self.count(hook)
            if count == 1:
                logger.warning(
                    "rankscope: hook %s failed; vLLM is not affected, what it would show is missing",
                    hook,
                    exc_info=error,
                )
            if count == self._limit:
                # Not the error's text: it may quote a request id, and the report goes where ids may not be shown.
                reason = f"failed {count} times, last with {kind_of(error)}; vLLM's log has the traceback of the first"
                logger.error("rankscope: hook %s took itself out: %s", hook, reason)
                self._remove(hook, reason)
        except Exception:  # noqa: BLE001, S110  there is nobody left to tell
            pass
