"""
A real Prometheus and a real Alertmanager on loopback, as children that are ended by their process id.

Both come up on a free port and keep what they store in a directory of the caller's.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ALERTMANAGER_NAMES = ("prometheus-alertmanager", "alertmanager")
"""What Debian calls it, and what everybody else does."""

START_SECONDS = 30.0
STOP_SECONDS = 10.0


class ToolMissingError(Exception):
    """
    A program is not installed; the message names the package.
    """


def find_prometheus() -> str:
    """
    The path of Prometheus.

    Raises:
        ToolMissingError: it is not installed.

    """
    return _find(("prometheus",), "prometheus")


def find_alertmanager() -> str:
    """
    The path of Alertmanager.

    Raises:
        ToolMissingError: it is not installed.

    """
    return _find(ALERTMANAGER_NAMES, "prometheus-alertmanager")


@contextlib.contextmanager
def start_alertmanager(
    directory: Path, receiver_url: str | None = None, *, name: str = "alertmanager", port: int | None = None
) -> Iterator[str]:
    """
    An Alertmanager; its base URL, on a free port unless one is named. With `receiver_url` every alert goes there as a
    webhook, at once and each for itself.

    Raises:
        ToolMissingError: it is not installed.
        RuntimeError: it does not come up; the message has what it printed.

    """
    program = find_alertmanager()
    home = directory / name
    home.mkdir(parents=True)
    receiver: dict[str, Any] = {"name": "everybody"}
    if receiver_url is not None:
        receiver["webhook_configs"] = [{"url": receiver_url, "send_resolved": True}]
    route = {"receiver": "everybody", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    config = home / "alertmanager.yml"
    config.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}), encoding="utf-8")
    port = free_port() if port is None else port
    command = [
        program,
        f"--config.file={config}",
        f"--storage.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with _running(command, home / "log", f"http://127.0.0.1:{port}") as url:
        yield url


@contextlib.contextmanager
def start_prometheus(
    targets: Mapping[str, str | Sequence[str]],
    alertmanager_url: str | None,
    rules: Path,
    directory: Path,
    *,
    interval: str = "1s",
) -> Iterator[str]:
    """
    A Prometheus that scrapes exporters and evaluates `rules`; its base URL.

    `targets` are base URLs of exporters (http://HOST:PORT), one or several, by the name of their deployment. `interval` is
    the time between two scrapes, and between two evaluations, as Prometheus writes it.

    Raises:
        ToolMissingError: it is not installed.
        RuntimeError: it does not come up; the message has what it printed.

    """
    program = find_prometheus()
    home = directory / "prometheus"
    home.mkdir(parents=True)
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [
            {
                "job_name": "rankscope",
                "static_configs": [
                    {"targets": [_address(url) for url in _several(urls)], "labels": {"deployment": deployment}}
                    for deployment, urls in targets.items()
                ],
            }
        ],
    }
    if alertmanager_url is not None:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [_address(alertmanager_url)]}]}]}
    path = home / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with _running(command, home / "log", f"http://127.0.0.1:{port}") as url:
        yield url


def get_json(url: str) -> Any:
    """
    What is at a URL, parsed.
    """
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def alerts_at(alertmanager_url: str) -> list[dict[str, str]]:
    """
    The labels of every alert that Alertmanager holds as active, in the order in which they began.
    """
    held = get_json(f"{alertmanager_url}/api/v2/alerts?active=true")
    return [alert["labels"] for alert in sorted(held, key=lambda alert: str(alert["startsAt"]))]


def ask_prometheus(prometheus_url: str, expression: str) -> list[tuple[dict[str, str], float]]:
    """
    What an instant query gives: labels and value of each series.
    """
    query = urllib.parse.urlencode({"query": expression})
    result = get_json(f"{prometheus_url}/api/v1/query?{query}")["data"]["result"]
    return [(one["metric"], float(one["value"][1])) for one in result]


def free_port() -> int:
    """
    A port of 127.0.0.1 that nothing listens on.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _find(names: Sequence[str], package: str) -> str:
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    raise ToolMissingError(f"{names[0]} is missing: apt-get install {package}")


def _several(urls: str | Sequence[str]) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)


def _address(url: str) -> str:
    """
    HOST:PORT of a base URL, as Prometheus wants its targets.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ValueError(f"{url!r} is no base URL such as http://127.0.0.1:9610")
    return f"{parts.hostname}:{parts.port}"


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path, url: str) -> Iterator[str]:
    """
    A program that answers /-/ready under `url` until the end of the block.
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, log, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{url}/-/ready", timeout=2),
        ):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not come up: {log.read_text(encoding='utf-8')[-2000:]}")
