"""Names of settings in other training programs, and the recipe's fields with the same function. `docs/coming-from.md`
explains them; a test compares the two."""

import itertools
import re
from collections.abc import Iterator

_TRL = {
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_total_tokens, rollout.max_tokens",
    "max_prompt_length": "rollout.max_total_tokens",
    "max_tool_calling_iterations": "rollout.max_turns",
    "num_iterations": "train.updates_per_batch",
    "epsilon": "train.loss.options.clip_low",
    "epsilon_high": "train.loss.options.clip_high",
    "delta": "train.loss.options.dual_clip",
    "beta": "train.loss.kl.coefficient",
    "loss_type": "train.loss.normaliser",
    "scale_rewards": "train.advantage.options.scale",
    "importance_sampling_level": "train.loss.policy",
    "vllm_importance_sampling_correction": "train.loss.mismatch",
    "vllm_importance_sampling_mode": "train.loss.mismatch",
    "vllm_importance_sampling_clip_max": "train.loss.mismatch",
    "top_entropy_quantile": "train.loss.top_entropy",
    "mask_truncated_completions": "rollout.on_outcome",
    "reward_funcs": "rewards",
    "reward_weights": "rewards",
    "environment_factory": "tools, mcp_servers",
    "use_vllm": "server.engine",
    "vllm_mode": "server.url, placement.mode",
    "vllm_server_base_url": "server.url",
    "vllm_gpu_memory_utilization": "server.options.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "server.options.tensor_parallel_size",
    "vllm_max_model_length": "server.max_model_len",
    "vllm_enable_sleep_mode": "placement.mode",
    "per_device_train_batch_size": "train.batch_size, train.token_budget",
    "gradient_accumulation_steps": "train.batch_size, train.token_budget",
    "generation_batch_size": "train.batch_size",
    "steps_per_generation": "train.updates_per_batch",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "warmup_ratio": "train.warmup_steps",
    "lr_scheduler_type": "train.schedule",
    "adam_beta1": "train.optimizer.betas",
    "adam_beta2": "train.optimizer.betas",
    "adam_epsilon": "train.optimizer.eps",
    "optim": "train.optimizer.name",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_dtype": "model.dtype",
    "use_liger_kernel": "train.liger",
    "torch_compile": "train.compile",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_last",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "eval_dataset": "eval.data",
    "train_dataset": "data.path",
    "output_dir": "output",
    "report_to": "track.trackers",
    "run_name": "name",
    "model_name_or_path": "model.path",
    "peft_config": "model.lora",
    "peft_config.r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.target_modules",
    "load_in_4bit": "model.lora.quantization",
    "attn_implementation": "train.attention",
    "resume_from_checkpoint": "the option --resume of `agentfactory train`",
    "log_completions": "track.trajectories",
}
_VERL = {
    "data.train_batch_size": "train.batch_size",
    "data.train_files": "data.path",
    "data.val_files": "eval.data.path",
    "data.prompt_key": "data.columns",
    "data.max_prompt_length": "rollout.max_total_tokens",
    "data.max_response_length": "rollout.max_total_tokens, rollout.max_tokens",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules",
    "actor_rollout_ref.model.lora_adapter_path": "model.lora.from",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.gradient_checkpointing",
    "actor_rollout_ref.model.use_liger": "train.liger",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.name": "server.engine",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.prompt_length": "rollout.max_total_tokens",
    "actor_rollout_ref.rollout.response_length": "rollout.max_total_tokens, rollout.max_tokens",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "server.options.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "server.options.tensor_parallel_size",
    "actor_rollout_ref.rollout.max_model_len": "server.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs": "server.max_num_seqs",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools, mcp_servers",
    "actor_rollout_ref.rollout.multi_turn.format": "rollout.parser",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "limits.parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "limits.result_tokens",
    "actor_rollout_ref.rollout.agent.num_workers": "rollout.workers",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "rollout.agent",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.updates_per_batch",
    "actor_rollout_ref.actor.ppo_epochs": "train.updates_per_batch",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.token_budget",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.token_budget",
    "actor_rollout_ref.actor.use_dynamic_bsz": "train.batching",
    "actor_rollout_ref.actor.clip_ratio": "train.loss.options.clip_low, train.loss.options.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "train.loss.options.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "train.loss.options.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "train.loss.options.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "train.loss.normaliser",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "train.loss.policy",
    "actor_rollout_ref.actor.entropy_coeff": "train.loss.entropy_bonus",
    "actor_rollout_ref.actor.use_kl_loss": "train.loss.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_coef": "train.loss.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "train.loss.kl.estimator",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.strategy": "train.strategy",
    "actor_rollout_ref.actor.optim.lr": "train.learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "train.optimizer.weight_decay",
    "algorithm.adv_estimator": "train.advantage.estimator",
    "algorithm.gamma": "train.advantage.options.gamma",
    "algorithm.lam": "train.advantage.options.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "train.advantage.options.scale",
    "algorithm.use_kl_in_reward": "train.loss.kl.place",
    "algorithm.kl_ctrl.kl_coef": "train.loss.kl.coefficient",
    "algorithm.filter_groups": "rollout.equal_rewards",
    "reward_model.overlong_buffer": "train.overlong",
    "custom_reward_function": "rewards",
    "trainer.total_training_steps": "train.steps",
    "trainer.total_epochs": "train.steps",
    "trainer.save_freq": "train.checkpoint_every",
    "trainer.test_freq": "eval.every",
    "trainer.max_actor_ckpt_to_keep": "train.keep_last",
    "trainer.default_local_dir": "output",
    "trainer.project_name": "track.project",
    "trainer.experiment_name": "name",
    "trainer.logger": "track.trackers",
    "trainer.n_gpus_per_node": "train.processes",
    "trainer.critic_warmup": "train.advantage.options.critic_warmup_steps",
    "trainer.resume_mode": "the option --resume of `agentfactory train`",
}
_PRIME_RL = {
    "max_steps": "train.steps",
    "seq_len": "rollout.max_total_tokens",
    "max_model_len": "server.max_model_len",
    "max_async_level": "rollout.max_staleness",
    "max_off_policy_steps": "rollout.max_staleness",
    "output_dir": "output",
    "model.name": "model.path",
    "ckpt.interval": "train.checkpoint_every",
    "ckpt.keep_last": "train.keep_last",
    "ckpt.resume_step": "the option --resume of `agentfactory train`",
    "wandb.project": "track.project",
    "wandb.name": "name",
    "weight_broadcast.type": "sync.backend",
    "orchestrator.batch_size": "train.batch_size",
    "orchestrator.rollouts_per_example": "rollout.group_size",
    "orchestrator.max_concurrent": "rollout.concurrency",
    "orchestrator.max_inflight_rollouts": "rollout.inflight",
    "orchestrator.oversampling_factor": "rollout.inflight",
    "orchestrator.sampling.temperature": "rollout.temperature",
    "orchestrator.sampling.max_tokens": "rollout.max_tokens",
    "orchestrator.env": "tools, mcp_servers, data.source",
    "orchestrator.eval.interval": "eval.every",
    "orchestrator.eval.rollouts_per_example": "eval.samples",
    "orchestrator.eval.num_examples": "eval.data.limit",
    "orchestrator.buffer.online_difficulty_filtering": "rollout.equal_rewards",
    "orchestrator.advantage.type": "train.advantage.estimator",
    "trainer.optim.lr": "train.learning_rate",
    "trainer.optim.max_norm": "train.max_grad_norm",
    "trainer.model.lora.rank": "model.lora.rank",
    "trainer.model.seq_len": "rollout.max_total_tokens",
    "trainer.loss.type": "train.loss.policy",
    "inference.model.max_model_len": "server.max_model_len",
    "inference.parallel.tp": "server.options.tensor_parallel_size",
    "inference.parallel.dp": "server.options.data_parallel_size",
}
_MS_SWIFT = {
    "rlhf_type": "train.algorithm",
    "model_type": "model.chat_template",
    "template": "model.chat_template",
    "agent_template": "rollout.parser",
    "tuner_type": "model.lora",
    "train_type": "model.lora",
    "lora_rank": "model.lora.rank",
    "target_modules": "model.lora.target_modules",
    "quant_method": "model.lora.quantization",
    "dataset": "data.path",
    "val_dataset": "eval.data.path",
    "split_dataset_ratio": "eval.data",
    "columns": "data.columns",
    "system": "rollout.system_prompt",
    "max_length": "rollout.max_total_tokens",
    "external_plugins": "import_path",
    "multi_turn_scheduler": "rollout.agent",
    "vllm_max_model_len": "server.max_model_len",
    "vllm_data_parallel_size": "server.options.data_parallel_size",
    "vllm_server_host": "server.url",
    "sleep_level": "placement.mode",
    "dynamic_sample": "rollout.equal_rewards",
    "overlong_filter": "rollout.on_outcome",
    "soft_max_length": "train.overlong",
    "soft_cache_length": "train.overlong.buffer",
    "advantage_estimator": "train.advantage.estimator",
    "kl_in_reward": "train.loss.kl.place",
    "rollout_importance_sampling_mode": "train.loss.mismatch.correction",
    "attn_impl": "train.attention",
    "packing": "train.batching",
    "deepspeed": "train.strategy",
    "fsdp": "train.strategy",
}
_MCP_CLIENT = dict.fromkeys(("mcp", "servers", "inputs", "context_servers"), "mcp_servers")
NAMES = {"TRL": _TRL, "verl": _VERL, "prime-rl": _PRIME_RL, "ms-swift": _MS_SWIFT, "an MCP client": _MCP_CLIENT}
"""Program -> its name of a setting -> our fields."""


