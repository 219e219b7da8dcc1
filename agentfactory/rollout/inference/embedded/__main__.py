"""`python -m agentfactory.rollout.inference.embedded MODEL --port N`: serve a model with the embedded engine."""

import argparse
import gc
import os
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.devices import is_wide
from agentfactory.base.processes.memory import give_back_freed, keep_freed_memory
from agentfactory.rollout.config.server import EMBEDDED_QUANTIZATIONS
from agentfactory.rollout.inference.http_server import BadRequest, answer_requests, run_server, server_parser
from agentfactory.rollout.text.stop_strings import Decode

SPINS = "300000"
"""How often a thread of OpenMP looks for work before it sleeps, as without OMP_WAIT_POLICY=passive. On two cores, steps
of Qwen2.5-0.5B take .82 of the time then, and those of the quickstart 1.1 times, since the worker waits for a core."""


async def _serve(args: argparse.Namespace, listener: socket.socket, api_key: str, cleanup: ExitStack) -> None:
    # imports create no garbage, but garbage collection would take a fifth of their time
    gc.disable()
    if is_wide(args.model):
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from agentfactory.rollout.inference.embedded.embedded_server import Server
    from agentfactory.rollout.inference.embedded.engine import Engine
    from agentfactory.rollout.inference.embedded.packed_linear import compute_in_int8, quantize
    from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel
    from agentfactory.rollout.model_hub import load_fault
    from agentfactory.rollout.text.tokenizer import stop_ids

    try:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
        if stored := getattr(config, "quantization_config", None):
            problem = f"the embedded engine cannot serve {args.model}, which is quantised ({stored['quant_method']})"
            fix = "use engine: vllm, or the unquantised model with --quantization int8 or int4"
            raise SettingError("", f"{problem}; {fix}")
        sees = hasattr(config, "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model: Any = kind.from_pretrained(
            args.model, config=config, dtype=getattr(torch, args.dtype), trust_remote_code=False
        )
        model = model.to(device="cuda" if torch.cuda.is_available() else "cpu")
        encoder = None
        if sees:
            from agentfactory.rollout.inference.embedded.image_encoder import load_encoder

            encoder = load_encoder(args.model, model)
    except SettingError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingError("", f"cannot load the model {args.model}: {load_fault(error)}") from error
    try:
        if args.quantization:
            if args.quantization == "int8":
                compute_in_int8(model)
            quantize(model, args.quantization)
        engine = Engine(model, max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs, encoder=encoder)
        # only now: weights that were packed one by one must not leave memory for reuse behind
        give_back_freed()
        keep_freed_memory()
        server = Server(
            engine,
            served_model_name=args.served_model_name,
            eos_token_ids=frozenset(stop_ids(args.model)),
            api_key=api_key,
            decode=_decoder(args.model),
            quantization=args.quantization,
        )
        for adapter in args.adapter:
            name, _, path = adapter.partition("=")
            server.load_adapter(name, path)
    except UnsupportedModel as error:
        raise SettingError("", f"the embedded engine cannot serve {args.model}: {error}; use engine: vllm") from error
    except MemoryError as error:
        raise SettingError("", str(error)) from error
    except BadRequest as error:
        raise SettingError("--adapter", f"got {adapter}: {error}") from error
    gc.freeze()
    gc.enable()
    await answer_requests(listener, server)
    await server.run_engine()


def _decoder(model: str) -> Decode | None:
    from agentfactory.rollout.text.tokenizer import decoder, load_tokenizer

    try:
        return decoder(load_tokenizer(model))
    except SettingError:
        return None


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 2 and one line on stderr when it cannot start."""
    parser = server_parser("agentfactory.rollout.inference.embedded", __doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantization", choices=EMBEDDED_QUANTIZATIONS, help="round the weights of linear modules")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="adapter to load at start")
    args = parser.parse_args()
    run_server(args, partial(_serve, args))


if __name__ == "__main__":
    main()
