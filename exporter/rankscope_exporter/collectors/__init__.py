"""
Prometheus metrics from the readings of a node's ranks, one module per subject.

Each subject's `collect` is a pure function from readings to metric families; `exposition` runs them, each guarded and
timed, for one scrape, and renders what they give.
"""
