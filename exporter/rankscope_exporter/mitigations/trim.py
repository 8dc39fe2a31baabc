"""
The trim fix: trim optimistic draft tokens on every pipeline rank (vLLM issue 54260).

`_update_states` appends a placeholder per draft token and takes the rejected ones off again in an `elif` that only
the last rank reaches. The fix makes that `elif` an `if`. Nothing around the method can stand in for it: the batch
is updated further on in the same loop, from the untrimmed list. So the function's code object is exchanged for
one compiled from the module's own file with that single change, which wrappers and bound references that exist
already do not notice, and which is undone by putting the old code object back.

The whole module is compiled, not the function alone, because CPython picks opcodes by what the module imports. And
the unchanged file must compile to exactly the loaded bytecode, or the file is not what runs and nothing is touched.
"""

import ast
import contextlib
import enum
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_exporter.contract.words import MitigationState

NAME = "trim"
METHOD = "_update_states"


@dataclass(frozen=True, slots=True)
class Assessment:
    """
    What the fix can do to a function, and the code objects to do it with (None unless the state is AVAILABLE or APPLIED).
    """

    state: MitigationState
    reason: str
    original: types.CodeType | None = None
    fixed: types.CodeType | None = None
    trims: int = 0
    """How many trims the function has."""


@dataclass(frozen=True, slots=True)
class Definition:
    """
    One class's own `_update_states`, with what a look at it found.
    """

    owner: str
    """The class."""
    assessment: Assessment
    leads_on: bool
    """Whether it leads on to the next class's definition."""
    function: Any = None
    """What runs, a Python function; None for source text."""


@dataclass(frozen=True, slots=True)
class _Trim:
    """
    A trim statement, and what it hangs on.
    """

    statement: ast.If
    gate: ast.If | None
    """The `if not is_last_rank` that it is the sole `elif` of."""
    condition: str
    """Another condition, in words; empty if there is none."""


class TrimFix:
    """
    The trim fix for one function, usually `_update_states` of the loaded model runner.
    """

    __slots__ = ("_assessment", "_function", "owner")

    def __init__(self, method: Any, *, owner: str = "", assessment: Assessment | None = None) -> None:
        """
        `owner` is the class that the method belongs to, and `assessment` what is known of it already.
        """
        self._function: Any = method
        if assessment is None:
            self._function, problem = reach(method)
            assessment = _unknown(problem) if problem else assess_trim(self._function)
        self._assessment = assessment
        self.owner = owner

    @property
    def state(self) -> MitigationState:
        """
        Where the fix stands now.
        """
        if self._assessment.fixed is None:
            return self._assessment.state
        return (
            MitigationState.APPLIED if self._function.__code__ is self._assessment.fixed else MitigationState.AVAILABLE
        )

    @property
    def reason(self) -> str:
        """
        Why the fix is not available; empty if it is.
        """
        return self._assessment.reason

    def set(self, *, applied: bool) -> MitigationState:
        """
        Turn the fix on or off, and tell where it stands. Does nothing where it is not available.
        """
        code = self._assessment.fixed if applied else self._assessment.original
        if code is not None:
            self._function.__code__ = code
        return self.state


def rule_out(runner: str) -> Assessment | None:
    """
    What there is to say of the fix for a kind of runner (`V1`, `V2`, `unknown`) without a look at its code; None for V1.
    """
    match runner:
        case "V1":
            return None
        case "V2":
            return Assessment(MitigationState.NOT_APPLICABLE, "the V2 runner keeps no output_token_ids to trim")
    return _unknown("the runner keeps the state of neither V1 nor V2, or of both")


def fix_of(runner_class: type) -> TrimFix:
    """
    The trim fix for the class of a model runner: for the base that holds the trim, if subclasses lead on to it.
    """
    chosen = choose_definition(_definitions(runner_class))
    return TrimFix(chosen.function, owner=chosen.owner, assessment=chosen.assessment)


def choose_definition(definitions: Iterable[Definition]) -> Definition:
    """
    The definition that the fix is about, out of those of a class and its bases, the most derived first.

    A definition without a trim that calls the next one is passed over. Where the search ends without an answer, the
    assessment of what is returned says why.
    """
    passed: list[str] = []
    for definition in definitions:
        assessment = definition.assessment
        if not assessment.trims and definition.leads_on:
            passed.append(definition.owner)
            continue
        if assessment.trims and definition.leads_on:
            assessment = _unknown("it trims, and calls the next class's too", trims=assessment.trims)
        if assessment.reason and passed:
            reason = f"{definition.owner}.{METHOD}, which {', '.join(passed)} calls: {assessment.reason}"
            assessment = Assessment(assessment.state, reason, trims=assessment.trims)
        return Definition(definition.owner, assessment, definition.leads_on, definition.function)
    reason = f"{', '.join(passed)} calls a {METHOD} that is not there" if passed else f"there is no {METHOD}"
    return Definition("", _unknown(reason), leads_on=False)


