"""
What share of a real vLLM step the hooks take: hooks on against hooks off, alternating every few steps in one engine.

Also what the hooks measured of themselves. They are the first to run after the rank has waited for its next batch, so
a part of it is cold caches, which vLLM's own next line pays for without them. Needs the lab's environment
(`make lab-setup`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from figures import Figures, progress

from rankscope_exporter.flight import FlightFile, list_flight_files
from rankscope_lab import checkpoint, environment
from rankscope_lab.engine import Engine, EngineOptions
from rankscope_lab.traffic import Phase, Plan, Stream, run


def main() -> int:
    """
    Print the figures.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of traffic")
    seconds = parser.parse_args().seconds
    figures = Figures("step_share")
    lab = environment.default(os.environ)
    if not lab.ready():
        progress("no lab environment: run `make lab-setup`")
        return 2
    checkpoints = checkpoint.ensure(environment.REPOSITORY / "var" / "lab" / "checkpoints", lab.python)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as flight:
        options = EngineOptions(
            python=lab.python,
            checkpoints=checkpoints,
            name="step_share",
            acceptance=0.9,
            environment={"RANKSCOPE_FLIGHT_DIR": flight, "RANKSCOPE_TRIM_FIX": "on", "RANKSCOPE_LAB_METER": work},
        )
        with Engine(options, Path(work) / "engine.log") as engine:
            progress("step_share: starting vLLM")
            engine.wait_ready(420.0, progress)
            progress(f"step_share: {seconds:.0f} s of traffic")
            stream = Stream("steady", lengths=(100, 200), running=8)
            run(engine.url, Plan((Phase("steady", seconds, (stream,)),), seed=1))
            for path in list_flight_files(Path(flight)):
                report(figures, path, Path(work))
    return figures.exit_code


def report(figures: Figures, path: Path, work: Path) -> None:
    """
    The figures of one rank.
    """
    with FlightFile(path) as file:
        rank = f"pp{file.identity()['pp_rank']}"
        own = [int(ns) for ns in file.records()["own_ns"] if ns]
    metered = json.loads((work / f"{rank}.json").read_text())
    on, off, step = metered["on_ns"], metered["off_ns"], metered["step_ns"]
    # Neighbouring blocks see the same machine and about the same batch: their differences are what is compared.
    differences = [a - b for a, b in zip(on, off, strict=False)]
    cost = statistics.median(differences)
    quarter = statistics.quantiles(differences, n=4)
    margin = 1.25 * (quarter[2] - quarter[0]) / 1.35 / len(differences) ** 0.5
    figures.report(
        f"share_{rank}", round(cost / step, 5), "<= 0.005",
        cost_us=round(cost / 1e3, 1), standard_error_us=round(margin / 1e3, 1), step_ms=round(step / 1e6, 2), blocks=len(differences),
    )  # fmt: skip
    figures.report(
        f"share_own_{rank}",
        round(statistics.median(own) / step, 5),
        "<= 0.005",
        own_us=round(statistics.median(own) / 1e3, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
