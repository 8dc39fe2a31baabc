"""
Layout of a flight file: little-endian, fixed size, one writer (the rank's process) and any number of readers.

    header | identity (JSON) | report (JSON) | control | live words | lengths | own time | device lengths | request table | ring

Every area has a fixed place and size, so a reader never follows a pointer from the file beyond what it checked
against this module; the sizes stand in the header so that a reader can tell another version from a broken file.

Torn reads. A step record is written in parts, and its `phase` byte goes up after each part is in place: a reader
takes the phase, copies the record, and keeps the copy only if step and phase still agree with the file afterwards;
fields of parts beyond that phase are then ignored. Blobs, device lengths and the request table have a sequence word
that is odd while they are written. This leans on stores becoming visible in order, which x86-64 guarantees; on other processors the
interpreter puts hundreds of instructions between the data and the word that publishes it.
"""

import struct

import numpy as np

MAGIC = b"RANKSCPE"
VERSION = 2
SUFFIX = ".flight"

HEADER = struct.Struct("<8sIIIIIIIIQqQQ")
"""
magic, version, record bytes, ring capacity, table entry bytes, table capacity, buckets, pid, (reserved), process start
(clock ticks since boot, as in /proc/PID/stat), wall clock and monotonic clock at creation (ns), file bytes.
"""

HEADER_BYTES = 256
IDENTITY_OFFSET, IDENTITY_BYTES = 256, 3840
HOOKS_OFFSET, HOOKS_BYTES = 4096, 8192
BLOB_HEAD = struct.Struct("<QI")
"""
Head of a JSON blob area: sequence word (odd while it is written), length.
"""

CONTROL_OFFSET = 12288
"""
One line of 64 bytes that the exporter process writes (the control word) and one that the rank writes (see `ACK`).
"""
CONTROL_REQUEST = 0
"""Index (u64) of the control word in the control area."""
ACK_OBSERVED, ACK_WORD, ACK_STEP, ACK_OUTCOME, ACK_STATE = 8, 9, 10, 11, 12
"""Indices (u64) in the control area: word seen, word acted on, step acted at, `ControlOutcome`, `MitigationState`."""
CONTROL_BYTES = 128

LIVE_OFFSET = CONTROL_OFFSET + CONTROL_BYTES
LIVE_STEP, LIVE_FAULTS, LIVE_SAMPLES, LIVE_DETAIL, LIVE_FAILED_STEPS, LIVE_FAILED_STEP = 0, 1, 2, 3, 4, 5
"""
Indices (u64) in the live area: last step begun, faults swallowed, steps sampled into the histograms of lengths,
`Detail`, steps that ended in an error of vLLM, the last such step.
"""
LIVE_BYTES = 128

BUCKETS = 20
"""
Histogram buckets of lengths: upper bounds 0, 1, 2, 4, ... 2**17 tokens, then infinity.
"""
BUCKET_BOUNDS: tuple[float, ...] = (0.0, *(float(1 << n) for n in range(BUCKETS - 2)), float("inf"))
HISTOGRAM_DTYPE = np.dtype(
    [("state", "<u8", (BUCKETS,)), ("scheduler", "<u8", (BUCKETS,)), ("state_sum", "<u8"), ("scheduler_sum", "<u8")]
)
HISTOGRAM_OFFSET = LIVE_OFFSET + LIVE_BYTES
HISTOGRAM_BYTES = 512

OWN_BUCKETS = 16
"""
Histogram buckets of our own time per step: upper bounds 1, 2, 4, ... 2**14 microseconds, then infinity.
"""
OWN_BOUNDS: tuple[float, ...] = (*((1 << n) / 1e6 for n in range(OWN_BUCKETS - 1)), float("inf"))
OWN_DTYPE = np.dtype([("steps", "<u8", (OWN_BUCKETS,)), ("sum_ns", "<u8")])
OWN_OFFSET = HISTOGRAM_OFFSET + HISTOGRAM_BYTES
OWN_BYTES = 256

