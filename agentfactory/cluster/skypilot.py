"""A task of SkyPilot: machines of one kind in any cloud, which get the current folder."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from agentfactory.cluster.description import Job, as_yaml


def files(job: Job) -> dict[str, str]:
    cluster = job.cluster
    resources = {
        **({"accelerators": f"{cluster.gpu}:{cluster.gpus}"} if cluster.gpus else {}),
        **({"cpus": f"{cluster.cpus}+"} if cluster.cpus else {}),
        **({"memory": f"{cluster.memory_gib}+"} if cluster.memory_gib else {}),
        **({"image_id": f"docker:{cluster.images.trainer}"} if cluster.images else {}),
        **cluster.skypilot,
    }
    which = '--rank "$SKYPILOT_NODE_RANK" --machines "$machines"'
    lines = ['machines=$(echo "$SKYPILOT_NODE_IPS" | paste -sd,)', f"exec {shlex.join(job.machine())} {which}"]
    mount = {"source": cluster.volume, "mode": "MOUNT"}
    task = {
        "name": job.name,
        "num_nodes": cluster.machines,
        "workdir": ".",
        "resources": resources,
        "envs": job.env,
        # their values come from the environment of `sky jobs launch --secret NAME`
        "secrets": dict.fromkeys(job.secrets, ""),
        **({"file_mounts": {str(cluster.shared): mount}} if cluster.shared else {}),
        **({} if cluster.images else {"setup": "pip install -r requirements.txt"}),
        "run": "\n".join(lines) + "\n",
    }
    return {"skypilot.yaml": as_yaml(task)}


def submit(job: Job, folder: Path, keys: dict[str, str]) -> Iterator[tuple[list[str], str | None]]:
    """Yield commands, each with its stdin. `keys` are in their environment."""
    given = [word for name in job.secrets for word in ("--secret", name)]
    yield ["sky", "jobs", "launch", "--yes", "--name", job.name, *given, str(folder / "skypilot.yaml")], None
