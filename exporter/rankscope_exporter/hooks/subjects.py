"""
What a probe looks at: a live model runner, its class, or its source text, behind one small protocol.

Because every probe asks the protocol and nothing else, a worker, `rankscope-exporter doctor` and the version matrix
cannot come to different answers about the same code. The source text has a module of its own (`sources`), which no
worker needs.
"""

import dis
import enum
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

HANDLER_ATTRIBUTE, HANDLER_CLASS = "pp_handler", "PPHandler"
"""
Where a V2 runner keeps what posts its collectives, and the class of it; None on a runner with one pipeline rank.
"""


class Owner(str, enum.Enum):
    """
    What a hook point is an attribute of.
    """

    RUNNER = "runner"
    HANDLER = "pp_handler"
    MODULE = "module"
    """The module in which the handler, or the runner of a release without one, looks the name up when it calls it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """
    What stands at a hook point, called by nobody.
    """

    parameters: tuple[str, ...] = ()
    """Names of its parameters, without self."""
    problem: str = ""
    """Why it cannot be wrapped like a plain function; empty if it can."""
    code: types.CodeType | None = None
    """The code that runs in the end, under decorators that tell what they wrap; None where they do not."""

    @property
    def names(self) -> frozenset[str]:
        """
        Every name that the code reads or binds: attributes, globals, parameters and local variables.
        """
        return names_of(self.code) if self.code is not None else frozenset()


@runtime_checkable
class Subject(Protocol):
    """
    Code to be probed.
    """

    @property
    def label(self) -> str:
        """
        The runner's class, for sentences.
        """

    def name_owner(self, owner: Owner) -> str:
        """
        What `owner` is called here, for sentences.
        """

    def explain_absence(self, owner: Owner) -> str:
        """
        Why there is no such owner here; empty if there is one.
        """

    def find_entry(self, owner: Owner, name: str) -> Entry | None:
        """
        What `owner` has under `name`; None if it has nothing.
        """

    def keeps(self, attribute: str) -> bool:
        """
        Whether the runner has, or its methods set, this attribute.
        """


class RunnerSubject:
    """
    A live model runner. Looks at it, and evaluates no property of it.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @property
    def label(self) -> str:
        """
        The runner's class, for sentences.
        """
        return type(self.runner).__name__

    def name_owner(self, owner: Owner) -> str:
        """
        What `owner` is called here, for sentences.
        """
        return name_owner(self.label, owner)

    def explain_absence(self, owner: Owner) -> str:
        """
        Why there is no such owner here; empty if there is one.
        """
        if owner is Owner.HANDLER and self._handler is None:
            return "there is one pipeline rank, so there is nothing to broadcast"
        return ""

    def locate(self, owner: Owner, name: str) -> Any:
        """
        The object on which `name` would be set to wrap it; None where there is no such attribute.
        """
        if owner is Owner.MODULE:
            handler = self._handler
            callers = [] if handler is None else [type(handler)]
            return find_module(callers if self.keeps(HANDLER_ATTRIBUTE) else [type(self.runner)], name)
        place = self.runner if owner is Owner.RUNNER else self._handler
        return None if place is None or _look_up(place, name) is None else place

    def find_entry(self, owner: Owner, name: str) -> Entry | None:
        """
        What `owner` has under `name`; None if it has nothing.
        """
        place = self.locate(owner, name)
        return None if place is None else _read_entry(place, name)

    def keeps(self, attribute: str) -> bool:
        """
        Whether the runner has this attribute.
        """
        return _look_up(self.runner, attribute) is not None or attribute in getattr(self.runner, "__dict__", {})

    @property
    def _handler(self) -> Any:
        return getattr(self.runner, HANDLER_ATTRIBUTE, None)


