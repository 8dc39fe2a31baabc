"""
Addresses of the pages and of the API, in one place.
"""

from urllib.parse import quote


def fleet_path() -> str:
    """
    The fleet page.
    """
    return "/"


def engine_path(deployment: str, engine: str) -> str:
    """
    The page of an engine.
    """
    return f"/deployments/{_segment(deployment)}/engines/{_segment(engine)}"


def fix_path(deployment: str, engine: str | None) -> str:
    """
    The confirmation for toggling the trim fix; `engine` None means every engine of the deployment.
    """
    base = f"/deployments/{_segment(deployment)}" if engine is None else engine_path(deployment, engine)
    return f"{base}/fix"


def fix_question(deployment: str, engine: str | None, *, desired: bool) -> str:
    """
    The confirmation for turning the trim fix on or off.
    """
    return f"{fix_path(deployment, engine)}?desired={'on' if desired else 'off'}"


def incidents_path() -> str:
    """
    The list of incidents.
    """
    return "/incidents"


def incident_path(incident: str) -> str:
    """
    The page of an incident.
    """
    return f"{incidents_path()}/{_segment(incident)}"


def capture_path(incident: str, number: int) -> str:
    """
    A frozen copy of flight records, as a zip file.
    """
    return f"{api_path(incident_path(incident))}/captures/{number}.zip"


def trace_path(incident: str) -> str:
    """
    The newest copy as a trace for Perfetto.
    """
    return f"{api_path(incident_path(incident))}/trace.json"


def export_path(incident: str) -> str:
    """
    An incident with everything that its page shows.
    """
    return f"{api_path(incident_path(incident))}/export.json"


def alerts_path() -> str:
    """
    The alerts and their receivers.
    """
    return "/alerts"


def stream_path(page: str) -> str:
    """
    The live stream of a page.
    """
    return f"/live{'/fleet' if page == '/' else page}"


def api_path(page: str) -> str:
    """
    The JSON of the view that a page shows.
    """
    return f"/api/v1{'/fleet' if page == '/' else page}"


def element_id(prefix: str, *names: str) -> str:
    """
    An id for an element that stays the same as long as what it stands for is there, and is valid in any selector.
    """
    return "-".join(
        (prefix, *("".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in name) for name in names))
    )


def _segment(name: str) -> str:
    return quote(name, safe="")
