"""Plain manifests of Kubernetes: a Job for the trainers and one for the servers, each with a Service for its names, and
a NetworkPolicy around both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfactory.cluster.description import Job, as_yaml

_TEMPLATES = Path(__file__).with_name("templates")
_FAILURES = 10  # failed pods per machine, such as of a lost GPU, after which a job fails


def files(job: Job) -> dict[str, str]:
    cluster = job.cluster
    parts = [("trainer", cluster.trainers), ("server", cluster.servers)][: 2 if cluster.servers else 1]
    manifests = [
        _policy(job),
        *(made for role, count in parts for made in (_service(job, role), _job(job, role, count))),
    ]
    dockerfiles = {name: (_TEMPLATES / name).read_text("utf-8") for name in ("trainer.Dockerfile", "server.Dockerfile")}
    secret = f"# needs the Secret {job.name}-keys, by `agentfactory launch`, with {', '.join(job.secrets)}\n"
    return {"kubernetes.yaml": secret + as_yaml(*manifests), **dockerfiles}


def submit(job: Job, folder: Path, keys: dict[str, str]) -> Iterator[tuple[list[str], str | None]]:
    """Yield commands, each with its stdin. `keys` are in their environment."""
    secret = {"stringData": {name: keys[name] for name in job.secrets}, "type": "Opaque"}
    # by stdin, because others can read a process's arguments; refused if a run of this name has its keys there
    yield ["kubectl", "create", "-f", "-"], json.dumps(_object(job, "v1", "Secret", f"{job.name}-keys", **secret))
    yield ["kubectl", "apply", "-f", str(folder / "kubernetes.yaml")], None


def _object(job: Job, version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(job)}, **fields}


def _labels(job: Job, **more: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": job.name, **more}


def _service(job: Job, role: str) -> dict[str, Any]:
    """A Service that gives the pods names, before they are ready: each waits for the others."""
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(job, role=role)}
    return _object(job, "v1", "Service", f"{job.name}-{role}", spec=names)


def _policy(job: Job) -> dict[str, Any]:
    """Only the run's own pods reach its ports: torch's connections have no authentication."""
    own = {"podSelector": {"matchLabels": _labels(job)}}
    spec = {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", job.name, spec=spec)


def _job(job: Job, role: str, count: int) -> dict[str, Any]:
    cluster, name = job.cluster, f"{job.name}-{role}"
    assert cluster.images is not None
    kinds = [("trainer", cluster.trainers), ("server", cluster.servers)]
    machines = [f"{job.name}-{kind}-{index}.{job.name}-{kind}" for kind, number in kinds for index in range(number)]
    which = ("--machines", ",".join(machines), "--role", role, "--rank", "$(JOB_COMPLETION_INDEX)")
    limits = {"nvidia.com/gpu": cluster.gpus} if cluster.gpus else {}
    asked = {"cpu": cluster.cpus, "memory": cluster.memory_gib and f"{cluster.memory_gib}Gi"}
    # NCCL, and the workers of PyTorch and vLLM, exchange data there; the default is 64 MiB
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if cluster.shared is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": cluster.volume}})
        mounts.append({"name": "shared", "mountPath": str(cluster.shared)})
    container: dict[str, Any] = {
        "name": role,
        "image": getattr(cluster.images, role),
        "args": [*(word.replace("$", "$$") for word in job.machine()), *which],  # $(NAME) would be expanded
        "env": [
            *({"name": variable, "value": value.replace("$", "$$")} for variable, value in job.env.items()),
            *(
                {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-keys", "key": variable}}}
                for variable in job.secrets
            ),
        ],
        "resources": {"limits": limits, "requests": {what: value for what, value in asked.items() if value}},
        "volumeMounts": mounts,
    }
    if role == "trainer" and cluster.sandbox:
        unconfined = {"type": "Unconfined"}
        container["securityContext"] = {"seccompProfile": unconfined, "appArmorProfile": unconfined}
    selector = {"nodeSelector": {"nvidia.com/gpu.product": cluster.gpu}} if cluster.gpu else {}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_seconds,
        **selector,
        **cluster.kubernetes,
        "containers": [container],
        "volumes": volumes,
    }
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        # a recipe that is refused once is refused again
        {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": [2]}},
    ]
    spec = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": _FAILURES * count,
        "podFailurePolicy": {"rules": rules},
        "activeDeadlineSeconds": round(cluster.hours * 3600),
        "template": {"metadata": {"labels": _labels(job, role=role)}, "spec": pod},
    }
    return _object(job, "batch/v1", "Job", name, spec=spec)
