"""Without an argument: train, save a state, print its path, and then each loss, until ended; every step saves a state.
With a path: resume from there, and print as many losses as the second argument asks for."""

import itertools
import sys

import tinker
from cases import BASE, WORDS, datum, learn

service = tinker.ServiceClient()
data = [datum(WORDS[0]), datum(WORDS[2])]
if sys.argv[1:]:
    client = service.create_training_client_from_state_with_optimizer(sys.argv[1]).result()
    print(*learn(client, data, rate=1e-3, steps=int(sys.argv[2])), sep="\n")
else:
    client = service.create_lora_training_client(BASE, rank=8, seed=1).result()
    learn(client, data, steps=2)
    print(client.save_state("early").result().path, flush=True)
    for step in itertools.count():
        print(*learn(client, data, rate=1e-3), flush=True)
        client.save_state(f"later-{step}")
