"""
What Rankscope may cost in a step, and what goes first when it costs more.

Own time is wall-clock time, so a rank that the scheduler of the machine takes off its processor looks expensive for a
step. That is why the median decides, over a window of measured steps.
"""

from collections.abc import Callable, Iterable

from rankscope_exporter.contract.words import Detail

WINDOW = 32
"""
Measured steps that are judged together.
"""


def assess_budget(over: int, measured: int, detail: Detail) -> Detail:
    """
    What is still recorded, after `over` of `measured` steps cost more than the budget: one notch less if most did.
    """
    if 2 * over <= measured or detail is Detail.CUT:
        return detail
    return Detail(detail + 1)


class Budget:
    """
    Counts what steps cost; `reduce(detail, hook)` is called when less is to be recorded from now on, with the hook
    that cost most since the last judgement.
    """

    __slots__ = ("_measured", "_over", "_reduce", "_spent", "detail", "limit_ns")

    def __init__(self, limit_ns: int, reduce: Callable[[Detail, str], None]) -> None:
        self.limit_ns = limit_ns
        self._reduce = reduce
        self.detail = Detail.FULL
        self._measured = self._over = 0
        self._spent: dict[str, int] = {}

    def spend(self, own_ns: int, by_hook: Iterable[tuple[str, int]]) -> None:
        """
        A measured step cost `own_ns` in all, and so much in each hook.
        """
        self._measured += 1
        self._over += own_ns > self.limit_ns
        for hook, spent in by_hook:
            self._spent[hook] = self._spent.get(hook, 0) + spent
        if self._measured < WINDOW:
            return
        detail = assess_budget(self._over, self._measured, self.detail)
        costliest = max(self._spent, key=self._spent.__getitem__, default="")
        self._measured = self._over = 0
        self._spent = {}
        if detail is not self.detail:
            self.detail = detail
            self._reduce(detail, costliest)
