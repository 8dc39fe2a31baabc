"""
The containers: what compose would run is valid and guarded, and the same commands run here without containers.
"""

import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import need
from typer.testing import CliRunner

from rankscope_exporter import cli as exporter_cli
from rankscope_exporter.contract.words import DEFAULT_PORT
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.serve.tokens import read_control_token
from rankscope_exporter.simulation.cli import make_parser
from rankscope_server.cli import cli as server_cli
from rankscope_server.settings import DEFAULT_PORT as SERVER_PORT
from rankscope_server.settings import DeploymentSettings, control_token

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OURS = {"server", "vllm-server", "demo", "exporter", "processes", "token"}
START_SECONDS = 120.0
"""How long a process may take to come up on a machine that is busy with other tests."""


def composers() -> list[list[str]]:
    """Every docker compose of this machine: the stand-alone one, the plugin, or both."""
    found = [["docker-compose"]] if shutil.which("docker-compose") else []
    if (docker := shutil.which("docker")) is not None:
        plugin = subprocess.run([docker, "compose", "version"], capture_output=True, timeout=60, check=False)
        found += [["docker", "compose"]] if plugin.returncode == 0 else []
    return found


def read_compose(composer: list[str], *profiles: str, **environment: str) -> dict[str, Any]:
    """The configuration as compose understands it."""
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [*composer, *chosen, "--file", str(ROOT / "docker-compose.yml"), "config"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    return config


@pytest.fixture(scope="module")
def composed() -> list[dict[str, Any]]:
    """The whole configuration, once for each compose of this machine."""
    if not (found := composers()):
        need("docker-compose", "docker-compose")
    return [read_compose(composer, "vllm") for composer in found]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services as they are written, with all variables at their defaults."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    written: dict[str, dict[str, Any]] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))["services"]
    return written


def test_default_needs_no_profile() -> None:
    """`docker compose up` starts the dashboard, simulated ranks, Prometheus and Alertmanager, and nothing that needs a GPU."""
    if not (found := composers()):
        need("docker-compose", "docker-compose")
    for composer in found:
        active = {name for name, service in read_compose(composer)["services"].items() if not service.get("profiles")}
        assert active == {"server", "demo", "prometheus", "alertmanager"}


def test_profile_adds_grafana() -> None:
    """Profile `grafana` is valid, and adds Grafana alone."""
    if not (found := composers()):
        need("docker-compose", "docker-compose")
    for composer in found:
        config = read_compose(composer, "grafana")
        added = {name for name, service in config["services"].items() if service.get("profiles") == ["grafana"]}
        assert added == {"grafana"}


def test_profile_adds_vllm_and_its_exporter(composed: list[dict[str, Any]]) -> None:
    """Profile `vllm` is valid, and adds vLLM, its sidecar, a dashboard, and what those two lean on."""
    for config in composed:
        added = {name for name, service in config["services"].items() if service.get("profiles") == ["vllm"]}
        assert added == {"vllm", "exporter", "vllm-server", "processes", "token"}


def test_published_ports_stay_on_this_machine(services: dict[str, dict[str, Any]]) -> None:
    """No port is published beyond loopback, and none of an exporter at all."""
    published = {name: service.get("ports", []) for name, service in services.items()}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert not published["exporter"]
    assert not published["demo"]


def test_containers_of_ours_are_confined(services: dict[str, dict[str, Any]]) -> None:
    """Ours have no capability but the one that hands the token over, write nowhere but into volumes, and gain no privileges."""
    for name in OURS:
        service = services[name]
        assert service["cap_drop"] == ["ALL"], name
        assert service.get("cap_add", []) == (["CHOWN"] if name == "token" else []), name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    assert not any(service.get("privileged") for service in services.values())


def test_sidecar_can_read_what_vllm_writes(services: dict[str, dict[str, Any]]) -> None:
    """The exporter has vLLM's user, process namespace and flight directory; neither is the other's first process."""
    vllm, exporter = services["vllm"], services["exporter"]
    assert vllm["user"] == exporter["user"]
    assert vllm["pid"] == exporter["pid"] == "service:processes"
    directory = vllm["environment"]["RANKSCOPE_FLIGHT_DIR"]
    assert exporter["environment"]["RANKSCOPE_FLIGHT_DIR"] == directory
    assert f"flight:{directory}" in vllm["volumes"]
    assert f"flight:{directory}" in exporter["volumes"]


def test_flight_files_lie_in_memory(composed: list[dict[str, Any]]) -> None:
    """The volumes of flight files are memory file systems that only their user can enter."""
    for config in composed:
        for name, uid in {"flight": 0, "demo": 10001}.items():
            options = config["volumes"][name]["driver_opts"]
            assert options["type"] == "tmpfs"
            assert {"mode=0700", f"uid={uid}"} <= set(options["o"].split(","))


def test_user_of_vllm_is_set_in_one_place() -> None:
    """VLLM_UID changes vLLM's user, the sidecar's, that of the token and that of the flight directory together."""
    if not (found := composers()):
        need("docker-compose", "docker-compose")
    config = read_compose(found[0], "vllm", VLLM_UID="1234")
    assert config["services"]["vllm"]["user"] == config["services"]["exporter"]["user"] == "1234"
    assert "exporter:1234" in config["services"]["token"]["command"]
    assert "uid=1234" in config["volumes"]["flight"]["driver_opts"]["o"]


@pytest.mark.parametrize("dockerfile", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda path: path.name)
def test_images_copy_what_is_there(dockerfile: Path) -> None:
    """Every file that an image takes from the repository is there, and not kept out of the build."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    for source in re.findall(r"^COPY (?!--from)(\S+) ", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert (ROOT / source).exists()
        assert any(f"{source}/".startswith(f"{place}/") for place in kept), source


def test_commands_of_containers_are_understood(
    services: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the containers are told to run is what our commands take, and the server accepts its address with a password."""
    exporter_cli.build_parser().parse_args(services["exporter"]["command"])
    make_parser().parse_args(services["demo"]["command"][1:])
    runner = CliRunner()
    line = runner.invoke(server_cli, ["password", "admin"], input="a password of some length\n").output
    (tmp_path / "passwords").write_text(line, encoding="utf-8")
    (tmp_path / "token").write_text("t" * 32, encoding="utf-8")
    for name in ("passwords", "token"):
        (tmp_path / name).chmod(0o600)
    target = services["vllm-server"]["command"][-1].replace("/run/rankscope/token/server", str(tmp_path / "token"))
    monkeypatch.setenv("RANKSCOPE_SERVER_HOST", services["vllm-server"]["environment"]["RANKSCOPE_SERVER_HOST"])
    refused = runner.invoke(server_cli, ["check-config", "--target", target])
    monkeypatch.setenv("RANKSCOPE_SERVER_PASSWORD_FILE", str(tmp_path / "passwords"))
    accepted = runner.invoke(server_cli, ["check-config", "--target", target])
    assert (refused.exit_code, accepted.exit_code) == (2, 0), accepted.output
    assert "can be toggled" in accepted.output


def test_ports_fit_together(services: dict[str, dict[str, Any]]) -> None:
    """Published ports are those that the servers listen on, and Prometheus looks where exporters are."""
    for name in ("server", "vllm-server"):
        assert services[name]["ports"][0].endswith(f":{SERVER_PORT}")
    scraped = {
        (found["names"][0], found["port"])
        for found in yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))[
            "scrape_configs"
        ][0]["dns_sd_configs"]
    }
    first = make_parser().parse_args(services["demo"]["command"][1:]).first_port
    assert scraped == {("exporter", DEFAULT_PORT), ("demo", first), ("demo", first + 1)}