DEVICE_DTYPE = np.dtype(
    [
        ("sequence", "<u8"),  # odd while it is written; 0: nothing was sampled yet
        ("every", "<u8"),  # steps between two samples; 0: off
        ("samples", "<u8"),  # samples whose copy arrived
        ("step", "<u8"),  # step at which this one was taken
        ("taken_ns", "<u8"),
        ("total_sum", "<i8"),  # total_len of the sampled rows
        ("computed_sum", "<i8"),  # num_computed_tokens of the sampled rows
        ("rows", "<u4"),  # requests sampled: the cached ones of the step
        ("excess_rows", "<u4"),  # of which longer on the device than the scheduler allows
        ("total_excess", "<i4"),  # largest total_len beyond prompt and scheduler's output
        ("computed_excess", "<i4"),  # largest num_computed_tokens beyond the scheduler's
    ]
)
DEVICE = struct.Struct("<QQQQQqqIIii")
DEVICE_OFFSET = OWN_OFFSET + OWN_BYTES
DEVICE_BYTES = 128

TABLE_OFFSET = DEVICE_OFFSET + DEVICE_BYTES
TABLE_HEAD = struct.Struct("<QII")
"""
Head of the request table: sequence word (odd while it is written), rows in use, requests that drift.
"""
TABLE_HEAD_BYTES = 64
TABLE_CAPACITY = 32
REQUEST_ID_BYTES = 80
REQUEST_DTYPE = np.dtype(
    [
        ("step", "<u8"),
        ("first_drift_step", "<u8"),
        ("state_length", "<u4"),
        ("scheduler_length", "<u4"),
        ("drift", "<i4"),
        ("margin", "<i4"),  # MARGIN_UNKNOWN where it is not known
        ("masked", "u1"),
        ("id_length", "u1"),
        ("reserved", "u1", (14,)),
        ("request_id", "u1", (REQUEST_ID_BYTES,)),
    ]
)
REQUEST = struct.Struct(f"<QQIIiiBB14x{REQUEST_ID_BYTES}s")
MARGIN_UNKNOWN = -(1 << 31)
TABLE_BYTES = TABLE_HEAD_BYTES + TABLE_CAPACITY * REQUEST_DTYPE.itemsize

