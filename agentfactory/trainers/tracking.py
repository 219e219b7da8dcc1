"""Experiment trackers, through accelerate's classes: the metrics, the recipe, and a table of a few chains per step."""

import importlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image

from agentfactory.base.config import leaves
from agentfactory.base.messages import Message, text_of
from agentfactory.rollout.images.parts import image_urls
from agentfactory.rollout.images.store import ImageStore, stored_digest
from agentfactory.rollout.trajectory import Group, Trajectory
from agentfactory.tools.images.decode import decode
from agentfactory.trainers.config import TrackConfig

logger = logging.getLogger(__name__)

RUNS = "tracking.json"
"""File in the run folder with the trackers' names for the run, so that a resumed run continues there."""

TABLE = "trajectories"
COLUMNS = ("step", "group", "chain", "reward", "outcome", "turns", "conversation")
MOST_CHARACTERS = 20_000
"""Maximum length of a conversation in a table."""
MOST_IMAGES = 3
"""Maximum number of a chain's images in a table: the last ones."""

_UNNAMED = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that mlflow does not accept in names; a part of a reward's name may contain them."""


_VARIABLE = re.compile(r"\$\{\w+\}")
_HIDDEN = "(not shown)"


_FIXES = {
    "wandb": "set WANDB_API_KEY (or run `wandb login`), or WANDB_MODE=offline",
    "tensorboard": "make the folder `tensorboard` in the run folder writable",
    "trackio": "set TRACKIO_DIR to a writable folder, or correct TRACKIO_SPACE_ID or TRACKIO_SERVER_URL",
    "mlflow": "set MLFLOW_TRACKING_URI to a server that answers, such as http://127.0.0.1:5000, or to sqlite:///FILE.db",
}
"""Tracker -> the fix if it does not start."""


