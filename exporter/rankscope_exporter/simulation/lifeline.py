"""
No process is left behind: a child ends with its parent, however the parent ends.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """
    Have the kernel kill this process when `parent`, which started it, ends.

    A wedged rank waits inside a collective and looks at nothing else, so no agreement among processes can do this.

    Raises:
        SystemExit: the parent is gone already.

    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def leave_signals_to_parent() -> None:
    """
    Ctrl-C reaches the whole process group; only the parent shall act on it. SIGTERM ends this process as by default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
