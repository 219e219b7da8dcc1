"""Train by the SDK in several ways. The argument is a prompt that the base model answers with any digit."""

import sys
from statistics import fmean

import tinker
import torch
from cases import WORDS, create, datum, learn, loss, main
from tinker import types

adam = types.AdamParams(learning_rate=5e-3)
first, second, third = map(datum, WORDS)


def info(service: tinker.ServiceClient) -> dict:
    found = create(service, rank=4).get_info()
    return {"rank": found.lora_rank, "name": found.model_data.model_name, "tokenizer": found.model_data.tokenizer_id}


def _low_digits(service: tinker.ServiceClient, name: str, config: dict[str, float]) -> list[float]:
    """Rewards of digits below three over 12 batches, each passed twice. Targets of the prompt have their sampler's
    logprobs, because dro has no mask."""
    client, rewards = create(service), []
    tokenizer = client.get_tokenizer()
    ids = tokenizer.encode(sys.argv[1])
    prompt = types.ModelInput.from_ints(ids)
    for step in range(12):
        sampler = client.save_weights_and_get_sampling_client().result()
        prior = sampler.compute_logprobs(prompt).result()[1:]
        params = types.SamplingParams(max_tokens=8, seed=step, stop=["}"])
        samples = sampler.sample(prompt, 16, params).result().sequences
        low = [float(any(digit in tokenizer.decode(one.tokens) for digit in "012")) for one in samples]
        rewards.append(fmean(low))
        data = []
        for one, reward in zip(samples, low, strict=True):
            advantages = [0.0] * len(prior) + [reward - fmean(low)] * len(one.tokens)
            targets = [*ids[1:], *one.tokens]
            inputs = {"target_tokens": targets, "logprobs": [*prior, *one.logprobs], "advantages": advantages}
            data.append(datum([*ids, *one.tokens], **inputs))
        for _ in range(2):
            client.forward_backward(data, name, config)
            client.optim_step(adam).result()
    return rewards


def ppo(service: tinker.ServiceClient) -> list[float]:
    return _low_digits(service, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})


def dro(service: tinker.ServiceClient) -> list[float]:
    return _low_digits(service, "dro", {"beta": 0.05})


def forward_only(service: tinker.ServiceClient) -> list[list[float]]:
    """Losses of two equal models, of which the second also evaluates between its passes."""
    plain, evaluating = create(service), create(service)
    loss(evaluating, [second])
    evaluating.forward_backward([first], "cross_entropy")
    loss(evaluating, [third])
    evaluating.optim_step(adam).result()
    learn(plain, [first])
    return [[loss(client, [each]) for each in (first, second, third)] for client in (plain, evaluating)]


def gradients_add_up(service: tinker.ServiceClient) -> list[list[float]]:
    """Losses after one pass over two datums, and after a pass over each."""
    together, apart = create(service), create(service)
    learn(together, [first, second])
    for each in (first, second):
        apart.forward_backward([each], "cross_entropy")
    apart.optim_step(adam).result()
    return [[loss(client, [each]) for each in (first, second)] for client in (together, apart)]


def chunks(service: tinker.ServiceClient) -> list[float]:
    """A call of more datums than one request carries: outputs, losses, and the loss of one."""
    client, many = create(service, rank=4), [datum(WORDS[0][:3])] * 1030
    result = client.forward(many, "cross_entropy").result()
    return [len(result.loss_fn_outputs), result.metrics["loss:sum"], loss(client, many[:1])]


def custom(service: tinker.ServiceClient) -> dict:
    """A custom loss that equals cross_entropy, and one whose weights are negative."""
    theirs, own, unlearning = create(service), create(service), create(service)

    def likelihood(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weighted = [(d.loss_fn_inputs["weights"].to_torch() * q).sum() for d, q in zip(data, logprobs, strict=True)]
        return -torch.stack(weighted).sum(), {"datums": float(len(data))}

    learn(theirs, [first, second])
    result = own.forward_backward_custom([first, second], likelihood).result()
    own.optim_step(adam).result()
    before = loss(unlearning, [first])
    unlearning.forward_backward_custom([first], lambda data, logprobs: (logprobs[0].sum(), {})).result()
    unlearning.optim_step(types.AdamParams(learning_rate=2e-4)).result()
    losses = [loss(theirs, [first]), loss(own, [first])]
    return {"metrics": result.metrics, "losses": losses, "unlearnt": [before, loss(unlearning, [first])]}


def soft_targets(service: tinker.ServiceClient) -> list[float]:
    """Two weighted targets at each position: the loss that the service sums, and by its own logprobs."""
    targets = torch.tensor([[50, 51], [60, 61], [70, 71]])
    weights = torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.5, -0.5]])
    client = create(service)
    both = datum([40, 50, 60, 70], target_tokens=targets, weights=weights)
    result = client.forward_backward([both], "cross_entropy").result()
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch().reshape(3, 2)
    client.optim_step(adam).result()
    return [result.metrics["loss:sum"], -float((weights * logprobs).sum()), loss(client, [both])]


def interleaved(service: tinker.ServiceClient) -> list[list[float]]:
    """Losses of three models of different ranks that train at once, and of the same models one after the other."""
    ranks, data = (4, 16, 32), ([first], [second], [third])
    clients, futures = [create(service, rank) for rank in ranks], [[], [], []]
    for _ in range(5):
        for client, own, found in zip(clients, data, futures, strict=True):
            found.append(client.forward_backward(own, "cross_entropy"))
            client.optim_step(adam)
    at_once = [[future.result().metrics["loss:sum"] for future in found] for found in futures]
    return at_once + [learn(create(service, rank), own, steps=5) for rank, own in zip(ranks, data, strict=True)]


main([info, ppo, dro, forward_only, gradients_add_up, chunks, custom, soft_targets, interleaved])
