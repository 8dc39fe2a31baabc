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
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_exporter.contract.words import MitigationState

NAME = "trim"


@dataclass(frozen=True, slots=True)
class Assessment:
    """
    What the fix can do to a function, and the code objects to do it with (None unless the state is AVAILABLE or APPLIED).
    """

    state: MitigationState
    reason: str
    original: types.CodeType | None = None
    fixed: types.CodeType | None = None


@dataclass(frozen=True, slots=True)
class _Trim:
    """
    A trim statement, the list of statements that it stands in, and the `if` that it is the sole `elif` of, if any.
    """

    statement: ast.If
    gate: ast.If | None


class TrimFix:
    """
    The trim fix for one function, usually `_update_states` of the loaded model runner.
    """

    __slots__ = ("_assessment", "_function")

    def __init__(self, method: Callable[..., Any]) -> None:
        function = inspect.unwrap(method)
        self._function: Any = getattr(function, "__func__", function)
        self._assessment = assess_trim(self._function)

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


def assess_trim(function: Any) -> Assessment:
    """
    Decide from the source and bytecode of `function` whether the fix applies to it. Reads files, changes nothing.
    """
    if not isinstance(function, types.FunctionType):
        return _unknown(f"{type(function).__name__} is not a Python function")
    code = function.__code__
    try:
        path = Path(code.co_filename)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        definition = _find_definition(tree, code)
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError) as error:
        return _unknown(f"no source to compare with: {error}")

    trims = list(_find_trims(definition))
    if len(trims) != 1:
        return _unknown(f"{len(trims)} trims of output_token_ids where one was expected")
    if function.__closure__:
        return _unknown("the function has a closure")
    if definition.decorator_list:
        return _unknown("the function is decorated")
    gate = trims[0].gate
    if gate is None:
        return Assessment(MitigationState.NOT_APPLICABLE, "the trim runs on every rank already")
    if not _extends_optimistically(definition):
        return Assessment(
            MitigationState.NOT_APPLICABLE,
            "accepted counts are awaited here, so no draft token is appended before its verdict",
        )

    original = _compile(tree, code)
    _ungate(definition, gate)
    fixed = _compile(tree, code)
    if same_code(fixed, code):  # applied before us in this process, or inherited over a fork
        return Assessment(MitigationState.APPLIED, "", original, code)
    if not same_code(original, code):
        return _unknown("the file on disk does not compile to the loaded bytecode")
    return Assessment(MitigationState.AVAILABLE, "", code, fixed)


def _unknown(reason: str) -> Assessment:
    return Assessment(MitigationState.UNKNOWN_CODE, reason)


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


def _blocks(node: ast.AST) -> Iterator[tuple[ast.AST, str, list[ast.stmt]]]:
    """
    Every list of statements below `node`, with its owner and the owner's field.
    """
    for owner in ast.walk(node):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(owner, field, None)
            if isinstance(block, list):
                yield owner, field, block


def _find_trims(definition: ast.FunctionDef) -> Iterator[_Trim]:
    for owner, field, block in _blocks(definition):
        for statement in block:
            if _is_trim(statement):
                gated = (
                    field == "orelse"
                    and len(block) == 1
                    and isinstance(owner, ast.If)
                    and _asks_not_last_rank(owner.test)
                )
                yield _Trim(statement, owner if gated else None)  # type: ignore[arg-type]  # checked just above


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


def _extends_optimistically(definition: ast.FunctionDef) -> bool:
    """
    Whether `output_token_ids` grows by placeholders for all drafts (`prev_num_draft_len`), before their verdict.
    """
    optimistic = {"prev_num_draft_len"}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="prev_num_draft_len")):
                optimistic.add(name)
    for node in ast.walk(definition):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="extend", value=ast.Attribute(attr="output_token_ids")),
                args=[
                    ast.BinOp(left=ast.List(), op=ast.Mult(), right=ast.Name(id=amount) | ast.Attribute(attr=amount))
                ],
            ) if amount in optimistic:
                return True
    return False


def _ungate(definition: ast.FunctionDef, gate: ast.If) -> None:
    """
    Move the `elif` of `gate` out, to stand after it.
    """
    for _, _, block in _blocks(definition):
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
