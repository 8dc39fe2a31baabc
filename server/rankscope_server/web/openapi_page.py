"""
The API's description, reduced to what a reader looks up.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """
    A parameter of an operation.
    """

    name: str
    place: str
    required: bool
    description: str


@dataclass(frozen=True, slots=True)
class Operation:
    """
    A method of an address.
    """

    method: str
    path: str
    summary: str
    description: str
    parameters: tuple[Parameter, ...]
    body: str
    """Name of the body's schema; empty without one."""
    answers: tuple[tuple[str, str, str], ...]
    """Status, description, name of the schema."""


def list_operations(description: dict[str, Any], prefix: str = "/api/") -> tuple[Operation, ...]:
    """
    The operations of an OpenAPI description below `prefix`, in its order.
    """
    return tuple(
        _operation(method, path, operation)
        for path, methods in description.get("paths", {}).items()
        if path.startswith(prefix)
        for method, operation in methods.items()
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> Operation:
    return Operation(
        method=method.upper(),
        path=path,
        summary=operation.get("summary", ""),
        description=operation.get("description", ""),
        parameters=tuple(
            Parameter(item["name"], item["in"], item.get("required", False), item.get("description", ""))
            for item in operation.get("parameters", ())
        ),
        body=_schema_name(operation.get("requestBody", {})),
        answers=tuple(
            (code, answer.get("description", ""), _schema_name(answer))
            for code, answer in operation.get("responses", {}).items()
        ),
    )


def _schema_name(holder: dict[str, Any]) -> str:
    for media in holder.get("content", {}).values():
        schema = media.get("schema", {})
        reference = schema.get("$ref") or schema.get("items", {}).get("$ref", "")
        name = str(reference).rpartition("/")[2]
        return f"list of {name}" if schema.get("type") == "array" else name
    return ""
