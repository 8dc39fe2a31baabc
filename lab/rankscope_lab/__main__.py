"""
`python -m rankscope_lab`: set the lab up, run it, look at it, clean up after it.

Exit status: 0 well, 1 something failed (the message says what to do), 2 called wrongly, 3 `status` found no running lab.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankscope_lab import checkpoint, environment, processes, state, supervisor

EPILOG = """\
  setup     half a minute to 2 minutes and 4 GB the first time, a moment afterwards
  run       the dashboard, and all that `up` starts
  up        both engines, their exporters and traffic, until Ctrl-C; leaves no process behind
  status    what runs, and how its requests fare
  down      end a running lab, or clean up after one that was killed

examples:
  python -m rankscope_lab up                        hold the guard open for 3 minutes, then let the unfixed engines wedge
  python -m rankscope_lab up --hold 600             more time to look around
  python -m rankscope_lab up --fix canary --hold 20 the canary starts with the trim fix on
"""
END_SECONDS = 30.0


def _positive(text: str) -> float:
    value = float(text)
    if not value >= 0:
        msg = f"{text} is negative"
        raise argparse.ArgumentTypeError(msg)
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        msg = f"{text} does not lie between 0 and 1"
        raise argparse.ArgumentTypeError(msg)
    return value


def build_parser() -> argparse.ArgumentParser:
    """
    The command line.
    """
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--venv",
        type=Path,
        metavar="DIR",
        help=f"the lab's environment ({environment.VARIABLE}, else .venv-vllm in the repository)",
    )
    where.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        default=environment.REPOSITORY / "var" / "lab",
        help="logs, checkpoints, targets.yaml and the control token (var/lab in the repository)",
    )
    where.add_argument(
        "--flight-root",
        type=Path,
        metavar="DIR",
        default=Path("/dev/shm/rankscope-lab"),
        help="each deployment's flight directory lies below it (%(default)s)",
    )
    parser = argparse.ArgumentParser(
        prog="python -m rankscope_lab",
        description="Two real vLLM engines on this machine's CPU, whose pipeline ranks drift apart.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    setup = commands.add_parser("setup", parents=[where], help="make the lab's environment and checkpoints")
    setup.add_argument(
        "--release",
        metavar="X.Y.Z",
        default=environment.V1_RELEASE,
        help=f"an environment for another vLLM, such as {environment.V2_RELEASE} for the V2 model runner (%(default)s)",
    )
    up = argparse.ArgumentParser(add_help=False)
    up.add_argument(
        "--hold",
        type=_positive,
        default=180.0,
        metavar="S",
        help="seconds for which traffic holds the guard open (inf: for ever)",
    )
    up.add_argument("--pace-ms", type=_positive, default=30.0, metavar="MS", help="what the drafter adds to each step")
    up.add_argument("--accept", type=_share, default=0.9, metavar="SHARE", help="share of drafts that are right")
    up.add_argument("--slots", type=int, default=16, metavar="N", help="requests in a batch")
    up.add_argument("--draft-tokens", type=int, default=3, metavar="K", help="draft tokens per request and step")
    up.add_argument("--seed", type=int, default=0, metavar="N", help="seed of traffic and acceptance")
    up.add_argument(
        "--exporter-ports", type=int, nargs=2, default=(9611, 9612), metavar="PORT", help="of baseline and canary"
    )
    up.add_argument("--no-exporter", action="store_true", help="start no exporter processes")
    up.add_argument("--no-traffic", action="store_true", help="send no requests")
    up.add_argument(
        "--fix",
        action="append",
        choices=supervisor.ROLES,
        default=[],
        help="start this deployment with the trim fix on (repeatable)",
    )
    up.add_argument("--end-after", type=_positive, metavar="S", help="end after so many seconds of traffic")
    defaults = argparse.ArgumentDefaultsHelpFormatter
    commands.add_parser("up", parents=[where, up], help="start both deployments and traffic", formatter_class=defaults)
    run = commands.add_parser(
        "run", parents=[where, up], help="`up`, and the dashboard beside it", formatter_class=defaults
    )
    run.add_argument("--port", type=int, default=8700, help="where the dashboard listens")
    run.add_argument("--open", action="store_true", help="open the dashboard in a browser")
    commands.add_parser("status", parents=[where], help="what runs, and how its requests fare")
    down = commands.add_parser("down", parents=[where], help="end a running lab, or clean up after one that was killed")
    down.add_argument("--all", action="store_true", help="also what tests and labs in other directories started")
    return parser


def say(line: str) -> None:
    """
    Progress, with the time of day, on standard error.
    """
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run a command; returns the exit status.
    """
    options = build_parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except (environment.SetupError, supervisor.LabError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _environment(options: argparse.Namespace) -> environment.Environment:
    release = getattr(options, "release", environment.V1_RELEASE)
    if options.venv:
        return environment.Environment(options.venv.absolute(), release)
    return environment.of_release(release, os.environ)


def _prepare(options: argparse.Namespace) -> checkpoint.Checkpoints:
    environment.ensure(_environment(options), say)
    return checkpoint.ensure(options.directory.absolute() / "checkpoints", _environment(options).python)


def _setup(options: argparse.Namespace) -> int:
    began = time.monotonic()
    _prepare(options)
    say(f"the lab is set up in {_environment(options).directory} ({time.monotonic() - began:.0f} s)")
    return 0


def _up(options: argparse.Namespace) -> int:
    supervisor.up(
        supervisor.LabOptions(
            environment=_environment(options),
            directory=options.directory.absolute(),
            flight_root=options.flight_root.absolute(),
            exporter_ports=tuple(options.exporter_ports),
            hold_seconds=options.hold,
            pace_ms=options.pace_ms,
            acceptance=options.accept,
            slots=options.slots,
            draft_tokens=options.draft_tokens,
            seed=options.seed,
            exporter=not options.no_exporter,
            traffic=not options.no_traffic,
            fixed=tuple(options.fix),
            end_after=options.end_after,
            server_port=getattr(options, "port", None),
            open_browser=getattr(options, "open", False),
        ),
        _prepare(options),
        say,
    )
    return 0


def _status(options: argparse.Namespace) -> int:
    found = state.read(options.directory)
    if found is None or not found.running():
        print(
            "no lab runs"
            if found is None
            else "no lab runs, and the last one did not end properly: `python -m rankscope_lab down` cleans up"
        )
        return 3
    print(f"a lab runs (process {found.pid}), phase: {found.phase}")
    if found.server_url:
        print(f"dashboard: {found.server_url}")
    for deployment in found.deployments:
        print(
            f"{deployment.name}: {deployment.state}; {deployment.requests} requests answered or given up, {deployment.completed} completed, "
            f"{deployment.tokens} tokens, {deployment.wrong_tokens} of them wrong\n"
            f"  vLLM {deployment.engine_url}, exporter {deployment.exporter_url or 'none'}, log {deployment.log}"
        )
    return 0


def _down(options: argparse.Namespace) -> int:
    found = state.read(options.directory)
    if found and found.running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while found.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        if found.running():
            say(f"process {found.pid} does not end by itself: killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
    killed = supervisor.clean(found, options.flight_root) if found else 0
    if options.all:
        killed += processes.sweep()
    state.path_in(options.directory).unlink(missing_ok=True)
    print(f"no process of the lab is left{f' ({killed} had to be killed)' if killed else ''}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "setup": _setup,
    "run": _up,
    "up": _up,
    "status": _status,
    "down": _down,
}

if __name__ == "__main__":
    sys.exit(main())
