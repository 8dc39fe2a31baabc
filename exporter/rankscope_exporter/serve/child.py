"""
Running a command with the server beside it. The command is vLLM: it matters, the server does not.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from rankscope_exporter.serve.server import bind, create_server, run_in_thread, say
from rankscope_exporter.serve.settings import ServeSettings

logger = logging.getLogger("rankscope.exporter")

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KERNEL = 0x80
"""
`si_code` of a signal that a terminal sent (SI_KERNEL): the whole foreground group got it, so the child has it already.
"""
_JOIN_SECONDS = 2.0


def exit_code(returncode: int) -> int:
    """
    The exit code that stands for the end of a child: its own, or 128 + n if signal n killed it.
    """
    return returncode if returncode >= 0 else 128 - returncode


def is_for_child(si_code: int) -> bool:
    """
    Whether a signal that came to this process has to be passed on to its child.
    """
    return si_code != _FROM_KERNEL


def run(command: Sequence[str], settings: ServeSettings, environ: Mapping[str, str]) -> int:
    """
    Start `command` with the flight directory in its environment, serve beside it, and end with its exit code.

    Raises:
        SettingsError: a setting cannot be used, or the port is taken; the command was not started then.

    """
    listener = bind(settings)
    try:
        server = create_server(settings, listener)
    except BaseException:
        listener.close()
        raise
    waited = {*PASSED_ON, signal.SIGCHLD}
    # Blocked from here on and taken one by one below, so none is lost between the start of the child and the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child_environ = {**environ, "RANKSCOPE_FLIGHT_DIR": str(settings.flight_dir)}
    try:
        child = subprocess.Popen(  # noqa: S603  # the command is the operator's own
            command,
            env=child_environ,
            preexec_fn=lambda: _unblock(before),  # noqa: PLW1509  # no thread was started yet
        )
    except OSError as error:
        listener.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        say(f"rankscope-exporter: {command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126
    thread = threading.Thread(target=run_in_thread, args=(server, listener), name="rankscope-server", daemon=True)
    thread.start()
    _wait(child, waited)
    server.should_exit = True
    thread.join(_JOIN_SECONDS)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return exit_code(child.returncode)


def _unblock(mask: set[signal.Signals | int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(child: "subprocess.Popen[bytes]", waited: set[signal.Signals]) -> None:
    while child.poll() is None:
        info = signal.sigwaitinfo(waited)
        if info.si_signo != signal.SIGCHLD and is_for_child(info.si_code) and child.poll() is None:
            os.kill(child.pid, info.si_signo)
