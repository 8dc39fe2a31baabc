"""
The flight file: what one rank did, step by step, readable by others while the rank runs, hangs, or after it died.
"""

from rankscope_exporter.flight.reader import (
    FlightError,
    FlightFile,
    OwnTime,
    RequestTableRow,
    Snapshot,
    list_flight_files,
)

__all__ = ["FlightError", "FlightFile", "OwnTime", "RequestTableRow", "Snapshot", "list_flight_files"]
