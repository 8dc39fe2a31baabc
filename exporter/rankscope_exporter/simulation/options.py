"""
Reading options: `--deployment name=...,role=...,accept=0.8,...` into the description of an engine, and figures.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankscope_exporter.simulation.spec import EngineSpec

ROLES = ("baseline", "canary", "none")


class OptionError(ValueError):
    """
    A deployment that cannot be simulated; the message names the part and what it may be.
    """


@dataclass(frozen=True, slots=True)
class _Part:
    """
    A key of `--deployment`: how its text is read, and what is said of a text that is not that.
    """

    read: Callable[[str], Any]
    wanted: str
    of_workload: bool = False


def _within(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        return words[words.index(text)]

    return read


def _name(text: str) -> str:
    if not (text and len(text) <= 40 and text.isascii() and text.replace("-", "").replace("_", "").isalnum()):
        raise ValueError
    return text


_PARTS = {
    "name": _Part(_name, "a word of letters, digits, - and _"),
    "role": _Part(_one_of(*ROLES), f"one of {', '.join(ROLES)}"),
    "fix": _Part(lambda text: _one_of("on", "off")(text) == "on", "on or off"),
    "pp": _Part(_within(int, 2, 16), "a number of pipeline ranks from 2 to 16"),
    "accept": _Part(_within(float, 0, 1), "a chance from 0 to 1", of_workload=True),
    "k": _Part(_within(int, 0, 16), "a number of draft tokens from 0 to 16", of_workload=True),
    "arrivals": _Part(_within(float, 0.01, 1000), "requests per second, from 0.01 to 1000", of_workload=True),
    "slots": _Part(_within(int, 1, 1024), "a number of requests from 1 to 1024", of_workload=True),
}
_FIELDS = {"pp": "pp_size", "k": "draft_tokens"}

DEPLOYMENT_HELP = "; ".join(f"{key}: {part.wanted}" for key, part in _PARTS.items())


def parse_deployment(text: str, default: EngineSpec, directory: Path) -> EngineSpec:
    """
    The engine that `text` describes, below `directory`; what it leaves open is as in `default`.

    Raises:
        OptionError: a part is not known, given twice, or has a value that cannot be.

    """
    engine: dict[str, Any] = {}
    workload: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals or key not in _PARTS:
            raise OptionError(
                f"--deployment {text}: {item.strip()!r} should read KEY=VALUE with a KEY of {', '.join(_PARTS)}"
            )
        part, field = _PARTS[key], _FIELDS.get(key, key)
        values = workload if part.of_workload else engine
        if field in values:
            raise OptionError(f"--deployment {text}: {key} is given twice")
        try:
            values[field] = part.read(value)
        except ValueError:
            raise OptionError(f"--deployment {text}: {key} is {value!r} and should be {part.wanted}") from None
    if "name" not in engine:
        raise OptionError(f"--deployment {text}: it has no name, add name=NAME")
    engine["flight_dir"] = directory / engine["name"] / "flight"
    return replace(default, workload=replace(default.workload, **workload), **engine)


def figure(kind: Callable[[str], Any], low: float, high: float, what: str) -> Callable[[str], Any]:
    """
    A reader of command line figures, for argparse: `what`, as `kind` reads it, from `low` to `high`.
    """
    read_within = _within(kind, low, high)

    def read(text: str) -> Any:
        try:
            return read_within(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} should be {what} from {low:g} to {high:g}") from None

    return read