class ClassSubject:
    """
    A model runner's class, before there is a runner.
    """

    def __init__(self, runner_class: type) -> None:
        self.runner_class = runner_class

    @property
    def label(self) -> str:
        """
        The runner's class, for sentences.
        """
        return self.runner_class.__name__

    def name_owner(self, owner: Owner) -> str:
        """
        What `owner` is called here, for sentences.
        """
        return name_owner(self.label, owner)

    def explain_absence(self, owner: Owner) -> str:
        """
        Why there is no such owner here; empty if there is one.
        """
        if owner is Owner.HANDLER and self._handler is None:
            return f"no class {HANDLER_CLASS} beside {self.label}"
        return ""

    def find_entry(self, owner: Owner, name: str) -> Entry | None:
        """
        What `owner` has under `name`; None if it has nothing.
        """
        place: Any
        if owner is Owner.MODULE:
            callers = [] if self._handler is None else [self._handler]
            place = find_module(callers if self.keeps(HANDLER_ATTRIBUTE) else [self.runner_class], name)
        else:
            place = self.runner_class if owner is Owner.RUNNER else self._handler
        return None if place is None or _look_up(place, name) is None else _read_entry(place, name)

    def keeps(self, attribute: str) -> bool:
        """
        Whether a method of the runner sets this attribute.
        """
        return any(
            stores_attribute(code, attribute) for cls in self.runner_class.__mro__ for code in _codes_of_class(cls)
        )

    @cached_property
    def _handler(self) -> type | None:
        for cls in self.runner_class.__mro__:
            found = getattr(sys.modules.get(cls.__module__), HANDLER_CLASS, None)
            if inspect.isclass(found):
                return found
        return None


def as_subject(thing: Any) -> Subject:
    """
    `thing` as a subject: itself, or the subject for a runner's class or a live runner.
    """
    if isinstance(thing, (RunnerSubject, ClassSubject)):
        return thing
    if inspect.isclass(thing):
        return ClassSubject(thing)
    return thing if isinstance(thing, Subject) else RunnerSubject(thing)


def name_owner(label: str, owner: Owner) -> str:
    """
    What `owner` is called in sentences about the runner class `label`.
    """
    return {Owner.RUNNER: label, Owner.HANDLER: HANDLER_CLASS, Owner.MODULE: f"the module of {label}"}[owner]


def find_module(classes: list[type], name: str) -> types.ModuleType | None:
    """
    The module where one of `classes`, or a base of one, looks `name` up; None if no module of theirs has it.

    A subclass elsewhere may have imported the name too: the module whose class uses it comes first.
    """
    found = [
        (base, module)
        for cls in classes
        for base in cls.__mro__
        if (module := sys.modules.get(base.__module__)) is not None and name in vars(module)
    ]
    for base, module in found:
        if any(name in names_of(code) for code in _codes_of_class(base)):
            return module
    return found[0][1] if found else None


def names_of(code: types.CodeType) -> frozenset[str]:
    """
    Every name that `code`, or a function in it, reads or binds.
    """
    return frozenset(
        name
        for each in [code, *nested_codes(code)]
        for names in (each.co_names, each.co_varnames, each.co_freevars, each.co_cellvars)
        for name in names
    )


def stores_attribute(code: types.CodeType, attribute: str) -> bool:
    """
    Whether `code`, or a function in it, assigns to an attribute of this name.
    """
    return any(
        step.opname == "STORE_ATTR" and step.argval == attribute
        for each in [code, *nested_codes(code)]
        if attribute in each.co_names
        for step in dis.get_instructions(each)
    )


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """
    The code objects that stand in `code`, at any depth.
    """
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from nested_codes(constant)


def _look_up(place: Any, name: str) -> Any:
    """
    The attribute as it lies in `place` or its class, so that no property runs; what `__getattr__` gives where it lies nowhere.
    """
    found = inspect.getattr_static(place, name, None)
    return getattr(place, name, None) if found is None else found


def _read_entry(place: Any, name: str) -> Entry:
    raw = _look_up(place, name)
    if isinstance(raw, (property, cached_property)):
        return Entry(problem="not a plain method")
    value = getattr(place, name)
    code = _code_of(value)
    # A decorator's plain function around an `async def` returns before anything has run.
    waits = inspect.iscoroutinefunction(value) or (code is not None and bool(code.co_flags & inspect.CO_COROUTINE))
    if not callable(value) or inspect.isclass(value) or waits:
        return Entry(problem="not a plain method", code=code)
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError) as error:
        return Entry(problem=f"no signature ({error})", code=code)
    if inspect.isclass(place) and not isinstance(raw, (staticmethod, classmethod)):
        takes_self = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
        parameters = parameters[1:] if takes_self else parameters
    return Entry(parameters=tuple(parameter.name for parameter in parameters), code=code)


def _code_of(value: Any) -> types.CodeType | None:
    try:
        function = inspect.unwrap(value)
    except ValueError:  # wrappers in a circle
        return None
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _codes_of_class(cls: type) -> Iterator[types.CodeType]:
    for value in vars(cls).values():
        code = _code_of(value)
        if code is not None:
            yield code
