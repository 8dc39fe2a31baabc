"""
Process namespaces: a process id means something only inside its own.
"""

from pathlib import Path

PROC = Path("/proc")


def read_pid_namespace(proc: Path = PROC) -> int:
    """
    Inode of the process namespace that this process lives in; 0 if that cannot be told.
    """
    try:
        return (proc / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0


def is_foreign(namespace: object, own: int) -> bool:
    """
    Whether a process of `namespace` is out of sight from `own`; False where either is not known (0, or no number at all).
    """
    return isinstance(namespace, int) and namespace > 0 and own > 0 and namespace != own
