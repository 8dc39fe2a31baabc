"""
Everything in a flight file besides steps and requests, as names and values.
"""

from typing import Any

from rankscope_exporter.commands.facts import step_facts
from rankscope_exporter.commands.ranks import RankFlight
from rankscope_exporter.commands.text import cell, moment_text
from rankscope_exporter.contract.words import Mitigation
from rankscope_exporter.flight import FlightError, layout
from rankscope_exporter.flight.layout import decode_control


def header_facts(rank: RankFlight) -> dict[str, Any]:
    """
    Identity, report, control, live words, histograms and device lengths, ready for JSON. A damaged area is None, and why
    stands under `damaged`.
    """
    flight = rank.flight
    damaged = []
    areas: dict[str, Any] = {}
    for name, read in (("identity", flight.identity), ("report", flight.report)):
        try:
            areas[name] = read()
        except FlightError as error:  # noqa: PERF203  one bad area must not hide the other
            areas[name] = None
            damaged.append(str(error))
    failed, last_failed = flight.failed_steps()
    lengths, own = flight.histograms(), flight.own_time()
    newest = flight.records(after=max(flight.step() - 1, 0))
    return {
        "kind": "header",
        "file": flight.path.name,
        "format_version": flight.version,
        "pid": flight.pid,
        "process_start_ticks": flight.process_start_ticks,
        "created_unix": flight.created_unix,
        "created_monotonic_ns": flight.created_monotonic_ns,
        "ring_steps": flight.ring_capacity,
        "last_step": flight.step(),
        "last_phase": step_facts(newest[-1])["phase"] if len(newest) else None,
        "detail": flight.detail().name.lower(),
        "faults": flight.faults(),
        "failed_steps": failed,
        "last_failed_step": last_failed or None,
        **areas,
        "control": _control(rank),
        "lengths": {
            "samples": lengths.samples,
            "state": lengths.state,
            "state_sum": lengths.state_sum,
            "scheduler": lengths.scheduler,
            "scheduler_sum": lengths.scheduler_sum,
            "bounds": [None if bound == float("inf") else int(bound) for bound in layout.BUCKET_BOUNDS],
        },
        "own_time": {
            "steps": own.steps,
            "seconds": own.seconds,
            "bounds_seconds": [None if bound == float("inf") else bound for bound in layout.OWN_BOUNDS],
        },
        "device_lengths": _device(rank),
        "damaged": damaged,
    }


def _control(rank: RankFlight) -> dict[str, Any]:
    control = rank.flight.control()

    def word(value: int) -> dict[str, Any] | None:
        if not value:
            return None
        mitigation, generation, step, desired = decode_control(value)
        known = {int(m): m.name.lower() for m in Mitigation}
        return {
            "mitigation": known.get(mitigation, f"unknown ({mitigation})"),
            "generation": generation,
            "effective_step": step,
            "desired": desired,
        }

    return {
        "requested": word(control.requested_word),
        "observed": word(control.observed_word),
        "acted": word(control.acted_word),
        "acted_step": control.acted_step if control.acted_word else None,
        "outcome": control.outcome.name.lower(),
        "trim_fix": control.mitigation_state.name.lower(),
    }


def _device(rank: RankFlight) -> dict[str, int] | None:
    sample = rank.flight.device_lengths()
    if sample is None:
        return None
    return {name: int(sample[name]) for name in layout.DEVICE_DTYPE.names or () if name != "sequence"}


def header_lines(facts: dict[str, Any]) -> list[str]:
    """
    The same for people: one line a fact, histograms without their empty buckets.
    """
    facts = {name: value for name, value in facts.items() if name != "kind"}
    facts["created_unix"] = moment_text(facts["created_unix"])
    lengths, own = facts["lengths"], facts["own_time"]
    bounds = ["inf" if bound is None else str(bound) for bound in lengths["bounds"]]
    facts["lengths"] = {
        "samples": lengths["samples"],
        **{name: _buckets(lengths[name], bounds) for name in ("state", "scheduler")},
    }
    microseconds = ["inf" if bound is None else f"{bound * 1e6:g}us" for bound in own["bounds_seconds"]]
    facts["own_time"] = {"seconds": own["seconds"], "steps": _buckets(own["steps"], microseconds)}
    return _lines(facts, 0)


def _buckets(counts: tuple[int, ...], bounds: list[str]) -> str | None:
    filled = [f"<={bound}: {count}" for bound, count in zip(bounds, counts, strict=True) if count]
    return ", ".join(filled) or None


def _lines(value: Any, depth: int) -> list[str]:
    """
    Nested names and values, one a line; depth and size are bounded by the areas that they came from.
    """
    indent = "  " * depth
    lines = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{cell(name)}:", *_lines(item, depth + 1)]
        elif isinstance(item, list) and item:
            lines.append(f"{indent}{cell(name)}:")
            for entry in item:
                text = (
                    ", ".join(f"{cell(k)} {cell(v)}" for k, v in entry.items())
                    if isinstance(entry, dict)
                    else cell(entry)
                )
                lines.append(f"{indent}  {text}")
        else:
            lines.append(f"{indent}{cell(name)}: {cell(None if item in ({}, [], '') else item)}")
    return lines
