"""
Device-side lengths of the V2 model runner: the only request state of it that can drift, read without waiting.

Every few steps the two arrays of lengths are copied into pinned memory behind the work that is enqueued already, and an
event is recorded after them. Later steps ask the event, which does not wait, and once the copy is there compare it with
what the scheduler had said at that step. One sample is under way at most; nothing grows.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rankscope_exporter.flight import layout

_now = time.monotonic_ns

Sample = Callable[[int, Any, Any, list[int]], Any]
"""
As `DeviceSampler.step`.
"""


class DeviceSampler:
    """
    Samples `total_len` and `num_computed_tokens` of `states` (vLLM's `RequestState`) every `every` steps into `area`.

    `torch` is the module, given by the caller: only a worker has it.
    """

    __slots__ = (
        "_area",
        "_computed",
        "_event",
        "_every",
        "_expected",
        "_rows",
        "_samples",
        "_sequence",
        "_sources",
        "_step",
        "_taken_ns",
        "_targets",
        "_total",
        "_wanted",
    )

    def __init__(self, states: Any, area: memoryview, every: int, torch: Any) -> None:
        self._sources = (states.total_len.gpu, states.num_computed_tokens.gpu)
        on_device = self._sources[0].device.type == "cuda"
        self._targets = tuple(torch.empty(s.shape, dtype=s.dtype, pin_memory=on_device) for s in self._sources)
        self._total, self._computed = (target.numpy() for target in self._targets)
        self._event = torch.cuda.Event() if on_device else None
        self._area = area
        self._every = every
        self._rows: Any = None
        self._expected: Any = None
        self._wanted: Any = None
        self._step = self._taken_ns = self._samples = self._sequence = 0
        self._publish(0, 0, 0, 0, 0, 0)

    def step(self, step: int, cached: Any, prompts: Any, rows: list[int]) -> None:
        """
        In `step` the requests of `cached` are in `rows`; `prompts` are all rows' prompt lengths on the host.
        """
        if self._rows is not None:
            if self._event is not None and not self._event.query():
                return
            self._finish()
        if rows and not step % self._every:
            self._take(step, cached, prompts, rows)

    def _take(self, step: int, cached: Any, prompts: Any, rows: list[int]) -> None:
        index = np.asarray(rows)
        self._expected = prompts[index] + np.asarray(cached.num_output_tokens)
        self._wanted = np.asarray(cached.num_computed_tokens)
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._step, self._taken_ns = step, _now()
        self._rows = index

    def _finish(self) -> None:
        rows, self._rows = self._rows, None
        total, computed = self._total[rows], self._computed[rows]
        total_excess, computed_excess = total - self._expected, computed - self._wanted
        self._samples += 1
        self._publish(
            int(total.sum()),
            int(computed.sum()),
            len(rows),
            int(np.count_nonzero((total_excess > 0) | (computed_excess > 0))),
            int(total_excess.max()),
            int(computed_excess.max()),
        )

    def _publish(
        self, total: int, computed: int, rows: int, excess_rows: int, total_excess: int, computed_excess: int
    ) -> None:
        area = self._area
        layout.WORD.pack_into(area, 0, self._sequence + 1)
        layout.DEVICE.pack_into(
            area, 0, self._sequence + 1, self._every, self._samples, self._step, self._taken_ns, total, computed, rows, excess_rows,
            total_excess, computed_excess,
        )  # fmt: skip
        self._sequence += 2
        layout.WORD.pack_into(area, 0, self._sequence)
