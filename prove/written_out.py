"""Python source as a compiler wants it: constants said to be such, and what `dataclass` makes at run time written out.

mypyc compiles what stands in a module. The constructor of a data class does not stand there: the decorator makes it,
and it stays interpreted, with a look-up for every field where the class is frozen. So the copy that is compiled has it
in full; its frozen classes hash as before, but a field of theirs could be assigned to. Who reads a global pays a
look-up unless it is `Final`: names in capitals, assigned once, are.

Nothing else is changed: the values that a module computes are the same.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")  # no type variable, which has one letter


def written_out(source: str) -> str:
    """The module as it is compiled. Raises SyntaxError."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            _construct(node)
    module.body = [made for statement in module.body for made in _final(statement, _stores(module))]
    first = next((at for at, one in enumerate(module.body) if not _leads(one)), len(module.body))
    module.body.insert(first, ast.parse("from typing import Final").body[0])
    return ast.unparse(ast.fix_missing_locations(module))


def _leads(statement: ast.stmt) -> bool:
    """The docstring and what is imported from the future come before all else."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr)


# --- constants ---


def _stores(module: ast.Module) -> Counter[str]:
    names = [node for node in ast.walk(module) if isinstance(node, ast.Name)]
    return Counter(name.id for name in names if isinstance(name.ctx, ast.Store))


def _final(statement: ast.stmt, stores: Counter[str]) -> Iterator[ast.stmt]:
    """`A = 1` → `A: Final = 1`; `A, B = range(2)` → one for each."""
    final = ast.Name("Final", ast.Load())
    if isinstance(statement, ast.AnnAssign) and _constant(statement.target, stores) and statement.value is not None:
        statement.annotation = ast.Subscript(final, statement.annotation, ast.Load())
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        yield statement
        return
    target, value = statement.targets[0], statement.value
    targets, values = [target], [value]
    if isinstance(target, ast.Tuple):
        targets, values = target.elts, _several(value)
    if len(values) != len(targets) or not all(_constant(one, stores) for one in targets):
        yield statement
        return
    for one, its in zip(targets, values, strict=True):
        assert isinstance(one, ast.Name)
        yield ast.AnnAssign(one, final, its, 1)


def _constant(target: ast.expr, stores: Counter[str]) -> bool:
    return isinstance(target, ast.Name) and bool(_CONSTANT.fullmatch(target.id)) and stores[target.id] == 1


def _several(value: ast.expr) -> list[ast.expr]:
    """The values that are unpacked, if they stand there."""
    if isinstance(value, ast.Tuple):
        return value.elts
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "range":
        limits = [one.value for one in value.args if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        if len(limits) == len(value.args):
            return [ast.Constant(one) for one in range(*limits)]
    return []


# --- data classes ---


def _construct(node: ast.ClassDef) -> None:
    """Gives a data class the constructor that its decorator would have made."""
    calls = [one if isinstance(one, ast.Call) else ast.Call(one, [], []) for one in node.decorator_list]
    names = [one.func.id if isinstance(one.func, ast.Name) else "" for one in calls]
    if "dataclass" not in names:
        return
    at = names.index("dataclass")
    call = calls[at]
    options = {option.arg: option.value for option in call.keywords}
    if options.pop("frozen", None) is not None:
        options["unsafe_hash"] = ast.Constant(True)
    options["init"] = ast.Constant(False)
    node.decorator_list[at] = ast.Call(call.func, [], [ast.keyword(name, value) for name, value in options.items()])
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    node.body.insert(node.body.index(fields[-1]) + 1 if fields else len(node.body), _constructor(node, fields))


def _constructor(node: ast.ClassDef, fields: list[ast.AnnAssign]) -> ast.FunctionDef:
    made = ast.parse("def __init__(self) -> None: pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body.clear()
    for field in fields:
        assert isinstance(field.target, ast.Name)
        name, kind, default = field.target.id, field.annotation, field.value
        value: ast.expr = ast.Name(name, ast.Load())
        if isinstance(default, ast.Call) and isinstance(default.func, ast.Name) and default.func.id == "field":
            options = {option.arg: option.value for option in default.keywords}
            if "init" in options:
                continue
            default = options.get("default")
            if "default_factory" in options:
                anew = f"{ast.unparse(options['default_factory'])}() if {name} is None else {name}"
                kind, default, value = ast.BinOp(kind, ast.BitOr(), ast.Constant(None)), ast.Constant(None), _read(anew)
        made.args.args.append(ast.arg(name, kind))
        if default is not None:
            made.args.defaults.append(default)
        made.body.append(ast.Assign([ast.Attribute(ast.Name("self", ast.Load()), name, ast.Store())], value))
    if any(isinstance(one, ast.FunctionDef) and one.name == "__post_init__" for one in node.body):
        made.body.append(ast.Expr(_read("self.__post_init__()")))
    made.body = made.body or [ast.Pass()]
    return made


def _read(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body
