"""Memory that a trainer process takes, from its recipe and the model's configuration alone: weights on the meta device,
activations on fake tensors (activation_memory.py), a GPU's context and libraries by assumption (machine.py)."""

from collections.abc import Iterable

from torch import Tensor, nn
from transformers import PreTrainedConfig

from agentfactory.placement.activation_memory import fullest, trace, used_dtype
from agentfactory.placement.image_memory import image_memory
from agentfactory.placement.machine import CUDA_CONTEXT, LIBRARIES, NCCL_BUFFERS
from agentfactory.placement.meta_model import meta_model, policy_of
from agentfactory.placement.server_memory import meta_network
from agentfactory.trainers.config import OptimizerConfig, TrainConfig, TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role, role_of
from agentfactory.trainers.networks.lora import REFERENCE_ADAPTER
from agentfactory.trainers.networks.network import decoder_layers
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.sync.nccl_sync import BUFFER_BYTES
from agentfactory.trainers.update.optimizer import make_optimizer


def local_processes(train: TrainConfig, gpus: int) -> int:
    """Return the number of trainer processes on this machine, which has `gpus`: all, or under hsdp the largest equal
    share for several machines that has a GPU each. Without GPUs here, machines with 8 are assumed."""
    if train.strategy != "hsdp":
        return train.processes
    return max(count for count in range(1, (gpus or 8) + 1) if train.processes % count == 0 and count < train.processes)


