"""
Signals of `run`: taken one by one by the main thread, to be passed on to the command.

They are blocked before anything else is imported. Threads inherit the mask of the thread that starts them, and NumPy's
libraries start some when they are imported: a signal that one of those may take would end this process.
"""

import signal

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WAITED_FOR = frozenset({*PASSED_ON, signal.SIGCHLD})
_FROM_KERNEL = 0x80
"""
`si_code` of a signal that a terminal sent (SI_KERNEL): the whole foreground group got it, so the child has it already.
"""

Mask = set[signal.Signals | int]


def block() -> Mask:
    """
    Hold back the signals that `run` waits for; the mask as it was.
    """
    return signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)


def restore(mask: Mask) -> None:
    """
    Put the mask back as it was.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_for_child(si_code: int) -> bool:
    """
    Whether a signal that came to this process has to be passed on to its child.
    """
    return si_code != _FROM_KERNEL
