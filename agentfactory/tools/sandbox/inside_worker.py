"""The program inside a sandbox: one Python that executes cells, or one script, for the process at the other end.

It is copied in as a file and imports nothing of ours; any Python from 3.8 on can run it. It imports as little as
possible, because imports are half of a sandbox's cost. Messages are datagrams with fields separated by NUL: requests
are nonce, verb, argument, data; answers are nonce, name, data, and the last has the name `end`. Whatever a cell does to
this process, its socket and these classes affects only its own chain: the other end trusts nothing here."""

from __future__ import annotations

import _ast
import _signal
import _socket
import builtins
import io
import os
import resource
import sys
from _sitebuiltins import Quitter

MESSAGE_BYTES = 1 << 17
DATA_BYTES = 60_000
_PR_SET_PDEATHSIG = 1
_Module = type(sys)


class Output(io.TextIOBase):
    """`sys.stdout` and `sys.stderr`: up to `half` characters per cell are written, then only the tail is kept."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, half: int) -> None:
        self._half = half
        self.begin()

    def begin(self) -> None:
        self.written, self.left_out, self.tail = 0, 0, ""

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        here = text[: max(0, self._half - self.written)]
        if here:
            self.written += len(here)
            try:
                os.write(1, here.encode("utf-8", "backslashreplace"))
            except OSError:  # the descriptor is full: output that bypassed this object comes first
                self.left_out += len(here)
        rest = len(text) - len(here)
        if rest:
            added = text[-min(rest, self._half) :]
            kept = (self.tail + added)[-self._half :]
            self.left_out += len(self.tail) + rest - len(kept)
            self.tail = kept
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    @property
    def buffer(self) -> Bytes:
        return Bytes(self)


class Bytes(io.RawIOBase):
    def __init__(self, output: Output) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:  # type: ignore[no-untyped-def, override]
        data = bytes(data)
        self._output.write(data.decode("utf-8", "replace"))
        return len(data)


class Interpreter:
    def __init__(self, half: int) -> None:
        self._half = half
        self._output = sys.stdout = sys.stderr = Output(half)  # type: ignore[assignment]
        self._main = _Module("__main__")
        self._main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self._main
        self._cells = 0

    def run(self, code: str, seconds: float) -> dict[str, str]:
        """Return the answer to one cell: the rest of its output, the value of its last expression, its traceback."""
        self._cells += 1
        self._output.begin()
        told = {}
        try:
            _signal.setitimer(_signal.ITIMER_REAL, seconds)
            try:
                result = self._execute(code, f"<cell {self._cells}>")
                if result is not None:
                    told["value"] = _cut(repr(result), self._half)
            finally:
                _signal.setitimer(_signal.ITIMER_REAL, 0)
        except BaseException as error:
            told["error"] = type(error).__name__
            told["traceback"] = _cut(_explain(error), self._half)
        return {**told, "left_out": str(self._output.left_out), "tail": self._output.tail}

    def _execute(self, code: str, name: str) -> object:
        _own_code[name] = code
        tree: _ast.Module = compile(code, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
        last = None
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        namespace = self._main.__dict__
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if last is None:
            return None
        value = eval(compile(last, name, "eval", dont_inherit=True), namespace)
        if value is not None:
            namespace["_"] = value
        return value


def _cut(text: str, half: int) -> str:
    if len(text) <= half:
        return text
    quarter = half // 2
    return f"{text[:quarter]}\n[... {len(text) - 2 * quarter} characters left out ...]\n{text[-quarter:]}"


def _explain(error: BaseException) -> str:
    import linecache
    import traceback

    for name, code in _own_code.items():
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)  # makes the traceback show the lines
    outermost = traceback.TracebackException(type(error), error, error.__traceback__)
    report: traceback.TracebackException | None = outermost
    seen = set()
    while report is not None and id(report) not in seen:
        seen.add(id(report))
        first = next((index for index, frame in enumerate(report.stack) if frame.filename in _own_code), None)
        report.stack[:] = [] if first is None else [f for f in report.stack[first:] if f.filename != __file__]
        report = report.__cause__ or report.__context__
    return "".join(outermost.format()).rstrip("\n")


_own_code: dict[str, str] = {}
"""Source of the cells, or of the script, by name; tracebacks begin at their frames."""


def _alarm(signum: int, frame: object) -> None:
    raise TimeoutError("the time limit of a cell is over; variables are kept")


def _run_script(file: str, stdin: str) -> int:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.argv = [file]
    main = _Module("__main__")
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(file, encoding="utf-8") as source:
        text = source.read()
    _own_code[file] = text
    try:
        exec(compile(text, file, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        print(_explain(error), file=sys.stderr)
        return 1
    return 0


def _files(folder: str) -> list[str]:
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            whole = os.path.join(path, name)
            if not name.startswith(".") and os.path.isfile(whole) and not os.path.islink(whole):
                found.append(os.path.relpath(whole, folder))
    return found


class Worker:
    def __init__(self, control: _socket.socket, folder: str, half: int) -> None:
        self._control = control
        self._folder = folder
        self._half = half
        self._interpreter: Interpreter | None = None
        self._known: dict[str, bytes] = {}
        """File -> digest of the content that the other end has."""
        self._given: set[str] = set()
        """Files that the other end wrote since the last cell."""

    def serve(self) -> None:
        """Answer one request after the other; a script is the last one."""
        self._answer(b"", "end")
        while message := self._control.recv(MESSAGE_BYTES):
            nonce, verb, argument, data = message.split(b"\0", 3)
            if verb == b"script":
                self._control.close()
                sys.path.insert(0, self._folder)
                sys.exit(_run_script(argument.decode(), data.decode()))
            if verb == b"cell":
                self._cell(nonce, data.decode(), float(argument))
            elif verb in (b"write", b"append"):
                self._write(nonce, argument.decode(), data, "wb" if verb == b"write" else "ab")
            elif verb == b"read":
                self._read(nonce, *argument.decode().split("\n"))
            self._answer(nonce, "end")

    def _answer(self, nonce: bytes, name: str, data: bytes = b"") -> None:
        self._control.send(b"\0".join((nonce, name.encode(), data)))

    def _cell(self, nonce: bytes, code: str, seconds: float) -> None:
        if self._interpreter is None:
            sys.path.insert(0, self._folder)
            self._interpreter = Interpreter(self._half)
        self._known.update((name, _digest(os.path.join(self._folder, name))) for name in self._given)
        self._given.clear()
        for name, text in self._interpreter.run(code, seconds).items():
            data = text.encode("utf-8", "backslashreplace")
            for start in range(0, len(data), DATA_BYTES):
                self._answer(nonce, name, data[start : start + DATA_BYTES])

    def _write(self, nonce: bytes, name: str, data: bytes, mode: str) -> None:
        path = os.path.join(self._folder, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, mode) as file:
                file.write(data)
        except OSError as error:
            if os.path.isfile(path):  # in part
                os.unlink(path)
            self._answer(nonce, "fault", str(error).encode())
            return
        self._given.add(name)

    def _read(self, nonce: bytes, largest: str, *patterns: str) -> None:
        from fnmatch import fnmatch

        room = int(largest)
        for name in _files(self._folder):
            path = os.path.join(self._folder, name)
            now = _digest(path) if any(fnmatch(name, pattern) for pattern in patterns) else b""
            if now in (b"", self._known.get(name)):
                continue
            self._known[name] = now
            if (size := os.path.getsize(path)) > room:
                self._answer(nonce, "large", os.fsencode(name))
                continue
            room -= size
            self._answer(nonce, "file", os.fsencode(name))
            with open(path, "rb") as file:
                while piece := file.read(DATA_BYTES):
                    self._answer(nonce, "content", piece)


def _digest(path: str) -> bytes:
    from hashlib import blake2b

    digest = blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while piece := file.read(DATA_BYTES):
                digest.update(piece)
    except OSError:
        return b""
    return digest.digest()


def main() -> None:
    """Apply the limits and serve: `inside_worker.py SOCKET FOLDER HALF FOLLOW LIMITS TOKEN PATH...`."""
    descriptor, folder, half, follow, limits, _, *path = sys.argv[1:]
    control = _socket.socket(fileno=int(descriptor))
    os.set_inheritable(int(descriptor), False)
    if follow == "follow":
        # end with the thread that started this process; bwrap does the same
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _signal.SIGKILL)
    os.chdir(folder)
    os.mkdir(".tmp")
    sys.path.extend(path)
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")  # type: ignore[assignment]
    _signal.signal(_signal.SIGALRM, _alarm)
    for limit in limits.split(","):
        name, value = limit.split("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    Worker(control, folder, int(half)).serve()


if __name__ == "__main__":
    main()
