"""Save, list, resume and delete checkpoints by the SDK."""

from datetime import UTC, datetime

import tinker
from cases import BASE, WORDS, create, datum, learn, loss, main, refusal
from tinker import types

rest = tinker.RestClient()
words = [datum(WORDS[0]), datum(WORDS[1])]


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    live = create(service)
    learn(live, words, steps=3)
    return live


def listed(path: str) -> types.Checkpoint | None:
    found = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
    return next((each for each in found if each.tinker_path == path), None)


def resume(service: tinker.ServiceClient) -> list[list[float]]:
    """Losses of three more steps: live, resumed with the optimizer's state, and without; scores
    of a sampler by its path, and the trainer's."""
    live = trained(service)
    saved, for_sampler = live.save_state("third").result().path, live.save_weights_for_sampler("third").result().path
    sampler = service.create_sampling_client(model_path=for_sampler).result()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(WORDS[0])).result()[1:]
    own = live.forward(words[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy().tolist()
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    fresh = service.create_training_client_from_state(saved).result()
    return [*(learn(client, words, steps=3) for client in (live, resumed, fresh)), scores, own]


def listings(service: tinker.ServiceClient) -> dict:
    live = service.create_lora_training_client(BASE, rank=8, user_metadata={"team": "tests"}).result()
    saved = live.save_state("third").result().path
    live.save_weights_for_sampler("third").result()
    run, session = rest.get_training_run(live.model_id).result(), live.model_id.split(":")[0]
    info = rest.get_weights_info_by_tinker_path(saved).result()
    found = rest.list_checkpoints(live.model_id).result().checkpoints
    users = rest.list_user_checkpoints(limit=100).result().checkpoints
    return {
        "checkpoints": [[each.checkpoint_id, each.checkpoint_type] for each in found],
        "bytes": min(each.size_bytes or 0 for each in found),
        "run": [run.training_run_id == live.model_id, run.is_lora, run.lora_rank, run.user_metadata],
        "runs": live.model_id in [each.training_run_id for each in rest.list_training_runs(100).result().training_runs],
        "users": saved in [each.tinker_path for each in users],
        "session": live.model_id in rest.get_session(session).result().training_run_ids,
        "sessions": session in rest.list_sessions(limit=100).result().sessions,
        "weights": [info.base_model == run.base_model, info.is_lora, info.lora_rank],
    }


def deletion(service: tinker.ServiceClient) -> dict:
    live = create(service)
    saved, path = live.save_state("long").result().path, live.save_state("short").result().path
    before = listed(path) is not None
    rest.delete_checkpoint_from_tinker_path(path).result()
    error = refusal(lambda: service.create_training_client_from_state(path).result())
    return {"before": before, "after": listed(path) is not None, "error": error, "other": listed(saved) is not None}


def expiry(service: tinker.ServiceClient) -> list[float | None]:
    """Hours that a checkpoint is kept: as saved, as set, and as unset."""

    def hours(path: str) -> float | None:
        when = listed(path).expires_at
        return when and (when - datetime.now(UTC)).total_seconds() / 3600

    path = create(service).save_state("kept", ttl_seconds=7200).result().path
    found = [hours(path)]
    for seconds in (36000, None):
        rest.set_checkpoint_ttl_from_tinker_path(path, seconds).result()
        found.append(hours(path))
    return found


def overwriting(service: tinker.ServiceClient) -> list:
    """The error of a name that is there, and losses of a state that replaced another."""
    live = trained(service)
    path = live.save_state("again").result().path
    before = loss(live, words)
    learn(live, words)
    error = refusal(lambda: live.save_state("again").result())
    live.save_state("again", overwrite=True).result()
    resumed = service.create_training_client_from_state(path).result()
    return [error, before, loss(live, words), loss(resumed, words)]


main([resume, listings, deletion, expiry, overwriting])
