"""A job of SLURM: one script, whose machines all see the folder from which it is submitted."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template

from agentfactory.cluster.description import KEY, Job

_TEMPLATE = Path(__file__).with_name("templates") / "slurm.sh"


def files(job: Job) -> dict[str, str]:
    cluster = job.cluster
    minutes = max(1, round(cluster.hours * 60))
    logs = str(job.folder).replace("%", "%%")  # % begins a placeholder
    gpus = f"{cluster.gpu}:{cluster.gpus}" if cluster.gpu else cluster.gpus
    options = {
        "job-name": job.name,
        "nodes": cluster.machines,
        "ntasks-per-node": 1,
        **({"gpus-per-node": gpus} if cluster.gpus else {}),
        # by default a job gets a part of a machine's memory, and its processes are killed beyond that
        "mem": f"{cluster.memory_gib}G" if cluster.memory_gib else 0,
        **({"cpus-per-task": cluster.cpus} if cluster.cpus else {"exclusive": None}),
        "time": f"{minutes // 60}:{minutes % 60:02}:00",
        # USR1, because TERM is also that of scancel, after which the job must not go on
        "signal": f"B:USR1@{cluster.grace_seconds}",
        "requeue": None,
        "open-mode": "append",
        "output": shlex.quote(f"{logs}/slurm-%j.log"),
    }
    lines = [f"--{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    own = [f'export {name}="${{{name}:?export it before sbatch}}"' for name in cluster.secrets]
    text = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        options="\n".join(f"#SBATCH {line}" for line in [*lines, *cluster.slurm]),
        exports="\n".join([*(f"export {name}={shlex.quote(value)}" for name, value in job.env.items()), *own]),
        key=KEY,
        cwd=shlex.quote(str(Path.cwd())),
        folder=shlex.quote(str(job.folder)),
        logs=shlex.quote(logs),
        machine=shlex.join(job.machine()),
    )
    return {"slurm.sh": text}


def submit(job: Job, folder: Path, keys: dict[str, str]) -> Iterator[tuple[list[str], str | None]]:
    """Yield commands, each with its stdin. `keys` are in their environment."""
    yield ["sbatch", str(folder / "slurm.sh")], None