def _definitions(runner_class: type) -> Iterator[Definition]:
    for cls in runner_class.__mro__:
        if METHOD not in vars(cls):
            continue
        function, problem = reach(vars(cls)[METHOD])
        if not problem and function.__code__.co_name != METHOD:
            problem = (
                f"in its place stands {_name(function)}, a wrapper that does not tell what it wraps, or other code"
            )
        if problem:
            yield Definition(cls.__name__, _unknown(problem), leads_on=False)
        else:
            yield Definition(cls.__name__, assess_trim(function), leads_on(function.__code__, cls.__bases__), function)


def leads_on(code: types.CodeType, bases: Iterable[type | str]) -> bool:
    """
    Whether `code`, a class's own `_update_states`, names the one of `super()` or of a base (a class or its name).
    """
    called = {"super", *(base if isinstance(base, str) else base.__name__ for base in bases)}
    return METHOD in code.co_names and bool(called & set(code.co_names))


def reach(method: Any) -> tuple[Any, str]:
    """
    The function that runs in the end when `method` is called, under wrappers, and why it cannot be known.

    A wrapper is believed about what it wraps only if it also holds it: one that was copied over with `functools.wraps`
    and never calls the original would have us change code that nobody runs.
    """
    reached, visited = getattr(method, "__func__", method), set()
    while hasattr(reached, "__wrapped__"):
        if id(reached) in visited:
            return reached, "its wrappers wrap each other"
        visited.add(id(reached))
        inner = reached.__wrapped__
        inner = getattr(inner, "__func__", inner)
        if type(reached) is types.FunctionType and not _holds(reached, inner):
            return reached, f"{_name(reached)} says that it wraps {_name(inner)}, and does not hold it"
        reached = inner
    if type(reached) is not types.FunctionType:  # isinstance would believe a proxy
        return reached, f"{type(reached).__name__} is not a Python function"
    return reached, ""


def _holds(wrapper: types.FunctionType, inner: Any) -> bool:
    """
    Whether `wrapper` can come to `inner`: from its closure, its defaults or a global that it reads.
    """
    cells: list[Any] = []
    for cell in wrapper.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            cells.append(cell.cell_contents)
    held = [
        *cells,
        *(wrapper.__defaults__ or ()),
        *(wrapper.__kwdefaults__ or {}).values(),
        *(wrapper.__globals__.get(name) for name in wrapper.__code__.co_names),
    ]
    return any(getattr(each, "__func__", each) is inner for each in held)


