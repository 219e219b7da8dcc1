"""`agentfactory view`: its options and the server."""

import argparse
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extras import check_extra

ABOUT = "show runs as a web page on this machine: curves, chains, tokens"
EXAMPLES = ["view runs/mine", "view runs/first runs/second --port 0", "view runs/mine --export mine.html"]
PORT = 8765
_HOST = "127.0.0.1"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, such as runs/quickstart")
    parser.add_argument(
        "--port", type=_port, default=PORT, metavar="N", help=f"port on 127.0.0.1; 0 takes a free one (default: {PORT})"
    )
    about = "write one self-contained HTML file with all curves and some trajectories, and serve nothing"
    parser.add_argument("--export", type=Path, metavar="FILE.html", help=about)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Show the runs until Ctrl-C, or export them. Raises SettingError, also without the extra `viewer`."""
    check_extra("viewer")
    if options.export is not None:
        from agentfactory.viewer.html_export import export

        say(export(options.runs, options.export))
        return
    serve(options.runs, options.port, say)


def serve(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Show runs on loopback until Ctrl-C or SIGTERM. Raises SettingError if it cannot start."""
    # these take longer to import than everything else
    from agentfactory.base.http.http_server import serve_http
    from agentfactory.viewer.access import PrivatePath
    from agentfactory.viewer.app import make_app
    from agentfactory.viewer.runs.follower import Follower

    follower = Follower(folders)
    listener = _listen(port)
    port = listener.getsockname()[1]
    follower.start()
    try:
        key = secrets.token_urlsafe(16)
        app = PrivatePath(make_app(follower, port), key)
        names = ", ".join(run.label for run in follower.runs)
        say(f"viewing {names} at http://{_HOST}:{port}/{key}/ (Ctrl-C ends it)")
        serve_http(app, listener)
    finally:
        follower.close()
        listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    # the port of a viewer that has just ended can be reused
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingError("", f"--port {port}: {error.strerror}", "--port 0 takes a free one") from None
    return listener


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}; use a number up to 65535, 0 for a free port")
    return int(text)