def trainer_memory(
    recipe: TrainRecipe, config: PreTrainedConfig, device: str, teacher: PreTrainedConfig | None = None, gpus: int = 0
) -> dict[str, int]:
    """Return the bytes by row that one process of the trainer takes at its peak; the sum is the peak, and rows of 0 are
    left out. `config` is that of `model.path`, `teacher` that of `teacher.model`; `device` is cuda or cpu, of which
    this machine has `gpus`.

    The peak is that of a later update with several micro-batches, each of `train.token_budget` tokens in rows of
    `rollout.max_total_tokens`: gradients, the optimizer's state and activations then exist at the same time.

    Rows: weights, adapter, reference, teacher, critic: the networks; gradients, optimizer: of all trained weights;
    activations: with autocast's bfloat16 copies of float32 weights (none under fsdp2); images; logits; step: an
    optimizer step's memory beyond activations and logits; batch: a step's rows; buckets (ddp): as large as the
    gradients; gathered: fsdp2's unsharded weights; context: overhead of a GPU, or on a CPU libraries.

    fsdp2 divides weights, gradients and the optimizer's state among all processes, hsdp among those of a machine. What
    a machine adds up before the step's reduction takes the place of its gradients. Liger, compile, flex_attention and
    flash_attention_2 are not modelled: the result is an upper bound. Raises ValueError if the recipe cannot be trained.
    """
    train = recipe.train
    model = meta_model(recipe, config)
    policy = policy_of(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    shared = {
        **_weights(model),
        **_reference(recipe, policy),
        **_teacher(recipe, policy, teacher),
        "gradients": _bytes(trained),
        "optimizer": optimizer_state(model, train),
    }
    processes = local_processes(train, gpus) if train.is_sharded else 1
    rows = {name: -(-size // processes) for name, size in shared.items()}
    peak, step = trace(recipe, config, device)
    rows |= {
        "activations": round(peak.rest),
        "images": image_memory(recipe, policy),
        "logits": round(peak.logits),
        "step": max(0, round(step - peak.total)),
        "batch": _batch(recipe, policy),
    }
    if train.strategy == "ddp":
        rows["buckets"] = rows["gradients"]
    if processes > 1:
        layers, rest = _units(model, recipe)
        # when a backward pass ends, gradients outside layers are added up in float32, and activations are gone
        added = sum(4 * weight.numel() for weight in rest if weight.requires_grad)
        later = max(added, _sent(policy) - rows["gradients"] - _gathered(rest, recipe))
        rows["gathered"] = _gathered(rest, recipe) + max(layers, later - round(peak.total))
    cuda = device == "cuda"
    # hsdp: communicators of all processes, of a machine's, and of those with the same shard
    communicators = 3 if train.strategy == "hsdp" else int(train.processes > 1)
    rows["context"] = CUDA_CONTEXT + communicators * NCCL_BUFFERS if cuda else LIBRARIES
    return {name: size for name, size in rows.items() if size}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _weights(model: nn.Module) -> dict[str, int]:
    sizes = {"weights": 0, "adapter": 0, "critic": 0, "reference": 0}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        row = "critic" if role_of(name) == Role.CRITIC else "adapter" if ".lora_" in name else "weights"
        row = "reference" if REFERENCE_ADAPTER in name.split(".") else row
        sizes[row] += weight.numel() * weight.itemsize
    return sizes


def _reference(recipe: TrainRecipe, policy: Policy) -> dict[str, int]:
    if policy.is_lora or not recipe.train.has_reference:
        return {}
    return {"reference": sum(weight.numel() for weight in policy.network.parameters()) * policy.dtype.itemsize}


def _teacher(recipe: TrainRecipe, policy: Policy, config: PreTrainedConfig | None) -> dict[str, int]:
    if recipe.teacher is None or config is None or (policy.is_lora and recipe.teacher.model == recipe.model.path):
        return {}
    network = meta_network(config, policy.dtype, whole=sees(config))
    return {"teacher": sum(weight.numel() for weight in network.parameters()) * policy.dtype.itemsize}


def _batch(recipe: TrainRecipe, policy: Policy) -> int:
    """Return the bytes of all micro-batches of a step, which are moved to the device together."""
    part = fullest(recipe, policy.batching)
    tensors = (part.ids, part.positions, part.ends, part.sources, part.labels, part.sequence, *part.streams.values())
    train = recipe.train
    rows = train.batch_size * (1 if train.algorithm == "sft" else recipe.largest_group) / train.processes
    return round(_bytes(tensor for tensor in tensors if tensor is not None) * max(1.0, rows / len(part.rows)))


def _units(model: Policy | ActorCritic, recipe: TrainRecipe) -> tuple[int, list[nn.Parameter]]:
    """Return fsdp2's unsharded weights in a backward pass: the bytes of two layers, and the weights outside layers."""
    layers = decoder_layers(policy_of(model).network)
    if isinstance(model, ActorCritic) and model.critic.backbone is not None:
        layers += decoder_layers(model.critic.backbone.network)
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    return 2 * max(_gathered(layer.parameters(), recipe) for layer in layers), rest


def _gathered(weights: Iterable[Tensor], recipe: TrainRecipe) -> int:
    counts = ((weight.numel() * (1 + weight.requires_grad), used_dtype(weight, recipe)) for weight in weights)
    return sum(count * dtype.itemsize for count, dtype in counts)


def _sent(policy: Policy) -> int:
    """Return the bytes on rank 0's device during a sync: a gathered weight, twice, a buffer's weights, the buffer."""
    if policy.is_lora:
        return _bytes(weight for weight in policy.parameters() if weight.requires_grad)
    sizes = [weight.numel() * policy.dtype.itemsize for weight in policy.network.parameters()]
    return 2 * max(sizes) + 2 * min(sum(sizes), BUFFER_BYTES + max(sizes))


def optimizer_state(model: nn.Module, train: TrainConfig) -> int:
    """Return the bytes of the optimizer's state after its first step, for the trained weights of `model`, in float32.
    adamw: two moments. adamw_8bit: two moments of one byte each and a float32 constant for each block of 256, but in
    float32 for weights with fewer than 4096 values (bitsandbytes 0.50, Optimizer2State). lion and sgd: one. adafactor:
    sums over the last two dimensions, or one number per weight with a single dimension. muon: one for matrices within
    layers, and adamw's for all others."""
    if train.optimizer.name == "muon":
        groups = make_optimizer(model, train).param_groups
        return sum(_bytes(group["params"]) * (1 if group["matrix"] else 2) for group in groups)
    return sum(_state(weight, train.optimizer) for weight in model.parameters() if weight.requires_grad)


def _state(weight: Tensor, config: OptimizerConfig) -> int:
    count, shape = weight.numel(), weight.shape
    match config.name:
        case "adamw":
            return 2 * _bytes([weight])
        case "adamw_8bit":
            return 8 * count if count < 4096 else 2 * (count + 4 * -(-count // 256))
        case "adafactor":
            return 4 * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)
        case "sgd" if config.betas[0] == 0:
            return 0
        case _:
            return _bytes([weight])
