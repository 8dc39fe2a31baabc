"""
The driver of the "cpu" backend: one device, one stream, nothing to measure.
"""

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]  # only in the lab's environments
from triton.backends.driver import DriverBase  # type: ignore[import-not-found]


class CpuDriver(DriverBase):  # type: ignore[misc]  # Triton is not there to be checked
    """
    Answers what Triton asks of a device.
    """

    @classmethod
    def is_active(cls) -> bool:
        """The lab's processes see no GPU."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Types keep their name: nothing is launched."""
        return ty

    def get_current_target(self) -> Any:
        """What kernels would be compiled for."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """PyTorch's CPU."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: Any) -> int:
        """The only one."""
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """A benchmark in which all kernels are equally fast."""
        return lambda _kernel, *, quantiles=(0.5,), **_: [0.0] * len(quantiles)
