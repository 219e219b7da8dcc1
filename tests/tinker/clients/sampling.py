"""Sample by the SDK from the base model, from snapshots of a model that trains on, and score prompts. The argument is a
prompt that the base model answers with any digit."""

import sys

import tinker
from cases import BASE, WORDS, create, datum, learn, main
from tinker import types

base = tinker.ServiceClient().create_sampling_client(base_model=BASE).result()
tokenizer = base.get_tokenizer()
ids = tokenizer.encode(sys.argv[1])
prompt = types.ModelInput.from_ints(ids)


def sample(sampler: tinker.SamplingClient, count: int = 1, **params) -> list[types.SampledSequence]:
    own = {"max_tokens": 8, "stop": [], **params}
    return [*sampler.sample(prompt, count, types.SamplingParams(**own)).result().sequences]


def prompt_scores(service: tinker.ServiceClient) -> dict:
    """Logprobs of a prompt by the base sampler and by a new model's trainer, and the three best at each position."""
    trainer = create(service)
    trained = trainer.forward([datum(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy().tolist()
    params = types.SamplingParams(max_tokens=1)
    best = base.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    scores = base.compute_logprobs(prompt).result()
    return {"ids": ids, "scores": scores, "trained": trained, "best": best.topk_prompt_logprobs}


def last_scores(service: tinker.ServiceClient) -> list:
    return base.compute_logprobs(prompt, prompt_logprobs_last_n=4).result()


def stops(service: tinker.ServiceClient) -> dict:
    """Greedy tokens without a stop, and what is left of them with a stop token, a stop string, and two strings."""
    whole = sample(base, temperature=0)[0]
    token, text = whole.tokens[2], tokenizer.decode(whole.tokens[:4])[-2:]
    found: dict = {"whole": [whole.tokens, whole.stop_reason], "token": token, "text": text}
    found["pieces"] = [tokenizer.decode(whole.tokens[:n]) for n in range(len(whole.tokens) + 1)]
    for name, stop in (("by_token", [token]), ("by_text", text), ("by_texts", ["never", text])):
        one = sample(base, temperature=0, stop=stop)[0]
        found[name] = [one.tokens, one.stop_reason, len(one.logprobs)]
    return found


def end_of_text(service: tinker.ServiceClient) -> list:
    """Samples of a model that has learnt to end at once: by default, and with no stop at all."""
    ending = create(service)
    targets, weights = [*ids[1:], tokenizer.eos_token_id], [0.0] * (len(ids) - 1) + [1.0]
    learn(ending, [datum([*ids, 0], target_tokens=targets, weights=weights)], rate=2e-2, steps=6)
    sampler = ending.save_weights_and_get_sampling_client().result()
    both = sample(sampler, temperature=0, stop=None)[0], sample(sampler, temperature=0, stop=[])[0]
    return [tokenizer.eos_token_id, *([one.tokens, one.stop_reason] for one in both)]


def seeds(service: tinker.ServiceClient) -> dict:
    futures = [base.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=seed)) for seed in (3, 3, 4, 5, 6)]
    ones = [future.result().sequences[0] for future in futures]
    group = sample(base, 8, seed=3)
    return {
        "tokens": [one.tokens for one in ones],
        "logprobs": [one.logprobs for one in ones[:2]],
        "group": [one.tokens for one in group],
        "again": [one.tokens for one in sample(base, 8, seed=3)],
        "ids": len({one.sequence_id for one in [*ones, *group]}),
    }


def narrowed(service: tinker.ServiceClient) -> list[list[int]]:
    """Greedy tokens, and samples among the likeliest token alone: by top_k, and by top_p."""
    return [sample(base, **by)[0].tokens for by in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6})]


def frozen(service: tinker.ServiceClient) -> dict:
    """Scores and samples of a snapshot before and after its model trains on, and scores of a later snapshot."""
    client = create(service)
    learn(client, [datum(WORDS[0])])
    words = types.ModelInput.from_ints(WORDS[0])

    def state(sampler: tinker.SamplingClient) -> list:
        return [sampler.compute_logprobs(words).result()[1:], sample(sampler, 4, seed=1)[3].tokens]

    first = client.save_weights_and_get_sampling_client().result()
    before = state(first)
    learn(client, [datum(WORDS[0])], steps=3)
    later = state(client.save_weights_and_get_sampling_client().result())
    return {"before": before, "after": state(first), "later": later}


def sampled_scores(service: tinker.ServiceClient) -> float:
    """The largest difference between logprobs of sampled tokens and their trainer's."""
    client = create(service, rank=32)
    learn(client, [datum(ids), datum(WORDS[0])], steps=3)
    samples = sample(client.save_weights_and_get_sampling_client().result(), 32, max_tokens=12)
    data = [datum([*ids, *one.tokens]) for one in samples]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    trained = [output["logprobs"].to_numpy()[len(ids) - 1 :].tolist() for output in outputs]
    both = [zip(one.logprobs, own, strict=True) for one, own in zip(samples, trained, strict=True)]
    return max(abs(sampled - scored) for pairs in both for sampled, scored in pairs)


main([prompt_scores, last_scores, stops, end_of_text, seeds, narrowed, frozen, sampled_scores])