class Tracking(AbstractContextManager["Tracking"]):
    """The trackers of one run, on rank 0. As a context manager, it ends their runs with this one. If a tracker fails
    during the run, the run continues with a warning: the tracker's data is in metrics.jsonl."""

    def __init__(
        self,
        config: TrackConfig,
        name: str,
        folder: Path,
        recipe: dict[str, Any],
        done: int = 0,
        images: Path | None = None,
    ) -> None:
        """Start the trackers, for the run called `name` in `folder`; they show `recipe` as its configuration. `done`
        steps are kept from an earlier attempt. `images` is the folder of the images that chains refer to. Raises
        ValueError if a tracker does not start."""
        self._config = config
        self._folder = folder
        self._done = done
        self._images = None if images is None else ImageStore(images)
        self._recipe = _without_secrets(recipe)
        file = folder / RUNS
        self._runs: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self._runs.setdefault("key", secrets.token_hex(4))
        self._trackers: dict[str, GeneralTracker] = {}
        for tracker in config.trackers:
            # the command's stdout is for machines
            with redirect_stdout(sys.stderr):
                try:
                    self._trackers[tracker] = self._start(tracker, f"{name}-{self._runs['key']}")
                # their own errors and those of their servers have no common base class
                except Exception as error:
                    self._end(failed=True)
                    fix = f"{_FIXES[tracker]}, or leave it out: metrics.jsonl has the same numbers"
                    raise ValueError(f"track.trackers: {tracker} does not start: {error}; fix: {fix}") from error
            # immediately: if the next tracker does not start, a later attempt can continue this one's run
            (folder / RUNS).write_text(json.dumps(self._runs) + "\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["step"])
        # the other trackers have a separate field for the step
        numbers = {name: value for name, value in metrics.items() if name != "step"}
        for tracker, running in self._trackers.items():
            if tracker == "wandb":
                self._try(tracker, running.log, dict(metrics))
                continue
            named = {_UNNAMED.sub("_", k): v for k, v in numbers.items()} if tracker == "mlflow" else numbers
            self._try(tracker, running.log, named, step=step)

    def note_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Add some chains of a step's groups to the tables."""
        chains = chosen(groups, self._config.trajectories)
        for tracker, running in self._trackers.items():
            if chains and tracker != "tensorboard":
                self._try(tracker, _log_table, running, tracker, step, chains, self._images)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(failed=error is not None)

    def _end(self, failed: bool) -> None:
        for tracker, running in self._trackers.items():
            with redirect_stdout(sys.stderr):
                if failed and tracker == "wandb":
                    self._try(tracker, running.tracker.finish, exit_code=1)
                elif failed and tracker == "mlflow":
                    self._try(tracker, importlib.import_module("mlflow").end_run, "FAILED")
                else:
                    self._try(tracker, running.finish)

    def _start(self, tracker: str, name: str) -> GeneralTracker:
        make = LOGGER_TYPE_TO_CLASS[tracker]
        # accelerate reads the variable of mlflow itself
        asked = os.environ.get(f"{tracker.upper()}_PROJECT") or "agentfactory"
        project = self._runs.setdefault(f"project of {tracker}", asked)
        folder, known = self._folder, self._runs.get(tracker)
        if known is not None and tracker != "mlflow":
            # the folder may have another name by now
            name = known
        if tracker == "tensorboard":
            # readers ignore records of an earlier attempt for steps that are run again
            running = make(project, str(folder / "tensorboard"), purge_step=self._done + 1 if known else None)
            running.start()
            recipe = yaml.safe_dump(self._recipe, sort_keys=False, allow_unicode=True)
            running.writer.add_text("recipe", f"```yaml\n{recipe}```", self._done)
        elif tracker == "wandb":
            wandb = importlib.import_module("wandb")
            running = make(
                project,
                id=self._runs["key"],
                name=name,
                # with "allow", a new run would also wait for the server
                resume="allow" if known else None,
                dir=str(folder),
                config=self._recipe,
                # the terminal's output belongs to the command
                settings=wandb.Settings(console="off"),
            )
            running.start()
            # not wandb's own step, which cannot decrease: a resumed run trains some steps again
            running.tracker.define_metric("*", step_metric="step")
        elif tracker == "trackio":
            running = make(project, name=name, resume="allow", config=self._recipe)
            running.start()
        else:
            running = make(project, run_name=name, run_id=known)
            running.start()
            if known is None:
                # its parameters cannot be changed later
                running.store_init_configuration(leaves(self._recipe))
        self._runs[tracker] = running.tracker.info.run_id if tracker == "mlflow" else name
        return running

    def _try(self, tracker: str, what: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            what(*arguments, **named)
        # an unreachable server or a full disk must not end days of training
        except Exception as error:
            logger.warning("%s did not accept a record, which metrics.jsonl has: %s", tracker, error)


def chosen(groups: Sequence[Group], count: int) -> list[tuple[Group, Trajectory]]:
    """Choose at most `count` of the chains that have a reward, evenly from the lowest to the highest."""
    chains = [(group, chain) for group in groups for chain in group.trajectories if chain.reward is not None]
    chains.sort(key=lambda pair: pair[1].reward or 0.0)
    if count >= len(chains):
        return chains
    places = [round(number * (len(chains) - 1) / max(count - 1, 1)) for number in range(count)]
    # with only one, the best is more informative than the worst
    return [chains[place] for place in places] if count != 1 else chains[-1:]


def conversation(messages: Sequence[Message]) -> str:
    """Return a chain's messages as text, each under its role; long conversations are cut in the middle."""
    said = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        parts = [
            str(message.get("reasoning_content") or ""),
            text_of(message.get("content") or ""),
            *(f"-> {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls),
        ]
        who = " ".join(str(message[name]) for name in ("role", "name") if message.get(name))
        said.append("\n".join([f"[{who}]", *filter(None, parts)]))
    text = "\n\n".join(said)
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half} characters ...]\n\n{text[-half:]}"


def _images(chain: Trajectory, store: ImageStore | None) -> list[Image.Image]:
    """Return a chain's last images, except remote ones."""
    urls = image_urls(chain.messages)
    held = [url for url in urls if url.startswith("data:image/") or (store is not None and stored_digest(url))]
    digests = [(url, stored_digest(url)) for url in held[-MOST_IMAGES:]]
    return [decode(url) if digest is None or store is None else store.load(digest) for url, digest in digests]


def _log_table(
    running: Any, tracker: str, step: int, chains: Sequence[tuple[Group, Trajectory]], store: ImageStore | None
) -> None:
    module = importlib.import_module(tracker)
    data = [
        [step, group.id, chain.id, chain.reward, chain.outcome.value, chain.turns, conversation(chain.messages)]
        for group, chain in chains
    ]
    if tracker == "mlflow":
        table = {name: [row[place] for row in data] for place, name in enumerate(COLUMNS)}
        module.log_table(data=table, artifact_file=f"{TABLE}.json")
        return
    images = [_images(chain, store) for _, chain in chains]
    # a cell of wandb's tables contains one image
    most = max(map(len, images))
    columns = [*COLUMNS, *(f"image_{number}" for number in range(1, most + 1))]
    shown = [[module.Image(image) for image in own] + [None] * (most - len(own)) for own in images]
    table = module.Table(columns=columns, data=[row + own for row, own in zip(data, shown, strict=True)])
    if tracker == "wandb":
        running.log({TABLE: table, "step": step})
    else:
        running.log({TABLE: table}, step=step)


def _without_secrets(recipe: dict[str, Any]) -> dict[str, Any]:
    """Remove possible secrets: values of tool servers' variables and headers, except `${NAME}`, and URL queries."""
    servers: dict[str, Any] = {}
    for server, section in (recipe.get("mcp_servers") or {}).items():
        kept = dict(section)
        for name in ("env", "headers"):
            values = section.get(name) or {}
            kept[name] = {key: value if _VARIABLE.fullmatch(value) else _HIDDEN for key, value in values.items()}
        if section.get("url"):
            kept["url"] = _HIDDEN
            with suppress(ValueError):  # a variable in the place of an IPv6 address
                url = urlsplit(section["url"])
                query = _HIDDEN if url.query else ""
                kept["url"] = url._replace(netloc=url.netloc.rpartition("@")[2], query=query, fragment="").geturl()
        servers[server] = kept
    return recipe | {"mcp_servers": servers} if servers else recipe
