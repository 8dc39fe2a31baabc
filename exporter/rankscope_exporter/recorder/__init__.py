"""
The recorder: turns what the hooks see in a step into one record of the flight file.

It runs inside vLLM's step, so it reads plain Python and NumPy values that are there already, never a device tensor,
and leaves per-request work to the steps in which something is wrong.
"""

from rankscope_exporter.recorder.base import Recorder
from rankscope_exporter.recorder.options import RecorderOptions
from rankscope_exporter.recorder.v1 import V1Recorder
from rankscope_exporter.recorder.v2 import V2Recorder

__all__ = ["Recorder", "RecorderOptions", "V1Recorder", "V2Recorder"]
