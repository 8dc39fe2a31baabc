"""
The compiler of the "cpu" backend: there to be found, never to be asked.
"""

from typing import Any

from triton.backends.compiler import BaseBackend  # type: ignore[import-not-found]  # only in the lab's environments


class CpuBackend(BaseBackend):  # type: ignore[misc]  # Triton is not there to be checked
    """
    Refuses to compile.
    """

    binary_ext = "none"

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether it is meant for `target`."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """A name for Triton's cache, where nothing is ever put."""
        return "rankscope-lab-interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        """Options as they come."""
        return options

    def add_stages(self, *_: Any) -> None:
        """
        Refuse: a kernel that comes here was not interpreted.

        Raises:
            RuntimeError: always.

        """
        msg = "the lab's Triton backend compiles nothing: run with TRITON_INTERPRET=1"
        raise RuntimeError(msg)

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        """There are no modules of a device."""
        return {}
