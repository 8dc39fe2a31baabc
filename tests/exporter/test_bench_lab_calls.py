"""
What the benchmark of system calls makes of strace's output.
"""

from bench_lab_calls import compare, tally

TRACE = """\
write(1, "of a call that was under way", 3) = 3
access("/rankscope-mark/end/on", F_OK)  = -1 ENOENT (No such file or directory)
sched_yield()                           = 0
access("/rankscope-mark/begin/on", F_OK) = -1 ENOENT (No such file or directory)
futex(0x7f, FUTEX_WAIT_PRIVATE, 0, NULL) = 0
openat(AT_FDCWD, "/tmp/a", O_RDONLY)    = 3
--- SIGCHLD {si_signo=SIGCHLD} ---
access("/rankscope-mark/end/on", F_OK)  = -1 ENOENT (No such file or directory)
getpid()                                = 1
access("/rankscope-mark/begin/off", F_OK) = -1 ENOENT (No such file or directory)
access("/rankscope-mark/end/off", F_OK) = -1 ENOENT (No such file or directory)
access("/rankscope-mark/begin/off", F_OK) = -1 ENOENT (No such file or directory)
brk(NULL)                               = 0x55
"""


def test_only_what_lies_between_two_marks_is_a_steps():
    """Calls outside the runner, signals, and calls of which one mark is missing are left out."""
    found = tally(TRACE.splitlines())
    assert (found["on"].entered, dict(found["on"].calls)) == (1, {"futex": 1, "openat": 1})
    assert (found["off"].entered, dict(found["off"].calls)) == (1, {})
    assert tally([])["on"].per_step("openat") == 0.0


def test_what_is_ours_is_more_with_hooks_on():
    """Calls of a thread that waits do not count, others do, and all are in the table, off and on; a step enters twice."""
    more, table = compare(**tally(TRACE.splitlines()))
    assert more == 2.0
    assert table == {"futex": (0.0, 2.0), "openat": (0.0, 2.0)}
