"""Train, save and sample several models at once; the result is the same in every run."""

import tinker
from cases import BASE, WORDS, datum, main
from tinker import types

MODELS, STEPS = 6, 14
adam = types.AdamParams(learning_rate=5e-3)


def everything(service: tinker.ServiceClient) -> dict:
    clients = [service.create_lora_training_client(BASE, rank=4, seed=seed) for seed in range(MODELS)]
    clients = [client.result() for client in clients]
    passes: list[list] = [[] for _ in clients]
    for step in range(STEPS):
        for client, own in zip(clients, passes, strict=True):
            own.append((client.forward_backward([datum(WORDS[step % 3])], "cross_entropy"), client.optim_step(adam)))
    saved = [client.save_state("last") for client in clients]
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(WORDS[0][:3])
    samples = [sampler.result().sample(prompt, 2, params) for sampler in samplers]
    losses = [[passed.result().metrics["loss:sum"] for passed, stepped in own if stepped.result()] for own in passes]
    session = clients[0].model_id.split(":")[0]
    runs = tinker.RestClient().get_session(session).result().training_run_ids
    return {
        "losses": losses,
        "saved": [future.result().path.partition("/weights")[2] for future in saved],
        "samples": [[one.tokens for one in future.result().sequences] for future in samples],
        "models": [len(runs), len({client.model_id for client in clients})],
    }


main([everything])
