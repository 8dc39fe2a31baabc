"""
Running a command with the server beside it. The command is vLLM: it matters, the server does not.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from rankscope_exporter.serve import signals
from rankscope_exporter.serve.server import bind, create_server, run_in_thread, say
from rankscope_exporter.serve.settings import ServeSettings

logger = logging.getLogger("rankscope.exporter")

_JOIN_SECONDS = 2.0


def exit_code(returncode: int) -> int:
    """
    The exit code that stands for the end of a child: its own, or 128 + n if signal n killed it.
    """
    return returncode if returncode >= 0 else 128 - returncode


def run(command: Sequence[str], settings: ServeSettings, environ: Mapping[str, str], mask: signals.Mask) -> int:
    """
    Start `command` with the flight directory in its environment, serve beside it, and end with its exit code.

    `mask` is what `signals.block` gave: it was called first, and the command starts with signals as they were before.

    Raises:
        SettingsError: a setting cannot be used, or the port is taken; the command was not started then.

    """
    listener = bind(settings)
    try:
        server = create_server(settings, listener)
    except BaseException:
        listener.close()
        raise
    child_environ = {**environ, "RANKSCOPE_FLIGHT_DIR": str(settings.flight_dir)}
    try:
        child = subprocess.Popen(  # noqa: S603  # the command is the operator's own
            command,
            env=child_environ,
            preexec_fn=lambda: signals.restore(mask),  # noqa: PLW1509  # it takes no lock, and no thread of ours was started yet
        )
    except OSError as error:
        listener.close()
        say(f"rankscope-exporter: {command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126
    thread = threading.Thread(target=run_in_thread, args=(server, listener), name="rankscope-server", daemon=True)
    thread.start()
    _wait(child)
    server.should_exit = True
    thread.join(_JOIN_SECONDS)
    return exit_code(child.returncode)


def _wait(child: "subprocess.Popen[bytes]") -> None:
    while child.poll() is None:
        info = signal.sigwaitinfo(signals.WAITED_FOR)
        if info.si_signo != signal.SIGCHLD and signals.is_for_child(info.si_code) and child.poll() is None:
            os.kill(child.pid, info.si_signo)
