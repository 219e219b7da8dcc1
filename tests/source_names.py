"""Names in Python sources that lie in a folder, such as an unpacked wheel, without importing them."""

import ast
import copy
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def unpacked_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of a requirement; return the folder with its sources and its metadata."""
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", requirement]
    subprocess.run([*download, "--dest", str(folder)], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel", [one for one in archive.namelist() if one.endswith((".py", "METADATA"))])
    return folder / "wheel"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def defined(nodes: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Yield what a body defines or imports by name, also under `if`. The last one counts."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If):
            yield from defined(node.body)


def find(folder: Path, name: str) -> tuple[str, ast.AST] | None:
    """Return the module and the code of "MODULE:", "MODULE:NAME" or "MODULE:NAME.MEMBER", also if MODULE imports NAME.
    A member is the class's own, or one that a method of it assigns."""
    module, _, path = name.partition(":")
    first, _, member = path.partition(".")
    place = folder.joinpath(*module.split("."))
    file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
    if file is None or not first:
        return (module, parsed(file)) if file else None
    node = dict(defined(parsed(file).body)).get(first)
    if node is None:
        return find(folder, f"{module}.{first}:{member}")
    if isinstance(node, ast.ImportFrom):
        parents = module.split(".")[: len(module.split(".")) - node.level + (file.name == "__init__.py")]
        origin = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
        return find(folder, f"{origin}:{path}") or (None if member else (module, node))
    if member and isinstance(node, ast.AnnAssign):
        return find(folder, f"{module}:{ast.unparse(node.annotation)}.{member}")
    given = {e.attr: e for e in ast.walk(node) if isinstance(e, ast.Attribute) and isinstance(e.ctx, ast.Store)}
    own = given | dict(defined(getattr(node, "body", []))) if member else {member: node}
    return (module, own[member]) if member in own else None


def description(node: ast.AST) -> str:
    """Return a signature without its defaults, a value, a class's abstract methods, or the kind of other code."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        told, default = copy.deepcopy(node.args), ast.Constant(...)
        for each in ast.walk(told):
            vars(each).update(annotation=None) if isinstance(each, ast.arg) else None
        told.defaults = [default for _ in told.defaults]
        told.kw_defaults = [each and default for each in told.kw_defaults]
        return f"({ast.unparse(told)})"
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return ast.unparse(node).partition(" = ")[2] or ast.unparse(node.annotation)  # type: ignore[union-attr]
    methods = [each for each in getattr(node, "body", []) if isinstance(each, ast.FunctionDef)]
    abstract = [each.name for each in methods if "abstractmethod" in map(ast.unparse, each.decorator_list)]
    return " ".join([type(node).__name__, *abstract])


def fields_of(folder: Path, name: str) -> dict[str, bool]:
    """Return the fields of a class, those of its bases included: name -> whether it may be left out."""
    module, node = find(folder, name) or ("", None)
    found: dict[str, bool] = {}
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            found |= fields_of(folder, f"{module}:{ast.unparse(base)}")
        own = [each for each in node.body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each)]
        found |= {ast.unparse(each.target): each.value is not None for each in own}
    return {field: optional for field, optional in found.items() if not field.startswith("_")}
