"""
What the benchmark of system calls makes of strace's summaries.
"""

from bench_lab_calls import compare, read_summary

SUMMARY = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 61.52    0.004000           4      1000           sched_yield
 30.10    0.002000          20       100        40 recvmsg
  8.38    0.000500           5       100           sendmsg
------ ----------- ----------- --------- --------- ----------------
100.00    0.006500           5      1200        40 total
"""


def test_calls_by_name_with_and_without_errors():
    """A column of errors may be empty; the total is no call."""
    assert read_summary(SUMMARY) == {"sched_yield": 1000, "recvmsg": 100, "sendmsg": 100}
    assert read_summary("") == {}


def test_what_is_ours_is_more_with_hooks_on():
    """Calls of a process that waits do not count, new ones do, and all are in the table, off and on."""
    more, table = compare({"sched_yield": 900.0, "write": 1.0, "sendmsg": 2.0}, {"sched_yield": 100.0, "sendmsg": 2.0})
    assert more == 1.0
    assert table == {"sched_yield": (100.0, 900.0), "sendmsg": (2.0, 2.0), "write": (0.0, 1.0)}
