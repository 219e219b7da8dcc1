"""`python -m agentfactory.rollout.inference.embedded MODEL --port N`: serve a model with the embedded engine."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import is_loopback
from agentfactory.base.http.server_keys import published_key
from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.memory import give_back_freed, keep_freed_memory
from agentfactory.rollout.config.server import EMBEDDED_QUANTIZATIONS
from agentfactory.rollout.text.stop_strings import Decode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agentfactory.rollout.inference.embedded", description=__doc__)
    parser.add_argument("model", help="folder or hub name of a causal language model in the transformers format")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a public one needs an API key")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--served-model-name", default="policy", help="the base model's name in requests")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=EMBEDDED_QUANTIZATIONS, help="round the weights of linear modules")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens per sequence, prompt included")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="maximum number of concurrent sequences")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="adapter to load at start")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key (default: a random key)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--weight-version", default="default", help="label of the initial weights")
    return parser.parse_args()


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded: a taken port fails early, and no one else can listen there and get
    the keys of early clients."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except (OSError, OverflowError) as error:
        _fail(f"cannot listen on {host}:{port}: {error}")
    return bound


async def _serve(args: argparse.Namespace, bound: socket.socket, api_key: str) -> None:
    # imports create no garbage, but garbage collection would take a fifth of their time
    gc.disable()
    import torch
    from aiohttp import web
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections
    from agentfactory.rollout.inference.embedded.adapters import AdapterError
    from agentfactory.rollout.inference.embedded.embedded_server import Server
    from agentfactory.rollout.inference.embedded.engine import Engine
    from agentfactory.rollout.inference.embedded.quantization import adapters_only, quantize
    from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel
    from agentfactory.rollout.model_hub import load_fault
    from agentfactory.rollout.text.tokenizer import stop_ids

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
        if stored := getattr(config, "quantization_config", None):
            _fail(
                f"the embedded engine cannot serve {args.model}, which is quantised ({stored['quant_method']}); use "
                "engine: vllm, or the unquantised model with --quantization int8 or int4"
            )
        sees = hasattr(config, "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model: Any = kind.from_pretrained(
            args.model, config=config, dtype=getattr(torch, args.dtype), trust_remote_code=False
        )
        model = model.to(device=device)
        encoder = None
        if sees:
            from agentfactory.rollout.inference.embedded.image_encoder import load_encoder

            encoder = load_encoder(args.model, model)
    except (OSError, ValueError, RuntimeError) as error:
        _fail(f"cannot load the model {args.model}: {load_fault(error)}")
    try:
        if args.quantization:
            quantize(model, args.quantization)
        engine = Engine(
            model,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            weight_version=args.weight_version,
            encoder=encoder,
        )
        # only now: weights that were packed one by one must not leave memory for reuse behind
        give_back_freed()
        keep_freed_memory()
        server = Server(
            engine,
            served_model_name=args.served_model_name,
            eos_token_ids=frozenset(stop_ids(args.model)),
            api_key=api_key,
            decode=_decoder(args.model),
        )
        for adapter in args.adapter:
            name, _, path = adapter.partition("=")
            server.load_adapter(name, path)
    except UnsupportedModel as error:
        _fail(f"the embedded engine cannot serve {args.model}: {error}; use engine: vllm")
    except MemoryError as error:
        _fail(str(error))
    except AdapterError as error:
        _fail(f"--adapter {adapter}: {error}")
    dispatch = adapters_only(server.dispatch, args.quantization) if args.quantization else server.dispatch
    log_few(logging.getLogger("aiohttp.server"))
    connect = web.Server(
        dispatch,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=HEADER_SECONDS,
        auto_decompress=False,  # a short compressed body could expand to a huge one
    )
    limit = ConnectionLimit(most_connections())
    await asyncio.get_running_loop().create_server(partial(limit.admit, connect), sock=bound, backlog=1024)
    gc.freeze()
    gc.enable()
    host, port = bound.getsockname()[:2]
    print(f"ready http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await server.run_engine()


def _decoder(model: str) -> Decode | None:
    """Return a function from ids to text, special tokens included; None if the model has no tokenizer."""
    from agentfactory.rollout.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except SettingError:
        return None
    decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    if tokenizer.is_fast:  # without the wrapper, which doubles the time
        decode = tokenizer.backend_tokenizer.decode
    return partial(decode, skip_special_tokens=False)


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 2 and one line on stderr when it cannot start."""
    cleanup = contextlib.ExitStack()

    def end(*_: object) -> NoReturn:
        cleanup.close()
        os._exit(0)  # there is nothing to save

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    parent_watch.follow_parent()
    args = _arguments()
    api_key = None
    if args.api_key_env and not (api_key := os.environ.get(args.api_key_env)):
        _fail(f"--api-key-env {args.api_key_env}: this environment variable is not set")
    bound = _bind(args.host, args.port)
    if not is_loopback(bound.getsockname()[0]) and not api_key:
        _fail(f"--host {args.host} is a public address: it needs --api-key-env")
    with cleanup:
        try:
            api_key = api_key or cleanup.enter_context(published_key(*bound.getsockname()[:2]))
        except (SettingError, OSError) as error:
            _fail(f"cannot write the key for this server's clients: {error}")
        asyncio.run(_serve(args, bound, api_key))


if __name__ == "__main__":
    main()
