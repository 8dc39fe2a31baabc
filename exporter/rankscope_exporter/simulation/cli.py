"""
`rankscope-exporter simulate`: simulated engines with an exporter process each, until it is told to end.
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from rankscope_exporter.simulation.engine import run_engine
from rankscope_exporter.simulation.exporters import Exporter, ExporterError, make_token, start_exporter
from rankscope_exporter.simulation.options import DEPLOYMENT_HELP, OptionError, figure, parse_deployment
from rankscope_exporter.simulation.spec import EngineSpec, Workload
from rankscope_exporter.simulation.targets import Target, render_targets, write_whole

DEFAULT_DEPLOYMENTS = ("name=baseline,role=baseline", "name=canary,role=canary")

START_SECONDS = 30.0
"""
How long an engine or an exporter process may take to come up, on a machine that is busy with other things.
"""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_FORK = multiprocessing.get_context("fork")


class StopError(Exception):
    """
    Somebody wants the simulation to end.
    """


@dataclass(slots=True)
class _Engine:
    """
    The processes of one deployment; `wire` tells whether the engine came up.
    """

    spec: EngineSpec
    process: ForkProcess
    wire: Connection
    exporter: Exporter | None = None

    def wait_until_ready(self, host: str) -> None:
        """
        Return once the engine's ranks are hooked and its exporter process answers.

        Raises:
            OSError: the engine did not come up.
            ExporterError: its exporter process did not.

        """
        try:
            if not self.wire.poll(START_SECONDS):
                raise OSError(f"engine {self.spec.name} did not come up in {START_SECONDS:g} s")
            hooked = self.wire.recv()
        except EOFError:
            hooked = False
        if not hooked:
            raise OSError(f"engine {self.spec.name} did not come up; the reason is above")
        if self.exporter is not None:
            self.exporter.wait_until_ready(host, START_SECONDS)

    def end(self) -> None:
        """
        End the engine; its ranks go with it.
        """
        self.process.kill()
        self.process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the simulation; 0 if it was told to end, 1 if something failed, 2 if the command line cannot be used.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    parser = make_parser()
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        _raise_on_signals(stack)
        try:
            directory = _directory(args.dir, stack)
            return _simulate(read_specs(args, directory), args, stack)
        except OptionError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
            return 2
        except (ExporterError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
            return 1
        except StopError:
            return 0
        finally:
            for number in STOP_SIGNALS:  # ending is not to be interrupted
                signal.signal(number, signal.SIG_IGN)


def make_parser() -> argparse.ArgumentParser:
    """
    The command line.
    """
    workload = Workload()
    parser = argparse.ArgumentParser(
        prog="rankscope-exporter simulate",
        description="Start simulated engines whose ranks drift apart as vLLM's do, with an exporter process each. "
        "Only model and scheduler are simulated; flight files, control and the trim fix are real. Ends with Ctrl-C.",
    )
    add = parser.add_argument
    add(
        "--deployment",
        action="append",
        metavar="KEY=VALUE,...",
        help=f"an engine, repeatable; {DEPLOYMENT_HELP} (default: a baseline and a canary)",
    )
    add("--healthy", action="store_true", help="nothing goes wrong: every engine starts with the trim fix on")
    add(
        "--hold",
        type=figure(float, 0, 1e6, "seconds"),
        default=workload.hold_seconds,
        metavar="SECONDS",
        help="how long steady traffic holds an engine open (default: %(default)g)",
    )
    add(
        "--lull",
        type=figure(float, 0, 1e6, "seconds"),
        default=workload.lull_seconds,
        metavar="SECONDS",
        help="how long traffic is nearly quiet after that; it wedges an engine without the fix (default: %(default)g)",
    )
    add(
        "--restart-after",
        type=figure(float, 0.1, 1e6, "seconds"),
        metavar="SECONDS",
        help="restart an engine that stands still for so long (default: leave it)",
    )
    add(
        "--rate",
        type=figure(float, 0.1, 1000, "steps per second"),
        default=workload.steps_per_second,
        metavar="STEPS",
        help="steps per second of an engine (default: %(default)g)",
    )
    add("--seed", type=int, default=workload.seed, help="the same seed gives the same traffic (default: %(default)d)")
    add(
        "--dir",
        type=Path,
        help="where flight files and control tokens are put (default: a new directory on a memory file system, removed at the end)",
    )
    add(
        "--targets-file",
        type=Path,
        metavar="FILE",
        help="write the deployments for `rankscope serve --config` there once all are up (default: standard output)",
    )
    add("--host", default="127.0.0.1", help="address that the exporter processes listen on (default: %(default)s)")
    add("--advertise-host", metavar="NAME", help="name of this machine in the targets (default: as --host)")
    add(
        "--first-port",
        type=figure(int, 0, 65000, "a port"),
        default=0,
        metavar="PORT",
        help="port of the first exporter process, the next one follows (default: free ones)",
    )
    add("--no-exporters", action="store_true", help="start engines only: exporter processes run elsewhere")
    return parser


def read_specs(args: argparse.Namespace, directory: Path) -> list[EngineSpec]:
    """
    The engines that the command line asks for.

    Raises:
        OptionError: a deployment cannot be simulated, or two have one name.

    """
    workload = Workload(hold_seconds=args.hold, lull_seconds=args.lull, steps_per_second=args.rate, seed=args.seed)
    default = EngineSpec("", directory, workload, restart_after=args.restart_after)
    specs = [parse_deployment(text, default, directory) for text in args.deployment or DEFAULT_DEPLOYMENTS]
    if len({spec.name for spec in specs}) < len(specs):
        raise OptionError("--deployment: two deployments have the same name")
    return [replace(spec, fix=True) for spec in specs] if args.healthy else specs


def _raise_on_signals(stack: ExitStack) -> None:
    def stop(*_: object) -> None:
        raise StopError

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # as under nohup
        stack.callback(signal.signal, number, signal.signal(number, stop))


def _directory(wanted: Path | None, stack: ExitStack) -> Path:
    if wanted is not None:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        return wanted.absolute()
    memory = Path("/dev/shm")  # noqa: S108  flight files belong on a memory file system
    made = Path(tempfile.mkdtemp(prefix="rankscope-simulation-", dir=memory if os.access(memory, os.W_OK) else None))
    stack.callback(shutil.rmtree, made, ignore_errors=True)
    return made


def _simulate(specs: Sequence[EngineSpec], args: argparse.Namespace, stack: ExitStack) -> int:
    if args.targets_file is not None:
        args.targets_file.parent.mkdir(parents=True, exist_ok=True)
        args.targets_file.unlink(missing_ok=True)  # one of an earlier run would lead a server astray
    engines = [_start_engine(spec, stack) for spec in specs]
    targets = []
    for position, engine in enumerate(engines):
        if args.no_exporters:
            break
        flight_dir = engine.spec.flight_dir
        token_file = flight_dir.with_name("control-token")
        make_token(token_file)
        port = args.first_port + position if args.first_port else 0
        engine.exporter = start_exporter(flight_dir, token_file, args.host, port)
        stack.callback(engine.exporter.end)
        url = f"http://{_in_url(args.advertise_host or args.host)}:{engine.exporter.port}"
        targets.append(Target(engine.spec.name, engine.spec.role, url, token_file))
    for engine in engines:
        engine.wait_until_ready(args.host)
    if targets:
        _publish(render_targets(targets), args.targets_file)
    return _watch(engines)


def _start_engine(spec: EngineSpec, stack: ExitStack) -> _Engine:
    spec.flight_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=run_engine, args=(spec, theirs, os.getpid()))
    process.start()
    theirs.close()
    engine = _Engine(spec, process, ours)
    stack.callback(engine.end)
    return engine


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _publish(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(path, text)
        logging.getLogger("rankscope.simulation").info("deployments are in %s", path)


def _watch(engines: Sequence[_Engine]) -> int:
    """
    Wait until a child that should stay has ended.
    """
    children = {engine.process.sentinel: f"engine {engine.spec.name}" for engine in engines}
    for engine in engines:
        if engine.exporter is not None:
            children[engine.exporter.process.sentinel] = f"the exporter process of {engine.spec.name}"
    ended = wait(list(children))
    names = " and ".join(name for sentinel, name in children.items() if sentinel in ended)
    raise OSError(f"{names} ended; the reason is above")
