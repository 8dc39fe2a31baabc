"""
The flags of `dump`, `copy` and `tail`, and what runs when they are given.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

COMMANDS = ("dump", "copy", "tail")
INTERVAL_SECONDS = 0.2


def add_commands(commands: Any) -> None:
    """
    Add the parsers to the subparsers of the command line.
    """
    _add_dump(commands)
    _add_copy(commands)
    _add_tail(commands)


def _add_dump(commands: Any) -> None:
    parser = commands.add_parser(
        "dump",
        help="print what flight files hold: steps, requests that drift, or everything else",
        description="Print the steps that flight files hold. Works on the files of live, hung and dead ranks, and on copies.",
        epilog="Exit code 0 if everything could be read, 1 if not, 2 if called wrongly, 3 if --align found a difference.\n\n"
        "  rankscope-exporter dump /dev/shm/rankscope --last 5\n"
        "  rankscope-exporter dump --align incident/*.flight\n"
        "  rankscope-exporter dump --json FILE | jq 'select(.drift_max > 0) | .step'\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("places", nargs="+", type=Path, metavar="FILE", help="a flight file, or a directory of them")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_const", dest="form", const="json", help="one JSON object a line; null is unknown"
    )
    form.add_argument(
        "--csv", action="store_const", dest="form", const="csv", help="comma-separated values; empty is unknown"
    )
    parser.add_argument("--after", type=_count, metavar="STEP", help="only steps after this one")
    parser.add_argument("--last", type=_count, metavar="N", help="only the newest N steps (table: 40; else all)")
    parser.add_argument("--requests", action="store_true", help="the requests that drift most, instead of steps")
    parser.add_argument(
        "--header",
        action="store_true",
        help="identity, hooks, mitigations, control, own time and lengths, instead of steps",
    )
    parser.add_argument(
        "--align",
        action="store_true",
        help="the ranks of one engine side by side, step by step; the first step in which two differ is marked",
    )
    parser.set_defaults(form="table", parser=parser)


def _add_copy(commands: Any) -> None:
    parser = commands.add_parser(
        "copy",
        help="keep flight files as they are now, for an incident",
        description="Copy flight files as they are now, also while they are written. A copy holds whole records and whole areas "
        "only: each is read until the rank was not in the middle of it, and the copy is put together from them. Copies are "
        "named with the time (UTC), and can be read by `dump` on any machine. Nothing is overwritten.",
        epilog="Exit code 0 if everything was copied, 1 if not, 2 if called wrongly.\n\n"
        "  rankscope-exporter copy /dev/shm/rankscope incident-4711\n"
        "  rankscope-exporter copy /dev/shm/rankscope incident-4711.tar.gz\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="DIR_OR_FILE", help="flight files, or directories of them"
    )
    parser.add_argument(
        "destination", type=Path, metavar="DEST", help="a directory, made if it is not there, or a new .tar.gz"
    )
    parser.set_defaults(parser=parser)


def _add_tail(commands: Any) -> None:
    parser = commands.add_parser(
        "tail",
        help="follow live ranks, one line a step",
        description="Follow live ranks, one line for each step of each rank, from now on and until Ctrl-C. Says when a rank is "
        "stopped or gone, when a step stands still, and when steps were lost between two looks.",
        epilog="  rankscope-exporter tail                  all ranks of this node, those that come later too\n"
        "  rankscope-exporter tail ENGINE           the ranks of one engine; the beginning of its name is enough\n"
        "  rankscope-exporter tail FILE.flight      one rank\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", metavar="ENGINE|FILE", help="what to follow (all ranks of the node)")
    parser.add_argument("--from-start", action="store_true", help="begin with the oldest step that the file holds")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=INTERVAL_SECONDS,
        metavar="S",
        help=f"time between two looks ({INTERVAL_SECONDS})",
    )
    parser.add_argument(
        "--flight-dir", type=Path, metavar="DIR", help="directory of the flight files (/dev/shm/rankscope)"
    )
    parser.set_defaults(parser=parser)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        msg = f"not a whole number from 0 on: {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.01 <= (seconds := float(text)) <= 3600:
            return seconds
    msg = f"not a number of seconds from 0.01 to 3600: {text!r}"
    raise argparse.ArgumentTypeError(msg)


def run(options: argparse.Namespace) -> int:
    """
    Run one of `COMMANDS`; the exit code. Ends quietly if nobody reads on (`| head`).
    """
    if hasattr(sys.stdout, "reconfigure"):  # names of files and engines may not fit into the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = {"dump": _dump, "copy": _copy, "tail": _tail}[options.command](options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0 if options.command == "tail" else 128 + signal.SIGINT
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _complain(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"rankscope-exporter: {text}\n")


def _dump(options: argparse.Namespace) -> int:
    from rankscope_exporter.commands.dump import DumpOptions, dump  # noqa: PLC0415  # numpy, for this command only

    if options.align and (options.header or options.requests):
        options.parser.error("--align shows steps; give --header or --requests without it")
    if options.form == "csv" and (options.header or options.align):
        options.parser.error("--csv has steps or --requests; use --json for --header and --align")
    chosen = DumpOptions(
        form=options.form, after=options.after, last=options.last, header=options.header, requests=options.requests, align=options.align,
    )  # fmt: skip
    if (options.header or options.requests) and (options.after is not None or options.last is not None):
        options.parser.error("--after and --last choose steps; give --header or --requests without them")
    return dump(options.places, chosen, sys.stdout, _complain)


def _copy(options: argparse.Namespace) -> int:
    from rankscope_exporter.commands.archive import copy  # noqa: PLC0415  # numpy, for this command only

    return copy(options.places, options.destination, time.time(), sys.stdout, _complain)


def _tail(options: argparse.Namespace) -> int:
    from rankscope_exporter.commands.tail import tail  # noqa: PLC0415  # numpy, for this command only
    from rankscope_exporter.settings import DEFAULT_FLIGHT_DIR  # noqa: PLC0415

    directory = options.flight_dir or Path(os.environ.get("RANKSCOPE_FLIGHT_DIR") or DEFAULT_FLIGHT_DIR)
    return tail(
        options.target,
        directory,
        from_start=options.from_start,
        interval=options.interval,
        out=sys.stdout,
        complain=_complain,
    )
