"""
A model runner as source text: what the probes see in a release that is not installed. Nothing of it is imported or run.

Modules are parsed and compiled whole, so that names and parameters come from the same code objects that a worker would
have. What the text alone cannot tell (a decorator from elsewhere, a base class whose file is missing) is said, not guessed.
"""

import ast
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from rankscope_exporter.hooks.subjects import (
    HANDLER_ATTRIBUTE,
    HANDLER_CLASS,
    Entry,
    Owner,
    name_owner,
    names_of,
    nested_codes,
    stores_attribute,
)

Read = Callable[[str], str | None]
"""
Gives the text of a module by its dotted name, None where there is none.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef

_TRANSPARENT = {"inference_mode", "no_grad", "enable_grad", "override", "final", "abstractmethod"}
"""
Decorators of PyTorch and Python after which a method still tells its parameters; others are looked up in their source.
"""
_PROPERTIES = {"property", "cached_property"}


class SourceModule:
    """
    One module's text, with what stands at its top level.
    """

    def __init__(self, name: str, text: str) -> None:
        """
        Raises:
            SyntaxError: this Python cannot compile the text.

        """
        self.name, self.text = name, text
        self.path = name.replace(".", "/") + ".py"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a compiler thinks of another project's escapes
            self.tree = ast.parse(text, self.path)
            code = compile(self.tree, self.path, "exec", dont_inherit=True)
        self._codes = {(each.co_name, each.co_firstlineno): each for each in nested_codes(code)}
        self.definitions: dict[str, ast.ClassDef | Function] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Module and name there, by the name here."""
        for statement in _flatten(self.tree.body):
            match statement:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.definitions[statement.name] = statement
                case ast.ImportFrom():
                    origin = self._absolute(statement)
                    self.imports |= {alias.asname or alias.name: (origin, alias.name) for alias in statement.names}

    def code_of(self, node: ast.ClassDef | Function) -> types.CodeType:
        """
        The code object of a definition in this module.
        """
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return self._codes[node.name, first]

    def has(self, name: str) -> bool:
        """
        Whether the module defines or imports `name`.
        """
        return name in self.definitions or name in self.imports

    def _absolute(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        package = self.name.split(".")[: -statement.level]
        return ".".join([*package, *([statement.module] if statement.module else [])])


@dataclass(frozen=True, slots=True)
class SourceClass:
    """
    A class definition and the module that it stands in.
    """

    module: SourceModule
    node: ast.ClassDef

    @property
    def code(self) -> types.CodeType:
        """
        The code of the class body, with all its methods in it.
        """
        return self.module.code_of(self.node)

    def attribute(self, name: str) -> ast.stmt | None:
        """
        The statement of the class body that binds `name` last; None if none does.
        """
        found: ast.stmt | None = None
        for statement in _flatten(self.node.body):
            match statement:
                case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) if bound == name:
                    found = statement
                case ast.Assign(targets=[ast.Name(id=bound)]) if bound == name:
                    found = statement
        return found


@dataclass(frozen=True, slots=True)
class SourceMethod:
    """
    A class's own definition of a method, as code and in the text of its whole module.
    """

    owner: str
    """The class."""
    bases: tuple[str, ...]
    text: str
    code: types.CodeType


