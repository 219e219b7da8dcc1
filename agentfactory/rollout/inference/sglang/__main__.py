"""`python -m agentfactory.rollout.inference.sglang MODEL --port N [FLAG ...]`: serve a model with SGLang.

SGLang is started here, or already runs. Flags that are not listed are passed to it.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from aiohttp import web

from agentfactory.base.errors import SettingError
from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections
from agentfactory.base.http.key_guard import listen, server_key
from agentfactory.base.http.loopback import is_loopback
from agentfactory.base.http.server_keys import key_of_environment
from agentfactory.base.processes import parent_watch
from agentfactory.rollout.inference.sglang.attach import attach
from agentfactory.rollout.inference.sglang.front import Front
from agentfactory.rollout.inference.sglang.sglang_process import SglangProcess
from agentfactory.rollout.inference.sglang.upstream import Sglang


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m agentfactory.rollout.inference.sglang", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", help="folder or hub name of a model in the transformers format")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a public one needs an API key")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--served-model-name", default="policy", help="the model's name in requests")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens per sequence, prompt included")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="maximum number of concurrent sequences")
    key_help = "environment variable with the API key, also that of --attach (default: a random key)"
    parser.add_argument("--api-key-env", metavar="NAME", help=key_help)
    parser.add_argument("--python", help="Python that has SGLang (default: this one)")
    parser.add_argument("--attach", metavar="URL", help="address of a running SGLang server, instead of starting one")
    return parser.parse_known_args()


async def _serve(
    args: argparse.Namespace, listener: socket.socket, api_key: str, process: SglangProcess | None
) -> None:
    if process is not None:
        await process.wait_until_ready()
        url, key = process.url, process.api_key
    else:
        url, key = args.attach, args.api_key_env and key_of_environment("--api-key-env", args.api_key_env)
    async with Sglang(url, key) as sglang:
        served = await attach(sglang)
        if served.max_model_len < args.max_model_len:
            problem = f"got {args.max_model_len}, but {url} takes {served.max_model_len} tokens"
            raise SettingError("server.max_model_len", problem, "lower it, or start SGLang with --context-length")
        front = Front(sglang, served, args.served_model_name, api_key)
        log_few(logging.getLogger("aiohttp.server"))
        server = web.Server(
            front.dispatch,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=HEADER_SECONDS,
            auto_decompress=False,  # a short compressed body could expand to a huge one
        )
        limit = ConnectionLimit(most_connections())
        await asyncio.get_running_loop().create_server(partial(limit.admit, server), sock=listener, backlog=1024)
        host, port = listener.getsockname()[:2]
        print(f"ready http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        await (process.watch() if process is not None else asyncio.Event().wait())


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 2 and one line on stderr when it cannot start, or SGLang ends."""
    cleanup = ExitStack()

    def end(*_: object) -> NoReturn:
        cleanup.close()
        os._exit(0)  # there is nothing to save

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    parent_watch.follow_parent()
    args, flags = _arguments()
    with cleanup:
        try:
            listener = listen(args.host, args.port, "server.port")
            address = listener.getsockname()[:2]
            if not is_loopback(address[0]) and not args.api_key_env:
                raise SettingError("--host", f"got {args.host}, a public address", "name a key by --api-key-env")
            api_key, _ = cleanup.enter_context(server_key(address[0], address[1], args.api_key_env))
            process = None
            if args.attach is None:
                own = ["--model-path", args.model, "--served-model-name", args.served_model_name, "--dtype", args.dtype]
                own += ["--context-length", str(args.max_model_len), "--max-running-requests", str(args.max_num_seqs)]
                process = SglangProcess(args.python, [*own, "--enable-metrics", *flags])
                cleanup.callback(process.end)
            asyncio.run(_serve(args, listener, api_key, process))
        except SettingError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None


if __name__ == "__main__":
    main()