def _name(function: Any) -> str:
    """
    What a function is called where it is written, whatever name `functools.wraps` gave it.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def assess_trim(function: Any) -> Assessment:
    """
    Decide from the source and bytecode of `function` whether the fix applies to it. Reads files, changes nothing.
    """
    if not isinstance(function, types.FunctionType):
        return _unknown(f"{type(function).__name__} is not a Python function")
    try:
        text = Path(function.__code__.co_filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return _unknown(f"no source to compare with: {error}")
    return assess_text(text, function.__code__)


def assess_text(text: str, code: types.CodeType) -> Assessment:
    """
    Decide whether the fix applies to `code`, which came out of a module with this text: loaded, or compiled from it.
    """
    try:
        tree = ast.parse(text, filename=code.co_filename)
        definition = _find_definition(tree, code)
    except (SyntaxError, ValueError, LookupError) as error:
        return _unknown(f"no source to compare with: {error}")

    trims = list(_find_trims(definition))
    count = len(trims)
    if count != 1:
        return _unknown(f"{count} trims of output_token_ids where one was expected", trims=count)
    if code.co_freevars:
        return _unknown("the function has a closure", trims=count)
    if definition.decorator_list:
        return _unknown("the function is decorated", trims=count)
    [trim] = trims
    if trim.condition:
        return _unknown(f"the trim hangs on a condition that is not known: {trim.condition}", trims=count)
    if trim.gate is None:
        return Assessment(MitigationState.NOT_APPLICABLE, "the trim runs on every rank already", trims=count)
    match _classify_growth(definition):
        case _Growth.ACCEPTED:
            return Assessment(
                MitigationState.NOT_APPLICABLE,
                "accepted counts are awaited here, so no draft token is appended before its verdict",
                trims=count,
            )
        case _Growth.UNKNOWN:
            return _unknown("output_token_ids does not grow by draft tokens in a way that is known", trims=count)

    original = _compile(tree, code)
    _ungate(definition, trim.gate)
    fixed = _compile(tree, code)
    if same_code(fixed, code):  # applied before us in this process, or inherited over a fork
        return Assessment(MitigationState.APPLIED, "", original, code, trims=count)
    if not same_code(original, code):
        return _unknown("the file on disk does not compile to the loaded bytecode", trims=count)
    return Assessment(MitigationState.AVAILABLE, "", code, fixed, trims=count)


def _unknown(reason: str, *, trims: int = 0) -> Assessment:
    return Assessment(MitigationState.UNKNOWN_CODE, reason, trims=trims)


def _find_definition(tree: ast.Module, code: types.CodeType) -> ast.FunctionDef:
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno
    ]
    if len(found) != 1:
        msg = f"{len(found)} definitions of {code.co_name} at line {code.co_firstlineno}"
        raise LookupError(msg)
    return found[0]


def _own_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """
    The lists of statements directly under `node`, handlers and cases included.
    """
    for owner in [node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(owner, field, None)
            if isinstance(block, list):
                yield block


def _find_trims(definition: ast.FunctionDef) -> Iterator[_Trim]:
    """
    Every trim, with the conditions between it and the top of the function.
    """

    def descend(block: list[ast.stmt], conditions: tuple[ast.stmt, ...]) -> Iterator[_Trim]:
        for statement in block:
            if _is_trim(statement):
                yield _judge(statement, conditions)  # type: ignore[arg-type]  # _is_trim has looked
            free = isinstance(statement, (ast.For, ast.With))
            inside = conditions if free else (*conditions, statement)
            for inner in _own_blocks(statement):
                yield from descend(inner, inside)

    yield from descend(definition.body, ())


def _judge(statement: ast.If, conditions: tuple[ast.stmt, ...]) -> _Trim:
    match conditions:
        case ():
            return _Trim(statement, None, "")
        case (ast.If(test=test, orelse=[sole]) as gate,) if sole is statement and _asks_not_last_rank(test):
            return _Trim(statement, gate, "")
    text = "; ".join(
        ast.unparse(each.test) if isinstance(each, (ast.If, ast.While)) else type(each).__name__.lower()
        for each in conditions
    )
    return _Trim(statement, None, text[:120])


def _is_trim(statement: ast.stmt) -> bool:
    """
    Whether it reads `if COUNT < len(X.output_token_ids): del X.output_token_ids[COUNT:] ...`.
    """
    match statement:
        case ast.If(
            test=ast.Compare(
                left=count,
                ops=[ast.Lt()],
                comparators=[
                    ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(attr="output_token_ids") as tokens])
                ],
            )
        ):
            wanted = f"del {ast.unparse(tokens)}[{ast.unparse(count)}:]"
            return any(isinstance(inner, ast.Delete) and ast.unparse(inner) == wanted for inner in statement.body)
    return False


def _asks_not_last_rank(test: ast.expr) -> bool:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id="is_last_rank") | ast.Attribute(attr="is_last_rank")):
            return True
    return False


class _Growth(enum.Enum):
    """
    By how much `output_token_ids` grows for the drafts of the step before.
    """

    ALL = "all drafts, before their verdict"
    ACCEPTED = "the accepted ones, whose count is awaited"
    UNKNOWN = "in a way that is not known"


def _classify_growth(definition: ast.FunctionDef) -> _Growth:
    sources = {"prev_num_draft_len": _Growth.ALL, "valid_sampled_token_count": _Growth.ACCEPTED}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="prev_num_draft_len")):
                sources[name] = _Growth.ALL
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _reads_accepted_counts(value):
                sources[name] = _Growth.ACCEPTED
    found = set()
    for node in ast.walk(definition):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="extend", value=ast.Attribute(attr="output_token_ids")),
                args=[
                    ast.BinOp(left=ast.List(), op=ast.Mult(), right=ast.Name(id=amount) | ast.Attribute(attr=amount))
                ],
            ):
                found.add(sources.get(amount, _Growth.UNKNOWN))
    return found.pop() if len(found) == 1 else _Growth.UNKNOWN


def _reads_accepted_counts(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "valid_sampled_token_count" for node in ast.walk(value))


def _ungate(definition: ast.FunctionDef, gate: ast.If) -> None:
    """
    Move the `elif` of `gate` out, to stand after it.
    """
    for owner in ast.walk(definition):
        for block in _own_blocks(owner):
            if gate in block:
                [trim], gate.orelse = gate.orelse, []
                block.insert(block.index(gate) + 1, trim)
                return


def _compile(tree: ast.Module, code: types.CodeType) -> types.CodeType:
    """
    The code object that stands where `code` stood, out of the whole module.
    """
    module = compile(tree, code.co_filename, "exec", dont_inherit=True)
    return next(
        c for c in _code_objects(module) if (c.co_name, c.co_firstlineno) == (code.co_name, code.co_firstlineno)
    )


def _code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _code_objects(constant)


def same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """
    Whether two code objects do the same, whatever file and lines they claim to come from.
    """
    fields = (
        "co_code",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_cellvars",
        "co_flags",
        "co_argcount",
        "co_kwonlyargcount",
        "co_posonlyargcount",
    )
    if any(getattr(one, f) != getattr(other, f) for f in fields) or len(one.co_consts) != len(other.co_consts):
        return False
    for a, b in zip(one.co_consts, other.co_consts, strict=True):
        if type(a) is not type(b):
            return False
        if not (same_code(a, b) if isinstance(a, types.CodeType) else a == b):
            return False
    return True
