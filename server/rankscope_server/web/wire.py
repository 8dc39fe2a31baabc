"""
The read model as JSON: pydantic models derived from the views, so that pages and API cannot come to differ.
"""

import dataclasses
import types
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

from rankscope_server.domain.model import State

StateLabel: Any = Annotated[
    Literal[tuple(state.label for state in State)],
    BeforeValidator(lambda state: state.label if isinstance(state, State) else state),
]
"""
A state travels by its label: its number is an order, which may change.
"""

_MODELS: dict[type[object], type[BaseModel]] = {}


def wire_model(view: type[object]) -> type[BaseModel]:
    """
    The model that carries the dataclass `view`, field by field, with the dataclasses inside it.
    """
    if view not in _MODELS:
        hints = get_type_hints(view)
        fields: dict[str, Any] = {
            field.name: (_wire_type(hints[field.name]), ...) for field in dataclasses.fields(cast("Any", view))
        }
        doc = (view.__doc__ or "").strip()
        config = ConfigDict(from_attributes=True, frozen=True)
        _MODELS[view] = create_model(view.__name__, __config__=config, __doc__=doc, **fields)
    return _MODELS[view]


def to_wire(view: Any) -> BaseModel:
    """
    The JSON form of a view.
    """
    return wire_model(type(view)).model_validate(view)


def _wire_type(hint: Any) -> Any:
    if hint is State:
        return StateLabel
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return wire_model(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if not arguments:
        return hint
    inner = tuple(argument if argument is ... else _wire_type(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007  # the members are known at run time only
    return origin[inner]