def test_prometheus_sends_to_the_alertmanager_beside_it(services: dict[str, dict[str, Any]]) -> None:
    """Prometheus names the Alertmanager of the same file, and every file that a container is given is there."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    (named,) = config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert services["alertmanager"]["ports"] == [f"127.0.0.1:9093:{named.removeprefix('alertmanager:')}"]
    given = [volume for service in services.values() for volume in service.get("volumes", []) if volume[0] == "."]
    assert given
    assert all((ROOT / volume.split(":")[0]).exists() and volume.endswith(":ro") for volume in given)


def test_prometheus_takes_its_configuration() -> None:
    """Prometheus itself finds nothing wrong with its configuration."""
    promtool = need("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_secured_example(tmp_path: Path) -> None:
    """Prometheus finds nothing wrong with the example for exporters with token and TLS, once its files are there."""
    promtool = need("promtool", "prometheus")
    text = (DEPLOY / "prometheus" / "secured.yml").read_text(encoding="utf-8")
    files = re.findall(r"_file: (/etc/prometheus/rankscope/\S+)", text)
    assert len(files) == 4
    for file in files:
        (tmp_path / Path(file).name).touch()
    (tmp_path / "secured.yml").write_text(text.replace("/etc/prometheus/rankscope", str(tmp_path)), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "secured.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_token_is_made_once_and_taken_by_both_sides(tmp_path: Path) -> None:
    """The token's copies are equal, private and accepted by exporter and server; a second run changes nothing."""

    def make() -> dict[str, str]:
        readers = [f"{name}:{os.getuid()}" for name in ("server", "exporter")]
        subprocess.run(
            ["sh", str(DEPLOY / "make-token.sh"), *readers],
            env={**os.environ, "RANKSCOPE_TOKEN_DIR": str(tmp_path)}, timeout=60, check=True,
        )  # fmt: skip
        return {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}

    first = make()
    assert set(first) == {"server", "exporter"}
    assert len(set(first.values())) == 1
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    asks = DeploymentSettings(name="d", exporters=("http://127.0.0.1:1",), control_token_file=tmp_path / "server")
    takes = ServeSettings(control_token_file=tmp_path / "exporter")
    assert control_token(asks) == read_control_token(takes) == first["server"].strip()
    assert make() == first


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands with our scripts on the path; they are ended at the end, the last one first."""
    running: list[subprocess.Popen[str]] = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def begin(command: list[str], **environment: str) -> subprocess.Popen[str]:
        with (tmp_path / f"log-{len(running)}").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "PATH": path, **environment}
            )
        running.append(process)
        return process

    yield begin
    for process in reversed(running):
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    """The first true value of `condition`, as long as `process` runs."""
    deadline = time.monotonic() + START_SECONDS
    while not (value := condition()):
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
    return value


def get(url: str, password: str = "") -> tuple[int, str]:
    """Status and body of a page of ours, asked for by `admin` if there is a password."""
    request = urllib.request.Request(url)
    if password:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"admin:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.timeout(480)
def test_demo_and_server_run_as_in_the_containers(
    services: dict[str, dict[str, Any]], start: Start, tmp_path: Path
) -> None:
    """The demo's command and the server's entry point work together; the page asks for the password made at first start."""
    replaced = {"--host": "127.0.0.1", "--advertise-host": "127.0.0.1", "--first-port": "0"}
    command = [word.replace("/run/rankscope/demo", str(tmp_path / "demo")) for word in services["demo"]["command"]]
    command = [f"{flag}={replaced.get(flag, value)}" if value else flag for flag, _, value in (word.partition("=") for word in command)]  # fmt: skip
    (tmp_path / "demo").mkdir(mode=0o700)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    simulation = start(["rankscope-exporter", *command])
    targets = tmp_path / "demo" / "targets.yaml"
    wait_for(targets.exists, simulation)

    entry = ["sh", str(DEPLOY / "server-entrypoint.sh"), "serve", "--config", str(targets)]
    server = start(entry, RANKSCOPE_SERVER_DATA_DIR=str(data), RANKSCOPE_SERVER_PORT="0")
    assert server.stdout is not None
    match = re.search(r"http://\S+?/(?= )", server.stdout.readline())
    assert match
    url = match.group()
    password = (data / "admin-password").read_text(encoding="utf-8").strip()
    assert stat.S_IMODE((data / "admin-password").stat().st_mode) == 0o600
    assert all(get(url + path)[0] == 401 for path in ("", "healthz", "api/v1/fleet"))

    def seen() -> dict[str, int]:
        fleet = json.loads(get(f"{url}api/v1/fleet", password)[1])
        return {card["name"]: len(engine["ranks"]) for card in fleet["deployments"] for engine in card["engines"]}

    expected = {"baseline": 2, "canary": 2}
    assert wait_for(lambda: (ranks := seen()) == expected and ranks, server) == expected
    assert get(url, password)[0] == 200

    made = (data / "passwords").read_text(encoding="utf-8")
    server.terminate()
    server.wait(15)
    again = start(entry, RANKSCOPE_SERVER_DATA_DIR=str(data), RANKSCOPE_SERVER_PORT="0")
    assert again.stdout is not None
    assert "watches baseline, canary" in again.stdout.readline()
    assert (data / "passwords").read_text(encoding="utf-8") == made