_DISTINCT = re.compile(r".*_.*|lr|r")
"""A last part of a dotted name that is enough to recognise it; `name`, `type` or `interval` are not."""


def familiar(name: str, value: object) -> str | None:
    """Return the fix for an unknown field that another program has, or that is a section of its settings; else None."""
    told = [
        f"{ours.replace(', ', ' and ')} for {program}'s {theirs}"
        for ours, program, theirs in dict.fromkeys(filter(None, _found(name, value)))
    ]
    return f"write {'; '.join(told)}" if told else None


def _found(name: str, value: object) -> Iterator[tuple[str, str, str] | None]:
    """Yield our fields, the program, and its name for a setting, or for each one in a section."""
    inside = (
        [found for key, item in value.items() for found in _found(f"{name}.{key}", item)]
        if isinstance(value, dict)
        else []
    )
    yield from filter(None, inside) if any(inside) else [_match(name)]


def _match(name: str) -> tuple[str, str, str] | None:
    """Return our fields, the program, and its name: the one with which `name` has most of its last parts in common."""
    best, longest = None, 0
    for program, names in NAMES.items():
        for theirs, ours in names.items():
            length = _common_end(name.split("."), theirs.split("."))
            enough = length > 1 or "." not in theirs or _DISTINCT.fullmatch(theirs.rpartition(".")[2])
            if length > longest and enough:
                best, longest = (ours, program, theirs), length
    return best


def _common_end(one: list[str], other: list[str]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
