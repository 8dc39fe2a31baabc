"""
How benchmarks and end-to-end runs say what they measured: one JSON object per figure on standard output.

Progress goes to standard error, so that a person and a script read the same thing. A run exits with 1 if any figure
missed its goal.
"""

import json
import operator
import sys
from typing import Any

_TESTS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}


class Figures:
    """
    The figures of one run; `exit_code` is 1 if one missed its goal.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.exit_code = 0

    def report(self, figure: str, value: float | str | bool | None, goal: str = "", **detail: Any) -> None:
        """
        Print one figure. `goal` reads like `<= 3`; a value that is not known (None) misses every goal.
        """
        ok = _meets(value, goal)
        if not ok:
            self.exit_code = 1
        line = {"run": self.run, "figure": figure, "value": value, "goal": goal, "ok": ok, "detail": detail}
        print(json.dumps(line), flush=True)


def _meets(value: Any, goal: str) -> bool:
    if not goal:
        return True
    if value is None:
        return False
    comparison, _, bound = goal.partition(" ")
    return bool(_TESTS[comparison](value, type(value)(json.loads(bound)) if isinstance(value, (int, float)) else bound))


def progress(text: str) -> None:
    """
    Tell a person what is going on.
    """
    print(text, file=sys.stderr, flush=True)
