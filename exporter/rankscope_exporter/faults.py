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

logger = logging.getLogger(LOGGER)


class Faults:
    """
    Counts errors per hook; `remove(hook, reason)` is called once a hook has failed `limit` times.
    """

    __slots__ = ("_limit", "_remove", "counts", "total")

    def __init__(self, limit: int, remove: Callable[[str, str], None]) -> None:
        self._limit = limit
        self._remove = remove
        self.counts: dict[str, int] = {}
        self.total = 0

    def note(self, hook: str, error: Exception) -> None:
        """
        Count an error of `hook`; never raises.
        """
        try:
            self.total += 1
            count = self.counts[hook] = self.counts.get(hook, 0) + 1
            if count == 1:
                logger.warning(
                    "rankscope: hook %s failed; vLLM is not affected, what it would show is missing",
                    hook,
                    exc_info=error,
                )
            if count == self._limit:
                reason = f"failed {count} times, last with {type(error).__name__}: {error}"
                logger.error("rankscope: hook %s took itself out: %s", hook, reason)
                self._remove(hook, reason[:200])
        except Exception:  # noqa: BLE001, S110  there is nobody left to tell
            pass
