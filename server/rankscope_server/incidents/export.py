"""
An incident as JSON, for whoever keeps incidents elsewhere: everything that its page shows, in plain types.
"""

import json
from typing import Any

from pydantic import TypeAdapter

from rankscope_server.domain.incident import IncidentView

SCHEMA_VERSION = 1
"""
Raised with each change that a reader of an earlier version would misunderstand. New names alone are none.
"""

_VIEWS = TypeAdapter(IncidentView)


def export_incident(view: IncidentView) -> dict[str, Any]:
    """
    The incident in plain types. Times are Unix seconds; what is not known is null.
    """
    plain: dict[str, Any] = _VIEWS.dump_python(view, mode="json")
    return {"schema_version": SCHEMA_VERSION, **plain.pop("card"), **plain}


def export_json(view: IncidentView) -> bytes:
    """
    The same as the bytes of a file.
    """
    return (json.dumps(export_incident(view), indent=2, ensure_ascii=False) + "\n").encode()