class SourceTree:
    """
    Modules of one release, read and compiled when they are first asked for.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, SourceModule | None] = {}

    def module(self, name: str) -> SourceModule | None:
        """
        A module by its dotted name; None if there is no text of it.
        """
        if name not in self._modules:
            text = self._read(name)
            self._modules[name] = None if text is None else SourceModule(name, text)
        return self._modules[name]

    def resolve(self, module: SourceModule, name: str) -> tuple[SourceModule, ast.ClassDef | Function] | None:
        """
        The definition that `name` stands for in `module`, through imports; None if its text is missing.
        """
        visited: set[tuple[str, str]] = set()
        here: SourceModule | None = module
        while here is not None and (here.name, name) not in visited:
            visited.add((here.name, name))
            if name in here.definitions:
                return here, here.definitions[name]
            origin, name = here.imports.get(name, ("", name))
            here = self.module(origin) if origin else None
        return None


class SourceSubject:
    """
    A model runner's class as source text.
    """

    def __init__(self, tree: SourceTree, module: str, class_name: str) -> None:
        """
        Raises:
            LookupError: there is no such class in the text.
            SyntaxError: this Python cannot compile the text.

        """
        found = tree.module(module)
        node = found.definitions.get(class_name) if found else None
        if found is None or not isinstance(node, ast.ClassDef):
            msg = f"no class {class_name} in {module}"
            raise LookupError(msg)
        self._tree = tree
        self._class = SourceClass(found, node)

    @property
    def label(self) -> str:
        """
        The runner's class, for sentences.
        """
        return self._class.node.name

    def name_owner(self, owner: Owner) -> str:
        """
        What `owner` is called here, for sentences.
        """
        return name_owner(self.label, owner)

    def explain_absence(self, owner: Owner) -> str:
        """
        Why there is no such owner here; empty if there is one.
        """
        if owner is Owner.HANDLER and not self._handler_bases:
            return f"no class {HANDLER_CLASS} beside {self.label}"
        return ""

    def find_entry(self, owner: Owner, name: str) -> Entry | None:
        """
        What `owner` has under `name`; None if it has nothing.
        """
        if owner is Owner.MODULE:
            return self._find_function(name)
        for each in self._bases if owner is Owner.RUNNER else self._handler_bases:
            statement = each.attribute(name)
            if statement is not None:
                return self._read_entry(each.module, statement, bound=True)
        return None

    def keeps(self, attribute: str) -> bool:
        """
        Whether a method of the runner sets this attribute.
        """
        return any(stores_attribute(each.code, attribute) for each in self._bases)

    def definitions_of(self, method: str) -> Iterator[SourceMethod]:
        """
        Every definition of a method, the most derived class first.
        """
        for each in self._bases:
            statement = each.attribute(method)
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                bases = tuple(_name_of(base) for base in each.node.bases)
                yield SourceMethod(each.node.name, bases, each.module.text, each.module.code_of(statement))

    @cached_property
    def _bases(self) -> list[SourceClass]:
        return self._resolution_order(self._class)

    @cached_property
    def _handler_bases(self) -> list[SourceClass]:
        for each in self._bases:
            found = self._tree.resolve(each.module, HANDLER_CLASS)
            if found is not None and isinstance(found[1], ast.ClassDef):
                return self._resolution_order(SourceClass(found[0], found[1]))
        return []

    def _resolution_order(self, start: SourceClass) -> list[SourceClass]:
        """
        The method resolution order, by Python itself: empty classes with the same bases stand in for the real ones.
        """
        made: dict[type, SourceClass] = {}
        known: dict[tuple[str, str], type] = {}

        def make(each: SourceClass) -> type:
            key = (each.module.name, each.node.name)
            if key not in known:
                found = [
                    self._tree.resolve(each.module, base.id) for base in each.node.bases if isinstance(base, ast.Name)
                ]
                bases = [make(SourceClass(*pair)) for pair in found if pair and isinstance(pair[1], ast.ClassDef)]  # type: ignore[arg-type]
                known[key] = types.new_class(each.node.name, tuple(bases))
                made[known[key]] = each
            return known[key]

        return [made[cls] for cls in make(start).__mro__ if cls in made]

    def _find_function(self, name: str) -> Entry | None:
        callers = self._handler_bases if self.keeps(HANDLER_ATTRIBUTE) else self._bases
        found = [each for each in callers if each.module.has(name)]
        if not found:
            return None
        place = next((each for each in found if name in names_of(each.code)), found[0]).module
        resolved = self._tree.resolve(place, name)
        if resolved is None:
            return Entry(problem=f"it comes from {place.imports[name][0]}, which cannot be read here")
        return self._read_entry(resolved[0], resolved[1], bound=False)

    def _read_entry(self, module: SourceModule, statement: ast.stmt, *, bound: bool) -> Entry:
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Entry(problem="not a plain method")
        code = module.code_of(statement)
        decorators = [_name_of(decorator) for decorator in statement.decorator_list]
        if _PROPERTIES & set(decorators):
            return Entry(problem="not a plain method")
        for decorator in decorators:
            if decorator in _TRANSPARENT or decorator in {"staticmethod", "classmethod"}:
                continue
            found = self._tree.resolve(module, decorator)
            if found is None or not isinstance(found[1], ast.FunctionDef):
                return Entry(problem=f"decorated with {decorator}, which cannot be read here")
            stand_in = _stand_in(found[1])
            if stand_in is not None:
                code = found[0].code_of(stand_in)
                break
        if code.co_flags & inspect.CO_COROUTINE:
            return Entry(problem="not a plain method", code=code)
        takes_self = bound and "staticmethod" not in decorators and code.co_argcount > 0
        return Entry(parameters=_parameters_of(code)[int(takes_self) :], code=code)


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """
    Statements in order, those in `if` and `try` too, but for what only type checkers see.
    """
    for statement in body:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _flatten(statement.orelse)
            case ast.If():
                yield from _flatten([*statement.body, *statement.orelse])
            case ast.Try():
                yield from _flatten([*statement.body, *statement.orelse, *statement.finalbody])
            case _:
                yield statement


def _name_of(decorator: ast.expr) -> str:
    match decorator:
        case ast.Call(func=function):
            return _name_of(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ast.unparse(decorator)


def _stand_in(decorator: ast.FunctionDef) -> ast.FunctionDef | None:
    """
    The function that a decorator puts in place of what it decorates; None if what it returns tells what it wraps.
    """
    inner = [node for node in ast.walk(decorator) if isinstance(node, ast.FunctionDef) and node is not decorator]
    if not inner or any(_name_of(each) == "wraps" for node in inner for each in node.decorator_list):
        return None
    return inner[-1]


def _parameters_of(code: types.CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[:count]
