"""The trainer's parts: sdpa on trees in bfloat16, the seconds and kernels of an update, and a curve."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.base.user_code.loading import load_object
from benchmarks.gpu_parts.findings import DEVICE, GPU, Findings, rounded
from benchmarks.placement import SIZES, Size, make_model, make_update, time_update, wait_for_device

RECIPES = Path(__file__).parents[2] / "recipes"


def prepared(name: str, data: Path) -> tuple[Size, Path]:
    """Return a size, and the folder of a random model of it, which later parts use again. On a CPU it is tiny."""
    size = SIZES[name if GPU else "tiny"]
    folder = data / (name if GPU else "tiny")
    if not (folder / "model" / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_model(size, folder)
    return size, folder


# ---- sdpa


def gradients_are_finite() -> bool:
    """Return whether sdpa's gradients are, in the case of https://github.com/pytorch/pytorch/issues/196678."""
    draw = torch.Generator(DEVICE).manual_seed(0)
    length, width = (704, 64) if GPU else (70, 16)
    query, key, value = (
        torch.randn(1, 1, length, width, device=DEVICE, dtype=torch.bfloat16, generator=draw) for _ in range(3)
    )
    query[..., 0], key[..., 0] = 1.0, -120.0 * width**0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()[None, None]
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask).float().square().sum().backward()
    return all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in inputs)


def sdpa(findings: Findings) -> None:
    """Trees with sdpa in bfloat16: gradient norms of updates with the trainer's choice of kernels and, afterwards, with
    cuDNN's, which it disables."""
    size, folder = prepared("0.5b", findings.data)
    for name, allowed in (("without cuDNN", False), ("with cuDNN", True)):
        # the learner disables it
        update = make_update(replace(size, groups=2 if GPU else 1), folder, False, batching="tree", learning_rate=1e-4)
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        findings.add(f"finite gradients {name}", gradients_are_finite())
        findings.add(f"gradient norms {name}", [norm for _ in range(10 if GPU else 3) for norm in update()])


# ---- updates


FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "bfloat16": {
        "today": {},
        "sdpa": {"attention": "sdpa"},
        "no checkpointing": {"gradient_checkpointing": False},
        "64k tokens": {"token_budget": 2**16},
        "tree": {"batching": "tree"},
        "tree, sdpa": {"batching": "tree", "attention": "sdpa"},
        "compile": {"compile": True},
        "64k tokens, compile": {"token_budget": 2**16, "compile": True},
    },
    "fp8": {
        name: {"compile": GPU, "token_budget": 2**16, "precision": name} for name in ("auto", "fp8", "fp8_rowwise")
    },
}
"""Family -> form -> settings of `train`, beside those of `make_update`. On a CPU nothing is compiled for FP8."""


WITH_ADAPTER = ("today", "64k tokens", "64k tokens, compile", "auto", "fp8")
"""Forms that are measured with an adapter, too."""


def update(name: str, family: str, findings: Findings) -> None:
    """Speed, memory and kernels of an update, full weights, one form after the other; then those of an adapter."""
    size, folder = prepared(name, findings.data)
    # 68,000 tokens: more than the largest micro-batch
    size = replace(size, groups=11 if GPU else 1)
    for lora in (False, True):
        for form, settings in FORMS[family].items():
            label = f"{form}, adapter" if lora else form
            if label not in findings and (not lora or form in WITH_ADAPTER):
                findings.add(label, measure(size, folder, lora, settings))


def measure(size: Size, folder: Path, lora: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the findings on one form, or why there are none: the next one may have some."""
    torch._dynamo.reset()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        made = make_update(size, folder, lora, **settings)
        return time_update(made, size, folder) | kernels(made)
    except (SettingError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def kernels(act: Callable[[], Any]) -> dict[str, Any]:
    """Return what runs on the device during a call: the number of kernels, the share of the time in which they run, and
    the shares of the longest ones. On a CPU, torch's own operators stand for them."""
    from torch.profiler import ProfilerActivity, profile

    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as watched:
        act()
        wait_for_device()
        seconds = time.perf_counter() - started
    spent = {
        event.key: (1e-6 * (event.self_device_time_total if GPU else event.self_cpu_time_total), event.count)
        for event in watched.key_averages()
    }
    longest = sorted(spent, key=lambda key: -spent[key][0])[:8]
    return {
        "kernels": sum(count for _, count in spent.values()),
        "busy": sum(took for took, _ in spent.values()) / seconds,
        "longest": {key[:80]: spent[key][0] / seconds for key in longest},
    }


# ---- a curve

SECONDS = 145


def curve(findings: Findings) -> None:
    """Success by step of a run on vLLM, until it ends or the part's time does: of recipes/real, if its model and its
    package were brought, else of the quickstart. Resumes the run of an earlier call."""
    from benchmarks.gpu_parts.serving import engine

    # both stages of both recipes are called alike
    overrides = [f"output={findings.data / 'curve'}", *engine().overrides]
    model = findings.data / "model"
    real = GPU and model.exists() and is_installed("reasoning_gym")
    if real:
        if not (model / "model.safetensors").exists():
            load_object("fetch.py:convert", RECIPES / "real")(model / "model.gguf", model)
        recipe = RECIPES / "real" / "gsm_symbolic-gpu.yaml"
        overrides += [f"model.path={model}", "sft.train.attention=flex_attention"]
    else:
        recipe = RECIPES / "quickstart" / "quickstart.yaml"
        few = ["sft.train.steps=30", "grpo.train.steps=2", "grpo.train.warmup_steps=0", "grpo.eval.data.limit=20"]
        overrides += [] if GPU else few
    findings.add("recipe", recipe.parent.name)
    begun = (findings.data / "curve" / "grpo" / "checkpoints").exists()
    how = "--resume" if begun else "--overwrite"
    command = [sys.executable, "-m", "agentfactory", "train", str(recipe), *overrides, how]
    deadline = time.monotonic() + SECONDS
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(2)
        note_steps(findings)
    ended = process.poll()
    if ended is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
    note_steps(findings)
    findings.add("ended", "by the time limit" if ended is None else f"with status {ended}")
    if ended:
        sys.exit(f"the run ended with status {ended}")


def note_steps(findings: Findings) -> None:
    """Keep what the run has logged."""
    kept = ("step", "loss", "success", "reward", "mismatch/kl", "mismatch/max", "entropy", "tokens")
    kept += tuple(f"seconds/{name}" for name in ("step", "wait", "update", "sync"))
    kept += ("eval/sampled/success", "eval/greedy/success")
    for stage in ("sft", "grpo"):
        log = findings.data / "curve" / stage / "metrics.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        steps = [json.loads(line) for line in lines if line.endswith("\n")]
        chosen = [{key: value for key, value in step.items() if key in kept} for step in steps]
        if stage == "sft":
            chosen = chosen[-1:]
        if chosen and rounded(chosen) != findings.found.get(stage):
            findings.add(stage, chosen)
