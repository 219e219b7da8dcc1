"""Mistakes of clients: the error of each, and whether the client's next request works."""

import tinker
from cases import BASE, WORDS, create, datum, learn, loss, main, refusal
from tinker import types

service = tinker.ServiceClient()
rest = tinker.RestClient()
client = create(service)
sampler = service.create_sampling_client(base_model=BASE).result()
good, ids = datum(WORDS[0]), WORDS[0]
image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
seen = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[40, 50]), image])
few, prompt = types.SamplingParams(max_tokens=2), types.ModelInput.from_ints(ids)


def created(name: str = BASE, **options) -> None:
    service.create_lora_training_client(name, **options).result()


def passed(data: types.Datum, name: str = "cross_entropy", config: dict | None = None) -> None:
    client.forward_backward([data], name, config).result()


def inputs(**changed) -> types.Datum:
    own = {"target_tokens": ids[1:], "logprobs": [-1.0] * 5, "advantages": [1.0] * 5, **changed}
    return datum(ids, **{name: value for name, value in own.items() if value is not None})


MISTAKES = {
    "base model": lambda: created("nobody/nothing"),
    "rank": lambda: created(rank=64),
    "optimizer": lambda: created(optimizer=types.DimuonOptimizerConfig()),
    "targets": lambda: passed(datum(ids, target_tokens=ids[2:], weights=[1.0] * 4)),
    "weights": lambda: passed(datum(ids, target_tokens=ids[1:], weights=[1.0] * 3)),
    "input id": lambda: passed(datum([40, 999_999, 50])),
    "target id": lambda: passed(datum(ids, target_tokens=[-1, *ids[2:]], weights=[1.0] * 5)),
    "advantages": lambda: passed(inputs(advantages=None), "importance_sampling"),
    "not a number": lambda: passed(inputs(advantages=[float("nan")] * 5), "importance_sampling"),
    "loss": lambda: passed(good, "cosine"),
    "stable_reinforce": lambda: passed(inputs(), "stable_reinforce"),
    "setting": lambda: passed(inputs(), "ppo", {"clip_low": 0.8}),
    "trained image": lambda: passed(types.Datum(model_input=seen, loss_fn_inputs=good.loss_fn_inputs)),
    "sampled image": lambda: sampler.sample(seen, 1, few).result(),
    "sampled id": lambda: sampler.sample(types.ModelInput.from_ints([999_999]), 1, few).result(),
    "long prompt": lambda: sampler.sample(types.ModelInput.from_ints([40] * 5_000), 1, few).result(),
    "temperature": lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, temperature=-1)).result(),
    "rate": lambda: client.optim_step(types.AdamParams(learning_rate=-1e-3)).result(),
    "lifetime": lambda: client.save_state("kept", ttl_seconds=-1).result(),
    "name": lambda: client.save_state("../../outside").result(),
    "sampler's name": lambda: client.save_weights_for_sampler("/tmp/outside").result(),
    "state": lambda: service.create_training_client_from_state("tinker://../../etc/passwd").result(),
    "long state": lambda: service.create_training_client_from_state("tinker://a/weights/../../../etc/passwd").result(),
    "sampler": lambda: service.create_sampling_client(model_path="tinker://../sampler_weights/passwd").result(),
    "deleted": lambda: rest.delete_checkpoint(client.model_id, "weights/../../etc/passwd").result(),
    "unknown run": lambda: rest.get_training_run("nobody:train:0").result(),
}


def mistakes(_: tinker.ServiceClient) -> dict:
    found = {}
    for name, mistake in MISTAKES.items():
        found[name] = refusal(mistake)
        found[name]["next"] = [loss(client, [good]), len(sampler.sample(prompt, 1, few).result().sequences[0].tokens)]
    return found


def failed_pass(own: tinker.ServiceClient) -> list[float | str]:
    """A pass that fails, with its step already queued: the step's error, and losses after that as of a new model."""
    client = create(own)
    broken = client.forward_backward([datum([40, 999_999])], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    error = refusal(broken.result), refusal(stepped.result)
    return [*(each["type"] for each in error), learn(client, [good], steps=2), learn(create(own), [good], steps=2)]


main([mistakes, failed_pass])
service.close("success").result()
