"""Mutate the core, and look for tests that fail: `python benchmarks/mutants.py --coverage FILE [--against TREE]`.

A mutant changes one operator, constant or condition in a function of the core (agentfactory without worlds, audit and
viewer). The choice depends only on the seed and on the statements; with `--against` they must stand in both trees, in
functions of the same name, so the same mutants are chosen in both. For each mutant, the tests that enter its line run
until one fails: those that cover the fewest lines first, at most TESTS. FILE is data of coverage.py (to be installed),
recorded with `dynamic_context = test_function` by a run of the tests. The last line is JSON.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

CORE = "agentfactory"
EXTENSIONS = ("worlds", "audit", "viewer")
TESTS = 12
"""Maximum number of tests that a mutant is tried against."""
SECONDS = 150.0
"""Time limit of these tests together; a mutant that makes one hang counts as found."""
MESSAGES = {"logger", "notify", "say", "print", "SettingError"}
"""Functions whose arguments are messages, in which no mutant is made."""

COMPARED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one expression. `key` identifies it in every tree: function, statement, and index in the statement.
    `span` is the byte range of the old expression in the file, and `line` the first line of its statement."""

    key: tuple[str, str, int]
    file: str
    line: int
    span: tuple[int, int]
    new: str


def mutated(node: ast.AST) -> ast.expr | None:
    """Return the changed expression, or None if no change is defined for it."""
    match node:
        case ast.Compare(left, [op], comparators) if type(op) in COMPARED:
            return ast.Compare(left, [COMPARED[type(op)]()], comparators)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.BinOp(left, op, right) if type(op) in COMPUTED:
            is_text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right))
            return None if is_text else ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            return ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a statement that may be changed, without its body, annotations and messages."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.JoinedStr | ast.arguments | ast.excepthandler | ast.match_case):
            continue
        if isinstance(child, ast.Call) and any(
            isinstance(name, ast.Name) and name.id in MESSAGES for name in ast.walk(child.func)
        ):
            continue
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from expressions(child)


def mutants(tree: Path) -> dict[tuple[str, str, int], Mutant]:
    """Return the possible mutants of a tree by their keys; keys that occur twice are left out."""
    found: defaultdict[tuple[str, str, int], list[Mutant]] = defaultdict(list)
    for path in sorted((tree / CORE).rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        if name.split("/")[1] in EXTENSIONS:
            continue
        source = path.read_text(encoding="utf-8")
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for statement in _statements(function):
                if isinstance(statement, ast.Raise | ast.Assert):
                    continue
                head = [node for node in expressions(statement) if node.end_lineno is not None]
                for index, node in enumerate(head):
                    if (changed := mutated(node)) is None:
                        continue
                    assert node.end_lineno is not None
                    assert node.end_col_offset is not None
                    span = (
                        starts[node.lineno - 1] + node.col_offset,
                        starts[node.end_lineno - 1] + node.end_col_offset,
                    )
                    new = ast.unparse(ast.fix_missing_locations(ast.Expression(changed)))
                    key = (function.name, " ".join(ast.unparse(each) for each in head[:1]) + ast.unparse(node), index)
                    found[key].append(Mutant(key, name, statement.lineno, span, f"({new})"))
    return {key: made[0] for key, made in found.items() if len(made) == 1}


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child)


class Covering:
    """The tests that enter each line, from the data of coverage.py for one tree."""

    def __init__(self, data: Path, tree: Path) -> None:
        found = CoverageData(str(data))
        found.read()
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._size: Counter[str] = Counter()
        for file in found.measured_files():
            _, inside, name = file.rpartition(f"/{CORE}/")
            lines = found.contexts_by_lineno(file)
            self._lines[f"{CORE}/{name}" if inside else file] = lines
            for contexts in lines.values():
                self._size.update(contexts)
        self._tree = tree

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that enter the mutant's line, as pytest's arguments: the most specific first."""
        lines = self._lines.get(mutant.file, {})
        contexts = {name for name in lines.get(mutant.line, ()) if name}
        return [*filter(None, map(self._node, sorted(contexts, key=lambda name: (self._size[name], name))))]

    def _node(self, context: str) -> str | None:
        parts = context.split(".")
        for length in range(len(parts) - 1, 0, -1):
            file = "/".join(parts[:length]) + ".py"
            if parts[0] == "tests" and (self._tree / file).is_file():
                return "::".join((file, *parts[length:]))
        return None


def run(mutant: Mutant, tests: list[str], tree: Path, scratch: Path) -> str:
    """Plant a mutant in `tree`, run the tests, and undo it. Return the test that fails, `hangs`, or an empty text."""
    file = tree / mutant.file
    before = file.read_bytes()
    start, end = mutant.span
    file.write_bytes(before[:start] + mutant.new.encode() + before[end:])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *tests]
    command += [f"--basetemp={scratch / 'pytest'}"]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        file.write_bytes(before)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "" if done.returncode in (0, 5) else f"pytest ends with {done.returncode}"


def copied(tree: Path, folder: Path) -> Path:
    """Copy the files of a repository that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True).stdout
    archive = subprocess.run(
        ["tar", "c", "--null", "--no-recursion", "-T", "-"], cwd=tree, input=listed.encode(), capture_output=True
    )
    folder.mkdir()
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


def main() -> None:
    """Try the mutants, and print the test that found each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, required=True, help="data of coverage.py with contexts, combined")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="repository (default: this one)")
    parser.add_argument("--against", type=Path, help="another tree, in which the same statements must stand")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    possible = mutants(args.tree)
    keys = possible.keys() if args.against is None else possible.keys() & mutants(args.against).keys()
    chosen = [possible[key] for key in random.Random(args.seed).sample(sorted(keys), args.count)]
    covering = Covering(args.coverage, args.tree)
    found = entered = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        Path(scratch).chmod(0o755)
        copy = copied(args.tree, Path(scratch) / "repository")
        for number, mutant in enumerate(chosen):
            started = time.monotonic()
            tests = covering.of(mutant)[:TESTS]
            failed = run(mutant, tests, copy, Path(scratch)) if tests else ""
            found += bool(failed)
            entered += bool(tests)
            place = f"{mutant.file}:{mutant.line} {mutant.new[:40]}"
            print(f"{number:3} {place:80} {time.monotonic() - started:4.0f} s  {failed or 'NOT FOUND'}", flush=True)
    print(json.dumps({"mutants": len(chosen), "possible": len(keys), "entered": entered, "found": found}))


if __name__ == "__main__":
    main()