STEP_DTYPE = np.dtype(
    [
        # begun: what the scheduler said, before the runner saw it
        ("step", "<u8"),  # ordinal of the step, from 1
        ("batch_hash", "<u8"),  # rolling: equal on two ranks only if all their steps so far were the same
        ("begin_ns", "<u8"),
        ("new", "<u4"),  # requests scheduled for the first time
        ("cached", "<u4"),  # requests that the rank already had
        ("finished", "<u4"),
        ("scheduled_tokens", "<u4"),
        ("drafting", "<u4"),  # requests scheduled with draft tokens
        ("generation", "<u4"),  # control generation that this rank had acted on
        # state updated
        ("state_sum", "<u8"),  # request-state lengths of the cached requests of the batch
        ("scheduler_sum", "<u8"),
        ("drift_sum", "<i8"),
        ("trimmed_total", "<u8"),  # tokens that the trim fix took off, since the start
        ("dropped_total", "<u8"),  # received rows not used, as their request was freed since
        ("state_max", "<u4"),
        ("scheduler_max", "<u4"),
        ("drift_max", "<i4"),
        ("drifting", "<u4"),  # requests with drift > 0
        ("mitigation", "<u4"),  # MitigationState of the trim fix
        ("lengths", "<u4"),  # `Lengths`: what the lengths of this record count; 0: they are unknown
        ("queue_depth", "<u2"),  # slots of the receive queue; 0 where there is none
        ("queue_filled", "<u2"),  # of which wait to be used, before this step's receive
        ("state_pad", "<u4"),
        # decided
        ("decide_ns", "<u8"),
        ("mask_hash", "<u8"),  # of the ids of the masked requests, whatever their order; 0 if none
        ("broadcasts_total", "<u8"),  # guard decisions so far, by kind
        ("skips_total", "<u8"),
        ("posted_total", "<u8"),  # collectives of the sampled-token exchange posted so far
        ("requests", "<u4"),  # rows of the batch
        ("masked", "<u4"),
        ("width", "<u4"),  # columns of the sampled-token collective as this rank posts it; 0: unknown
        ("guard", "u1"),
        ("role", "u1"),
        ("mask_known", "u1"),
        ("posted", "u1"),  # collectives of the sampled-token exchange posted in this step
        # done
        ("end_ns", "<u8"),
        ("completed_total", "<u8"),  # collectives known to have completed (only where a call returns at completion)
        ("own_ns_total", "<u8"),  # time that our hooks took, in the steps in which it was measured
        ("own_ns", "<u4"),  # the same in this step; 0 where it was not measured
        ("reserved", "u1", (10,)),
        ("failed", "u1"),  # 1: an error of vLLM ended the step, in the phase that the record shows
        ("phase", "u1"),
    ]
)
PART_BEGUN = struct.Struct("<QqQIIIIII")  # the hash comes signed; its bits are what counts
PART_STATE = struct.Struct("<QQqQQIIiIIIHHxxxx")
PART_DECIDED = struct.Struct("<QQQQQIIIBBBB")
PART_DONE = struct.Struct("<QQQI")
PART_STATE_OFFSET = PART_BEGUN.size
PART_DECIDED_OFFSET = PART_STATE_OFFSET + PART_STATE.size
PART_DONE_OFFSET = PART_DECIDED_OFFSET + PART_DECIDED.size
RECORD_BEGUN = struct.Struct(f"{PART_BEGUN.format}{STEP_DTYPE.itemsize - PART_BEGUN.size}x")
"""
The first part and zeros for the rest of the record: what a later part fails to write is then unknown, not of an older step.
"""
PART_STATE_EQUAL = struct.Struct("<QQ8xQQII8xIIHHxxxx")
"""
The state part of a step without drift: state_sum, scheduler_sum, trimmed_total, dropped_total, state_max, scheduler_max,
mitigation, lengths, queue_depth, queue_filled.
"""
PHASE_OFFSET = STEP_DTYPE.itemsize - 1
FAILED_OFFSET = STEP_DTYPE.itemsize - 2

RING_OFFSET = (TABLE_OFFSET + TABLE_BYTES + 4095) // 4096 * 4096
RING_CAPACITY = 4096

OWN_TIME_STEPS = 32
"""
Own time is measured in every step whose ordinal this divides: reading the clock is a good part of what it would measure.
"""

WORD, HALF = struct.Struct("<Q"), struct.Struct("<I")

# The control word: desired (1 bit), mitigation (3 bits), generation (20 bits), effective step (40 bits).
MAX_GENERATION = (1 << 20) - 1
MAX_EFFECTIVE_STEP = (1 << 40) - 1


def file_bytes(ring_capacity: int) -> int:
    """
    Size of a flight file whose ring holds `ring_capacity` steps.
    """
    return RING_OFFSET + ring_capacity * STEP_DTYPE.itemsize


def encode_control(mitigation: int, generation: int, effective_step: int, *, desired: bool) -> int:
    """
    The control word as one integer of 64 bits, never 0.

    Raises:
        ValueError: a part does not fit.

    """
    if not (0 < mitigation < 8 and 0 < generation <= MAX_GENERATION and 0 <= effective_step <= MAX_EFFECTIVE_STEP):
        msg = f"control word out of range: mitigation {mitigation}, generation {generation}, effective step {effective_step}"
        raise ValueError(msg)
    return int(desired) | mitigation << 1 | generation << 4 | effective_step << 24


def decode_control(word: int) -> tuple[int, int, int, bool]:
    """
    Mitigation, generation, effective step and desired state in a control word.
    """
    return word >> 1 & 7, word >> 4 & MAX_GENERATION, word >> 24, bool(word & 1)
