"""
A fault of vLLM's own as a scenario: V2 with speculation and without async scheduling. One rank fails, its peer hangs.
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
from evidence import RankEvidence, read_ranks
from figures import Figures, progress
from v2_run import options

from rankscope_exporter.contract import Phase
from rankscope_lab.processes import Child, free_port
from rankscope_lab.v2 import trace
from rankscope_lab.v2.launch import OfflineRun
from rankscope_lab.v2.offline import Settings

NAME = "v2-fault"
WHERE = {
    Phase.SCHEDULED: "before the state was updated",
    Phase.STATE_UPDATED: "after the state was updated",
    Phase.DECIDED: "after the guard had decided",
}
"""
How a person reads of the phase in which a step ended.
"""
BOOT_SECONDS, FOUND_SECONDS = 400.0, 30.0


def report_fault(figures: Figures, settings: Settings) -> None:
    """
    Run it under exporter and server until the server has found what happened, and compare with the trace.
    """
    with tempfile.TemporaryDirectory(prefix="rankscope-e2e-v2-fault-") as directory, ExitStack() as stack:
        work = Path(directory)
        launch = options(work, "ngram_gpu", settings=settings)
        server_url = _watch(stack, work, launch.environment.python)
        http = stack.enter_context(httpx2.Client(timeout=5.0))
        run = stack.enter_context(OfflineRun(launch, work / "vllm.log"))
        failed = _until(
            lambda: _failure(work), f"an error on a rank; the log says {run.child.log_tail(5)}", BOOT_SECONDS
        )
        progress(f"{NAME}: {failed['error']} on pp{failed['rank']} at step {failed['step']}")
        figures.report("failed_rank", f"pp{failed['rank']}", error=failed["error"], traced_step=failed["step"])
        finding = _until(lambda: _critical(http, server_url), lambda: _told(read_ranks(work / "flight")), FOUND_SECONDS)
        figures.report(
            "detect_seconds",
            round(finding["found_unix"] - failed["error_unix"], 3),
            "<= 2",
            sentence=finding["sentence"],
        )
        figures.report("found_as", finding["kind"], "= rank lost")
        figures.report("found_step", finding["step"], f"= {failed['step']}")
        ranks = read_ranks(work / "flight")
        lost = next(rank for rank in ranks if rank.pp_rank == failed["rank"])
        newest = lost.records[-1]
        figures.report("failed_in_record", bool(newest["failed"]), "= true", step=int(newest["step"]))
        phase = Phase(int(newest["phase"]))
        figures.report("phase_in_sentence", WHERE[phase] in finding["sentence"], "= true", phase=phase.name.lower())
        figures.report("peers", _told(ranks), "", processes_alive=[_alive(rank.pid) for rank in ranks])


def _watch(stack: ExitStack, work: Path, python: Path) -> str:
    """
    An exporter over the run's flight directory and a server that polls it; the server's URL.
    """
    token = work / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe())
    exporter, server = free_port(), free_port()
    serve = ("serve", "--flight-dir", str(work / "flight"), "--port", str(exporter), "--control-token-file", str(token))
    target = f"{NAME}=http://127.0.0.1:{exporter},token-file={token}"
    dashboard = ("serve", "--target", target, "--port", str(server), "--data-dir", str(work / "data"))
    for command, log in (
        ((str(python), "-m", "rankscope_exporter", *serve), "exporter.log"),
        ((sys.executable, "-m", "rankscope_server", *dashboard), "server.log"),
    ):
        child = Child(command, os.environ, work / log)
        stack.callback(child.stop)
        child.start()
    return f"http://127.0.0.1:{server}"


def _failure(work: Path) -> dict[str, Any] | None:
    """
    The line of the trace in which a step ended in an error of vLLM's, with its rank.
    """
    for rank, lines in trace.read(work / "trace").items():
        for line in lines:
            if "error" in line:
                return {**line, "rank": rank}
    return None


def _critical(http: httpx2.Client, url: str) -> dict[str, Any] | None:
    """
    The server's first critical finding.
    """
    try:
        engines = http.get(f"{url}/api/v1/fleet").raise_for_status().json()["deployments"][0]["engines"]
        if not engines:
            return None
        view = http.get(f"{url}/api/v1/deployments/{NAME}/engines/{engines[0]['engine']}").raise_for_status().json()
    except httpx2.HTTPError:
        return None
    return next((finding for finding in view["findings"] if finding["severity"] == "critical"), None)


def _told(ranks: list[RankEvidence]) -> str:
    """
    Last step and phase of each rank, in words.
    """
    return "; ".join(
        f"pp{rank.pp_rank} step {int(rank.records[-1]['step'])} {Phase(int(rank.records[-1]['phase'])).name.lower()}"
        for rank in ranks
        if len(rank.records)
    )


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _until(found: Callable[[], Any], instead: Callable[[], str], seconds: float) -> Any:
    """
    What `found` gives, once it gives something; `instead` says what there is if it does not.

    Raises:
        TimeoutError: it did not within `seconds`.

    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = found()
        if answer is not None:
            return answer
        time.sleep(0.1)
    msg = f"not within {seconds:.0f} s; there is {instead()}"
    raise TimeoutError(msg)
