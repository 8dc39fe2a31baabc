"""
The flight file: what one rank did, step by step, readable by others while the rank runs, hangs, or after it died.

    from rankscope_exporter.flight import list_flight_files, open_flight

    for path in list_flight_files("/dev/shm/rankscope"):
        with open_flight(path) as flight:
            records = flight.records(after=flight.step() - 100)   # a NumPy array, one row a step
            drifting, worst = flight.requests()
            print(flight.identity()["engine"], records["step"], records["drift_max"], drifting)

Works alike on the file of a running rank, of one that hangs or died, and on a copy on another machine. The file's layout
is in `docs/flight-format.md`, its fields and areas in `layout`. `whole_copy` gives the bytes of a consistent copy,
`compose_flight` those of a file that is made of values.
"""

from rankscope_exporter.flight.areas import Control, OwnTime, RequestTableRow, Snapshot
from rankscope_exporter.flight.composing import compose_flight
from rankscope_exporter.flight.copying import whole_copy
from rankscope_exporter.flight.errors import FlightError, FlightVersionError
from rankscope_exporter.flight.reader import FlightFile, list_flight_files, open_flight

__all__ = [
    "Control",
    "FlightError",
    "FlightFile",
    "FlightVersionError",
    "OwnTime",
    "RequestTableRow",
    "Snapshot",
    "compose_flight",
    "list_flight_files",
    "open_flight",
    "whole_copy",
]
