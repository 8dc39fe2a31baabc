"""
`rankscope-exporter`: the command line.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from rankscope_exporter import __version__
from rankscope_exporter.commands import parsers
from rankscope_exporter.serve import signals

EPILOG = """\
Every flag can be given in the environment instead: --flight-dir as RANKSCOPE_FLIGHT_DIR, and so on; a flag wins.

  rankscope-exporter serve                               serve the flight files of this node
  rankscope-exporter run -- vllm serve MODEL ...         start vLLM and serve beside it
  rankscope-exporter doctor                              can this vLLM be seen, and is its trim fix available?
  rankscope-exporter dump|copy|tail                      look into flight files, keep them, follow them
"""
_FLAGS = (
    "flight_dir", "host", "port", "retention_seconds", "allowed_hosts", "read_token_file", "control_token_file", "tls_cert_file", "tls_key_file",
    "tls_client_ca_file", "nccl_ras", "nccl_ras_seconds", "max_connections", "request_seconds", "keep_alive_seconds", "request_rate", "request_burst", "failure_rate", "failure_burst",
)  # fmt: skip


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flight-dir", metavar="DIR", help="directory of the flight files (/dev/shm/rankscope)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, help="port to listen on (9610); 0 picks a free one")
    parser.add_argument(
        "--retention-seconds",
        type=float,
        metavar="S",
        help="how long the files of processes that are gone are kept (3600)",
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        help="names, separated by commas, by which clients may call besides localhost, this host's name and IP addresses",
    )
    parser.add_argument(
        "--nccl-ras",
        metavar="PORTS",
        help="RAS ports of NCCL to ask: auto (localhost:28028), off, or host:port, several separated by commas",
    )
    parser.add_argument(
        "--nccl-ras-seconds", type=float, metavar="S", help="time between two questions to a RAS port of NCCL (15)"
    )
    _add_access_flags(parser.add_argument_group("who may call", "Files are read anew when they change."))
    _add_limit_flags(parser.add_argument_group("limits"))


def _add_access_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--read-token-file",
        metavar="FILE",
        help="file with the token that every request but /healthz must bring; without a token (here or in RANKSCOPE_READ_TOKEN) "
        "whoever reaches the address can read",
    )
    group.add_argument(
        "--control-token-file",
        metavar="FILE",
        help="file with the token that control commands must bring, which may read too; without a token (here or in "
        "RANKSCOPE_CONTROL_TOKEN) control is off",
    )
    group.add_argument(
        "--tls-cert-file", metavar="FILE", help="certificate chain in PEM form; with it and its key, TLS is on"
    )
    group.add_argument("--tls-key-file", metavar="FILE", help="key of the certificate, not readable by others")
    group.add_argument(
        "--tls-client-ca-file",
        metavar="FILE",
        help="authority of client certificates: clients without one are refused (mutual TLS)",
    )


def _add_limit_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections at a time (256); one more ends the one that has been idle longest",
    )
    group.add_argument(
        "--request-seconds", type=float, metavar="S", help="time for a client to send a request or to agree on TLS (10)"
    )
    group.add_argument(
        "--keep-alive-seconds", type=float, metavar="S", help="how long an idle connection stays open (20)"
    )
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="N",
        help="requests per second from one address in the long run (50); 0: no limit",
    )
    group.add_argument("--request-burst", type=int, metavar="N", help="requests at once from one address (100)")
    group.add_argument(
        "--failure-rate",
        type=float,
        metavar="N",
        help="wrong tokens per second from one address in the long run (1); 0: no limit",
    )
    group.add_argument("--failure-burst", type=int, metavar="N", help="wrong tokens at once from one address (10)")


def build_parser() -> argparse.ArgumentParser:
    """
    The parser of all commands but `simulate`, which has its own.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope-exporter",
        description="What every pipeline rank of a vLLM engine believes about every request, as Prometheus metrics.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve the flight files of this node over HTTP",
        description="Serve the flight files of this node over HTTP.",
    )
    _add_serve_flags(serve)

    run = commands.add_parser(
        "run",
        help="start a command (vLLM) and serve beside it",
        description="Start a command (vLLM) and serve beside it. Signals go to the command, and its exit code becomes this one's "
        "(128 + n if signal n ended it). If serving fails, the command goes on.",
        usage="rankscope-exporter run [flags] -- COMMAND [ARGS ...]",
    )
    _add_serve_flags(run)
    run.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments, after --"
    )

    doctor = commands.add_parser(
        "doctor",
        help="what the installed vLLM looks like to every hook, and whether the trim fix is available",
        description="Tell what the installed vLLM looks like to every hook, and whether the trim fix is available, or why not. "
        "Exit code 0 if all is well, 1 if something cannot be seen.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    parsers.add_commands(commands)
    commands.add_parser(
        "simulate", help="start simulated engines, without vLLM (`simulate --help` for more)", add_help=False
    )
    commands.add_parser(
        "metrics-doc", help="print docs/metrics.md", description="Print the documentation of all metrics, as Markdown."
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command; 0 if it went well, 1 if it did not, 2 if it was called wrongly.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["simulate"]:
        from rankscope_exporter.simulation.cli import main as simulate  # noqa: PLC0415  # numpy and processes, for this command only

        return simulate(arguments[1:])
    options = build_parser().parse_args(arguments)
    if options.command == "doctor":
        return _doctor(as_json=options.json)
    if options.command in parsers.COMMANDS:
        return parsers.run(options)
    if options.command == "metrics-doc":
        from rankscope_exporter.contract.metrics import markdown  # noqa: PLC0415

        sys.stdout.write(markdown())
        return 0
    mask = signals.block() if options.command == "run" else set()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return _serve_or_run(options, mask)


def _serve_or_run(options: argparse.Namespace, mask: signals.Mask) -> int:
    from rankscope_exporter.serve.settings import ServeSettings, SettingsError  # noqa: PLC0415  # `doctor` runs without a web server

    given: dict[str, Any] = {name: value for name in _FLAGS if (value := getattr(options, name)) is not None}
    try:
        settings = ServeSettings(**given)
        if options.command == "serve":
            from rankscope_exporter.serve.server import serve  # noqa: PLC0415

            return serve(settings)
        command = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
        if command:
            from rankscope_exporter.serve.child import run  # noqa: PLC0415

            return run(command, settings, os.environ, mask)
        problems = ["run: no command; write it after --, as in `rankscope-exporter run -- vllm serve MODEL`"]
    except ValidationError as error:
        problems = [_setting_problem(problem, given) for problem in error.errors(include_url=False)]
    except SettingsError as error:
        problems = [str(error)]
    if options.command == "run":
        signals.restore(mask)
    for problem in problems:
        sys.stderr.write(f"rankscope-exporter: {problem}\n")
    return 2


def _setting_problem(problem: Any, given: dict[str, Any]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    # A setting from the environment is reported in lower case, with or without the prefix.
    name = name.lower().removeprefix("rankscope_")
    source = f"--{name.replace('_', '-')}" if name in given else f"RANKSCOPE_{name.upper()}"
    return f"{source}: {problem['msg']} (got {problem['input']!r})"


def _doctor(*, as_json: bool) -> int:
    from rankscope_exporter.doctor import examine  # noqa: PLC0415  # imports vLLM, which takes seconds

    # vLLM logs to standard output while it is imported, and that holds the answer.
    write = sys.stdout.write
    with contextlib.redirect_stdout(sys.stderr):
        return examine(as_json=as_json, write=write)


if __name__ == "__main__":
    sys.exit(main())
