"""
What good health can look like, by name; a run counts how often each was there.

Odds are per step of an engine unless said otherwise. They are far higher than in life, so that a million steps meet all
of them together many times.
"""

from collections import Counter
from enum import Enum


class Oddity(str, Enum):
    """
    One legitimate oddity.
    """

    SKEW = "looks_with_skew"
    """Looks at ranks that were two steps apart, or more."""
    IDLE = "idle_gaps"
    WARM_UP = "warm_up_steps"
    DUMMY = "dummy_steps"
    CHUNKED = "chunked_prefill_steps"
    """Steps in which some requests were masked, on all ranks alike."""
    ALL_SKIP = "all_skip_steps"
    """Steps in which all ranks skipped, since every request was masked."""
    EMPTY = "empty_steps"
    """Steps in which nothing was scheduled: no decision is made."""
    PREEMPTION = "preemptions"
    NEGATIVE_DRIFT = "negative_drift_steps"
    ABORT = "aborts"
    DROPPED_ROWS = "dropped_rows"
    RESTART = "engine_restarts"
    SHUTDOWN_IDLE = "shutdowns_while_idle"
    SHUTDOWN_BUSY = "shutdowns_after_a_step"
    """Clean shutdowns right after the last step, before the engine counted as idle."""
    SYNC = "sync_scheduled_engines"
    TRANSIENT = "transient_drifts"
    SILENCE = "poll_failures"
    BLIND_DUE = "blind_rightly_said"
    RECORDS_LOST = "records_lost"
    EXPORTER_RESTART = "exporter_restarts"
    REPEATED = "records_sent_again"
    CLOCK_JUMP = "clock_jumps"
    TOGGLE = "trim_fix_toggles"
    GC_PAUSE = "gc_pauses"
    LONG_PREFILL = "long_prefill_steps"
    LATE_JOIN = "late_ranks"
    QUEUE_FILLING = "queue_filling_steps"
    PAUSED = "momentary_stops"
    """A rank that is seen stopped for a moment, as a profiler does it."""
    TORN = "records_torn"
    FROM_MIDDLE = "engines_watched_from_the_middle"


IDLE, IDLE_LONG = 1 / 1500, 0.04
"""An idle gap of seconds; the share of them that lasts minutes."""
DUMMY = 1 / 600
EMPTY = 1 / 200
PREEMPT = 1 / 100
ABORT = 1 / 150
LONG_PROMPT = 0.3
"""Per request: its prompt takes several chunks."""
TRANSIENT = 1 / 400
GC_PAUSE = 1 / 700
LONG_PREFILL = 1 / 1200
PAUSE = 1 / 3000

SILENCE_SECONDS = 45.0
"""Mean time between two silences of an exporter."""
SILENCE_LONG = 0.1
"""Share of silences that last longer than six seconds."""
EXPORTER_RESTART_SECONDS = 90.0
CLOCK_JUMP_SECONDS = 90.0
TORN = 0.5
"""Per answer and rank that has just begun a step: its record is not whole yet."""
TOGGLE_SECONDS = 60.0

Counts = Counter[Oddity]
