"""
The command line, as a person meets it.
"""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope_exporter.cli import main
from rankscope_exporter.serve.server import exposure, start_line
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.serve.tokens import Tokens

Make = Callable[..., Any]
WAIT = 300
"""Seconds until a process that should end counts as hanging: far more than a busy machine needs."""
PROGRAM = [sys.executable, "-m", "rankscope_exporter"]


@pytest.fixture(autouse=True)
def _clean(serve_settings: ServeSettings) -> None:
    """No `RANKSCOPE_*` from outside."""


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists the commands, says what each is for and shows how to begin."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(
        command in out for command in ("serve", "run", "doctor", "simulate", "metrics-doc", "run -- vllm serve MODEL")
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is one line."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert re.fullmatch(r"rankscope-exporter \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["serve", "--nonsense"]])
def test_called_wrongly(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong call ends with 2 and a usage line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: rankscope-exporter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["serve", "--port", "70000"], {}, "--port: Input should be less than or equal to 65535 (got 70000)"),
        (["serve"], {"RANKSCOPE_PORT": "many"}, "RANKSCOPE_PORT: "),
        (["serve", "--control-token-file", "/nonexistent/token"], {}, "No such file"),
        (["serve", "--host", "host.invalid"], {}, "cannot be resolved"),
        (["serve", "--host", "192.0.2.1"], {}, "cannot listen on 192.0.2.1"),
        (["serve", "--tls-cert-file", "/nonexistent/cert"], {}, "tls_cert_file is set without tls_key_file"),
        (["serve", "--request-rate", "-1"], {}, "--request-rate: Input should be greater than or equal to 0"),
        (
            ["serve"],
            {"RANKSCOPE_READ_TOKEN": "one-token-for-both", "RANKSCOPE_CONTROL_TOKEN": "one-token-for-both"},
            "the read token and the control token are the same",
        ),
        (["run"], {}, "write it after --"),
        (["run", "--"], {}, "write it after --"),
    ],
)
def test_bad_settings(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A setting that cannot be used ends with 2 and one line that names it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert main([*arguments, "--port", "0"] if "--host" in arguments else arguments) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_every_setting_has_a_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be set can be set by a flag, but for tokens themselves, and help tells the default."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    fields = {name: field for name, field in ServeSettings.model_fields.items() if not name.endswith("_token")}
    assert set(re.findall(r"--([a-z-]+) [A-Z]+ ", told)) == {name.replace("_", "-") for name in fields}
    for name, field in fields.items():
        if isinstance(field.default, (int, float)):
            text = told.partition(f" --{name.replace('_', '-')} ")[2].partition(" --")[0]
            assert f"({field.default:g})" in text, name


def test_start_line() -> None:
    """The line says how many ranks, of which directory, where."""
    here = ServeSettings()

    assert (
        start_line(2, here, "http://127.0.0.1:9610") == "serving 2 ranks of /dev/shm/rankscope on http://127.0.0.1:9610"
    )
    assert start_line(1, here, "http://127.0.0.1:9610").startswith("serving 1 rank of ")


@pytest.mark.parametrize(
    ("changes", "tokens", "said"),
    [
        ({"host": "127.0.0.1"}, Tokens(), []),
        ({}, Tokens(), ["answers can be read on the way", "anyone who reaches this address can read"]),
        ({}, Tokens(read=b"r", control=b"c"), ["answers and tokens can be read on the way"]),
        ({"tls_cert_file": "c"}, Tokens(), ["set --read-token-file or --tls-client-ca-file"]),
        ({"tls_cert_file": "c", "tls_client_ca_file": "a"}, Tokens(), []),
        ({"tls_cert_file": "c"}, Tokens(read=b"r"), []),
    ],
)
def test_exposure(changes: dict[str, str], tokens: Tokens, said: list[str]) -> None:
    """Listening for other machines without TLS, or without a token or certificates of clients, is warned of with the remedy."""
    warnings = exposure(ServeSettings(**({"host": "0.0.0.0"} | changes)), tokens)

    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


@pytest.fixture
def serve(flight_dir: Path) -> Iterator[Callable[..., tuple["subprocess.Popen[str]", str]]]:
    """Starts `rankscope-exporter serve` for real; the process and the URL that it tells."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple["subprocess.Popen[str]", str]:
        command = [*PROGRAM, "serve", "--flight-dir", str(flight_dir), "--port", "0", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving "), line
        return process, line.split(" on ")[1].split()[0]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve(serve: Make, rank_file: Make, number: signal.Signals) -> None:
    """It serves at the address that it tells, and a signal ends it with 0, also while a client stays connected."""
    rank_file(0).steps(3)
    process, url = serve()
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        assert b'rankscope_steps_total{dp_rank="0",engine="e1",pp_rank="0",tp_rank="0"} 3.0' in answer.read()
    host, port = url.removeprefix("http://").split(":")

    with socket.create_connection((host, int(port))):
        process.send_signal(number)

        assert process.wait(timeout=WAIT) == 0


@pytest.mark.integration
def test_exposed(serve: Make) -> None:
    """Where others can reach it, it starts, and then says what they can do and how to change that."""
    process, _ = serve("--host", "0.0.0.0")
    assert process.stderr is not None
    first, second = process.stderr.readline(), process.stderr.readline()
    assert "TLS is off" in first
    assert "--tls-cert-file" in first
    assert "takes no token" in second
    assert "--read-token-file" in second


@pytest.mark.integration
def test_ipv6(serve: Make) -> None:
    """An IPv6 address is told as a URL that can be opened."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6: enable it to run this test")
    _, url = serve("--host", "::1")

    with urllib.request.urlopen(f"{url}/healthz") as answer:
        assert url.startswith("http://[::1]:")
        assert answer.status == 200


@pytest.mark.integration
def test_port_in_use(flight_dir: Path) -> None:
    """A port that is taken ends it with 2 and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*PROGRAM, "serve", "--port", port],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"RANKSCOPE_FLIGHT_DIR": str(flight_dir)},
        )

    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port" in done.stderr


@pytest.mark.integration
def test_doctor_without_vllm() -> None:
    """Where vLLM is not installed, the doctor says so on standard output, as JSON if asked, and ends with 1."""
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here: run this test where it is not")

    done = subprocess.run([*PROGRAM, "doctor", "--json"], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "run this with the Python that runs vLLM" in json.loads(done.stdout)["problems"][0]


@pytest.mark.integration
def test_metrics_doc() -> None:
    """The documentation goes to standard output, alone."""
    done = subprocess.run([*PROGRAM, "metrics-doc"], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("# Metrics\n")
    assert done.stderr == ""
