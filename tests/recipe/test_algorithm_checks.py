"""Options of algorithms that cannot work together, or would do nothing, are refused with the fix."""

from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.load import load_recipe
from agentfactory.trainers.config import ALGORITHMS

GIGPO = ["train.advantage.estimator=gigpo", "train.advantage.options.anchors=observation"]
TEACHER = "teacher.model=Qwen/Qwen2.5-7B-Instruct"
URL = "teacher.url=http://127.0.0.1:8100"
REFUSED = {
    "k1 in the loss": (
        ["train.loss.kl.coefficient=0.1", "train.loss.kl.estimator=k1"],
        "train.loss.kl.estimator",
        "use k2 or k3, or place: reward",
    ),
    "distance in the reward of a chain": (
        ["train.loss.kl.coefficient=0.1", "train.loss.kl.place=reward"],
        "train.loss.kl.place",
        "reinforce_pp or gae",
    ),
    "estimator of no distance": (["train.loss.kl.estimator=k2"], "train.loss.kl.estimator", "kl.coefficient > 0"),
    "mask that nothing passes": (
        ["train.loss.mismatch={correction: token_mask, options: {low: 3}}"],
        "train.loss.mismatch.options.low",
        "lower it",
    ),
    "lower bound of a truncation": (
        ["train.loss.mismatch.options.low=0.1"],
        "train.loss.mismatch.options.low",
        "token_mask",
    ),
    "bound of no correction": (
        ["train.loss.mismatch={correction: none, options: {high: 3}}"],
        "train.loss.mismatch.options.high",
        "correction",
    ),
    "geometric mask of the ratios of tokens": (
        ["train.loss.mismatch.correction=geometric_mask"],
        "train.loss.mismatch.options",
        "low: 0.99, high: 1.01",
    ),
    "no expression": (["train.optimizer.groups=[{match: '['}]"], "train.optimizer.groups.0.match", "regular expression"),
    "moments that never move": (["train.optimizer.betas=[0.9, 1.0]"], "train.optimizer.betas.1", "less than 1"),
    "an adapter that does nothing": (["model.lora={rank: 4, alpha: 0}"], "model.lora.alpha", "greater than 0"),
    "a penalty without bound": (["train.overlong={buffer: 1, penalty: 1e308}"], "train.overlong.penalty", "less than"),
    "a penalty of an outcome": (
        ["rollout.outcome_penalty={max_turns: 1e308}"],
        "rollout.outcome_penalty.max_turns",
        "less than",
    ),
    "groups of one chain": (
        ["rollout.group_size=1", "rollout.equal_rewards=drop", "train.algorithm=reinforce_pp"],
        "rollout.equal_rewards",
        "use keep",
    ),
    "dropout of an adapter": (["model.lora={rank: 4, dropout: 0.1}"], "model.lora.dropout", "use 0"),
    "distance in the reward of a turn": (
        [*GIGPO, "train.loss.kl.coefficient=0.1", "train.loss.kl.place=reward"],
        "train.loss.kl.place",
        "reinforce_pp or gae",
    ),
    "states that nobody tells": (["train.algorithm=gigpo"], "train.advantage.estimator", "anchors=observation"),
    "states and a critic": (
        [*GIGPO, "train.algorithm=ppo"],
        "train.algorithm",
        "use gigpo, or remove",
    ),
    "states and the others' mean": ([*GIGPO, "train.algorithm=rloo"], "train.algorithm", "use gigpo"),
    "critic and no critic": (
        ["train.algorithm=ppo", "train.advantage.estimator=grpo"],
        "train.algorithm",
        "use grpo, or remove advantage.estimator",
    ),
    "two policy losses": (
        ["train.algorithm=gspo", "train.loss.policy=cispo"],
        "train.algorithm",
        "use cispo",
    ),
    "states and the batch's deviation": (
        [*GIGPO, "train.advantage.options.scale=batch"],
        "train.advantage.options.scale",
        "'none' or 'group'",
    ),
    "states of one chain": ([*GIGPO, "rollout.group_size=1"], "rollout.group_size", "at least 2"),
    "weight of no state": (
        ["train.advantage.options.step_weight=0.5"],
        "train.advantage.options.step_weight",
        "remove it",
    ),
    "anchors of no state": (
        ["train.advantage.options.anchors=observation"],
        "train.advantage.options.anchors",
        "remove it",
    ),
    "distillation without a teacher": (["train.algorithm=distill"], "teacher", "set teacher.model"),
    "a teacher that is not there": (["teacher.model=./nowhere"], "teacher.model", "hub name"),
    "a policy that teaches itself": (["teacher.coefficient=1"], "teacher.model", "set teacher.context"),
    "an unknown context of a teacher": (
        ["teacher.context=hint"],
        "teacher.context",
        "answer, errors, or FILE",
    ),
    "a whole distribution in a context": (
        ["teacher={context: answer, divergence: reverse_kl}"],
        "teacher.divergence",
        "set teacher.top_k: 64",
    ),
    "a context and several rows": (
        ["teacher.context=errors", "rollout.context.policy=truncate"],
        "rollout.context.policy",
        "use keep",
    ),
    "a context and images that are left out": (
        ["teacher.context=errors", "rollout.context.keep_images=2"],
        "rollout.context.keep_images",
        "set null",
    ),
    "a context and an agent with its own loop": (
        ["teacher.context=errors", "rollout.agent={command: [python], options: {sandbox: none}}"],
        "teacher.context",
        "use the recipe's tools without an agent",
    ),
    "a solution by no other chain": (
        ["teacher.context=solution", "train.algorithm=distill", "rollout.group_size=1"],
        "rollout.group_size",
        "use at least 2",
    ),
    "a context that is no function": (["teacher.context=my_tools.py:Place"], "teacher.context", "is not a function"),
    "solutions without rewards": (
        ["teacher.context=solution", "train.algorithm=distill", "rewards=[]", "eval.data=null"],
        "rewards",
        "name FILE.py:NAME of a @reward",
    ),
    "a teacher of no chains": (
        [TEACHER, "train.algorithm=sft", "data.path=talks.jsonl"],
        "teacher",
        "use train.algorithm=distill",
    ),
    "a teacher in no place": (["teacher.coefficient=0.5"], "teacher.model", "its server by teacher.url"),
    "a teacher in two places": ([TEACHER, URL], "teacher.url", "remove one of them"),
    "a key for no server": ([TEACHER, "teacher.api_key_env=KEY"], "teacher.api_key_env", "set teacher.url"),
    "whole distributions from a server": ([URL, "teacher.divergence=forward_kl"], "teacher.top_k", "teacher.top_k: 64"),
    "another temperature than a server's": ([URL, "rollout.temperature=0.7"], "rollout.temperature", "use 1"),
    "no address of a teacher": (["teacher.url=strong:8000"], "teacher.url", "such as http://"),
    "half an address of a teacher": (["teacher.url=http://[::1"], "teacher.url", "such as http://"),
    "a filter of groups that only a teacher grades": (
        [TEACHER, "train.algorithm=distill", "rollout.equal_rewards=refill"],
        "rollout.equal_rewards",
        "use keep",
    ),
    "blame without rewards": (
        [TEACHER, "train.algorithm=distill", "train.advantage.malformed_turns=like_others"],
        "train.advantage.malformed_turns",
        "remove it",
    ),
    "a server that nobody asks": (
        [URL, "train.algorithm=distill", "train.from_trajectories=recipe.yaml"],
        "teacher.url",
        "use teacher.model",
    ),
    "the policy's own changing server": ([URL, "server.url=http://127.0.0.1:8100/"], "teacher.url", "train an adapter"),
    "the weight of another divergence": ([TEACHER, "teacher.options.beta=0.3"], "teacher.options.beta", "remove it"),
    "whole distributions of sharded weights": (
        [TEACHER, "teacher.divergence=forward_kl", "train.strategy=fsdp2", "train.processes=2"],
        "teacher.divergence",
        "use sampled, or strategy ddp",
    ),
    "the policy loss of no advantage": (
        [TEACHER, "teacher.divergence=reverse_kl", "train.algorithm=distill", "train.loss.policy=gspo"],
        "train.loss.policy",
        "remove it",
    ),
    "a fall of success where later tasks are harder": (
        ["train.stop_when=[format, success]", "data.shuffle=false"],
        "train.stop_when",
        "got 'success', which is not reported with data.shuffle=false",
    ),
    "the same by a curriculum": (
        ["train.stop_when=[unstable]", "rollout.curriculum={}"],
        "train.stop_when",
        "which is not reported with rollout.curriculum",
    ),
    "held-out tasks and nothing that judges them": (
        [TEACHER, "train.algorithm=distill", "rewards=[]"],
        "eval.data",
        "set null",
    ),
    "uncertain tokens of no reward": (
        [TEACHER, "train.algorithm=distill", "train.loss.top_entropy=0.2"],
        "train.loss.top_entropy",
        "remove it",
    ),
    "a distance from no reward": (
        [TEACHER, "train.algorithm=distill", "train.loss.kl={coefficient: 0.1, place: reward}"],
        "train.loss.kl.place",
        "use loss",
    ),
    "distillation by rewards": (
        [TEACHER, "train.algorithm=distill", "train.advantage.estimator=rloo"],
        "train.algorithm",
        "use rloo",
    ),
    "another algorithm's option": (
        ["train.algorithm=cispo", "train.loss.options.clip_low=0.1"],
        "train.loss.options.clip_low",
        "gspo",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(project: Path, case: str) -> None:
    overrides, field, fix = REFUSED[case]
    (project / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')
    with pytest.raises(SettingError, match=fix) as caught:
        load_recipe("recipe.yaml", overrides, purpose="train")
    assert caught.value.field == field


def test_a_teacher_is_a_whole_model(project: Path) -> None:
    (project / "strong").mkdir()
    overrides = ["teacher.model=./strong"]
    with pytest.raises(
        SettingError, match=r"teacher\.model: strong has no config\.json; fix: name a folder with a model"
    ):
        load_recipe("recipe.yaml", overrides, purpose="train")
    (project / "strong" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        SettingError, match=r"teacher\.model: strong holds a LoRA adapter, .* fix: `agentfactory export`"
    ):
        load_recipe("recipe.yaml", overrides, purpose="train")
    (project / "strong" / "config.json").write_text("{}")
    load_recipe("recipe.yaml", overrides, purpose="train")


def test_a_text_model_has_no_vision_to_train(project: Path) -> None:
    overrides = ["train.vision=1e-6"]
    load_recipe("recipe.yaml", overrides)  # nothing is known of the model
    config = project / "model" / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    with pytest.raises(SettingError, match=r"train\.vision: got 1e-06, but .*model accepts only text; fix: remove it"):
        load_recipe("recipe.yaml", overrides)
    config.write_text('{"model_type": "omni", "thinker_config": {"vision_config": {}}}')
    load_recipe("recipe.yaml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.algorithm=ppo", "train.loss.kl={coefficient: 0.1, estimator: k1, place: reward}"],
        ["train.loss.kl={coefficient: 0.1, estimator: k2}"],
        ["train.loss.mismatch={correction: geometric_mask, options: {low: 0.99, high: 1.01}}"],
        ["train.loss.mismatch.options.high=0.4"],
        *([f"train.algorithm={name}"] for name in ALGORITHMS if name not in ("gigpo", "distill", "sft")),
        [TEACHER],
        ["teacher.context=solution"],
        ["teacher.context=solution", "train.algorithm=distill", "rollout.equal_rewards=refill"],
        [
            "teacher={context: errors, divergence: forward_kl, top_k: 8}",
            "train.algorithm=distill",
            "rewards=[]",
            "eval.data=null",
        ],
        [TEACHER, "train.algorithm=distill", "rewards=[]", "eval.data=null", "rollout.group_size=1"],
        [TEACHER, "train.algorithm=distill", "teacher={divergence: jensen_shannon, options: {beta: 0.1}}"],
        ["train.algorithm=sft", "data.path=talks.jsonl"],
        *(
            [*GIGPO, f"train.algorithm={name}"]
            for name in ("gigpo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo")
        ),
        # an environment that says where it is, and a server that may
        ["train.algorithm=gigpo", "tools=[my_tools.py:Place]"],
        ["train.algorithm=gigpo", "mcp_servers={parts: {command: python, args: [parts.py]}}"],
    ],
)
def test_accepted(project: Path, overrides: list[str]) -> None:
    (project / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')
    load_recipe("recipe.yaml", overrides, purpose="train")
