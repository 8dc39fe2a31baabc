"""
What must outlive the server: desired state, audit, samples, findings.
"""

from rankscope_server.store.rows import DesiredRow, SampleRow
from rankscope_server.store.store import Store, StoreError, StoreVersionError, open_store

__all__ = ["DesiredRow", "SampleRow", "Store", "StoreError", "StoreVersionError", "open_store"]
