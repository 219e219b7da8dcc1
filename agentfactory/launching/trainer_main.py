"""One process of the trainer, which assembles the parts of the recipe, trains, and records the run. Rank 0 also owns
the run folder, the display and, for live rollouts, the worker and the weight sync."""

import logging
import signal
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import transformers
import yaml
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from agentfactory.base.findings import Finding
from agentfactory.base.run_notices import Notice, doing, notify
from agentfactory.base.user_code.source_files import digests_of
from agentfactory.launching.launch_plan import Assignment, resume_stages
from agentfactory.launching.progress import Progress, tell_warnings
from agentfactory.launching.reach_early import check_hub
from agentfactory.launching.resumption import changed_code, code_files, content_digests, rewind
from agentfactory.launching.run_folder import Hold, RunFolder
from agentfactory.launching.run_results import chains_dropped, check_dropped
from agentfactory.launching.time_plan import TimePlan
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.images.families import load_vision, view_of
from agentfactory.rollout.images.image_intake import ShownImages
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.images.task_images import state_places
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.tokenizer import check_saved_chains, load_tokenizer
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group
from agentfactory.rollout.workers.worker_socket import Job, RolloutWorkers
from agentfactory.trainers.batches.image_batches import images_beside
from agentfactory.trainers.checkpoints.checkpoint import Checkpoints
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints as found_checkpoints
from agentfactory.trainers.checkpoints.checkpoint_folder import find_best, step_of
from agentfactory.trainers.config import Symptom
from agentfactory.trainers.loop.health import Health, ordered_by
from agentfactory.trainers.loop.rl import Note, SavedGroups, Services, TrainResult, train_rl
from agentfactory.trainers.loop.sft import conversation_rows, saved_rows, train_sft
from agentfactory.trainers.loop.stopping import Stop, name_of
from agentfactory.trainers.loop.time_share import TimeShare
from agentfactory.trainers.processes.accelerator import check_same_recipe, make_accelerator, of_rank_0
from agentfactory.trainers.sync.backends import backend_of, make_sync
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS, Canary, CanaryRow, canary_rows, with_image_rows
from agentfactory.trainers.sync.proven_push import RetryingSync
from agentfactory.trainers.sync.server_control import SLEEP_ROUTES, ServerControl
from agentfactory.trainers.teachers.teacher import check_saved_prompts
from agentfactory.trainers.tracking import Tracking

# named like the entry point, because the launcher's terminal shows its messages
logger = logging.getLogger("agentfactory.train")


def train(recipe: Recipe, asked: str | Assignment | None) -> signal.Signals | Symptom | None:
    """Train `recipe` on accelerate's processes, and write the run folder. Return the cause of an early end, or None.
    `asked`: the launcher's assignment, or a checkpoint, AUTO or None; then rank 0 raises MostChainsDroppedError."""
    # progress bars of loading and writing would garble our own progress display
    transformers.utils.logging.disable_progress_bar()
    is_launched = isinstance(asked, Assignment)
    if not is_launched:
        check_hub(recipe, "train")
    accelerator = make_accelerator(recipe)
    check_same_recipe(recipe)
    folder, stop = RunFolder(recipe.output), Stop()
    with ExitStack() as stack:
        checkpoint = _open_folder(recipe, folder, asked, accelerator, stack)
        run = _Run(recipe, folder, checkpoint, accelerator, stop, stack)
        plan = asked.plan if isinstance(asked, Assignment) else None
        display = _Display(run, plan) if accelerator.is_main_process else None
        stop.listen(accelerator, folder.note_stopping)
        note = display.note_groups if display else None
        result = run.train_sft() if recipe.train.algorithm == "sft" else run.train_rl(note)
        # a symptom or signal that arrived during the last evaluation has cut it short
        stop.agreed(accelerator)
        if display is not None:
            summary = _summary(recipe, folder, result, display)
            folder.write_summary(summary)
            display.say_what_ended_it(result.steps, is_launched)
        stop.end(accelerator)
        accelerator.end_training()
    if display is not None and stop.agreed_on is None and not is_launched:
        check_dropped([summary])
    return stop.agreed_on


def _open_folder(
    recipe: Recipe, folder: RunFolder, asked: str | Assignment | None, accelerator: Accelerator, stack: ExitStack
) -> Path | None:
    """Let rank 0 create or reopen the run folder and lock it; return the checkpoint to resume from, in each process."""
    checkpoint = None
    if accelerator.is_main_process:
        if isinstance(asked, Assignment):
            # the launcher has created or rewound the folder, locked it, and checked the checkpoint
            checkpoint = asked.checkpoint
            # the launcher shows our stdout, and logs our stderr
            logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        else:
            hold = stack.enter_context(Hold(recipe.output))
            hold.take()
            if asked is None:
                RunFolder.create(recipe.output, recipe.to_saved(folder.whole), keep_prepared=True)
            else:
                checkpoint = resume_stages([recipe], asked)[0].checkpoint
                RunFolder.reopen(recipe.output, recipe.to_saved(folder.whole))
            hold.take(make=True)
            if asked is not None:
                rewind(recipe, folder, checkpoint, lambda line: print(line, flush=True))
        stack.callback(folder.note_stopped)
    return of_rank_0(checkpoint)


@dataclass(frozen=True)
class _Run:
    """The parts that every step of the assembly needs. `stack` closes what is opened."""

    recipe: Recipe
    folder: RunFolder
    checkpoint: Path | None
    accelerator: Accelerator
    stop: Stop
    stack: ExitStack

    @property
    def images(self) -> Path:
        """The folder of the images in the training rows; saved groups have theirs beside them."""
        saved = self.recipe.train.from_trajectories
        return images_beside(Path(saved)) if saved else self.folder.images

    def train_sft(self) -> TrainResult:
        recipe, is_main = self.recipe, self.accelerator.is_main_process
        data = None if recipe.train.from_trajectories else recipe.data
        tasks = load_tasks(data, tell=True) if is_main and data is not None else None
        # conversations in data files bring their own tools
        in_data = of_rank_0(any(task.get("tools") for task in tasks or []))
        renderer = self._load_renderer(in_data)
        checkpoints = self._checkpoints(renderer.tokenizer)
        checkpoints.note_renderer(renderer.template.source, renderer.info)
        with doing("reading the rows of data"):
            rows = _sft_rows(recipe, renderer, tasks) if is_main else None
        log, images = self.folder.log, self.images
        return train_sft(recipe, self.accelerator, checkpoints, rows=rows, log=log, stop=self.stop, images=images)

    def train_rl(self, note: Note | None) -> TrainResult:
        tokenizer = load_tokenizer(self.recipe.model.path)
        checkpoints = self._checkpoints(tokenizer)
        services = self._with_rollouts(Services(self.folder.log, note, stop=self.stop), tokenizer, checkpoints)
        return train_rl(self.recipe, self.accelerator, checkpoints, services, self.images)

    def _checkpoints(self, tokenizer: PreTrainedTokenizerBase) -> Checkpoints:
        recipe, folder = self.recipe, self.folder
        info: dict[str, Any] = {
            "algorithm": recipe.train.algorithm,
            "seed": recipe.seed,
            "recipe": yaml.safe_load(recipe.to_saved(folder.whole)),
            "contents": content_digests(recipe),
            "code": digests_of(code_files(recipe)),
        }
        return Checkpoints(folder.checkpoints, tokenizer, recipe.train, info, folder.growing, self.checkpoint)

    def _load_renderer(self, tools_in_data: bool = False) -> Renderer:
        rollout, tools = self.recipe.rollout, tools_in_data or bool(self.recipe.tools or self.recipe.mcp_servers)
        images = self.folder.images
        return load_renderer(self.recipe.model, rollout.parser, reasoning=rollout.reasoning, tools=tools, images=images)

    def _with_rollouts(
        self, services: Services, tokenizer: PreTrainedTokenizerBase, checkpoints: Checkpoints
    ) -> Services:
        recipe, folder, main = self.recipe, self.folder, self.accelerator.is_main_process
        train, train_state = recipe.train, checkpoints.train_state
        total = train.steps * train.batch_size
        if train.from_trajectories:
            renderer = self._load_renderer()
            checkpoints.note_renderer(renderer.template.source, renderer.info)
            saved, taken = Path(train.from_trajectories), train_state.step * train.batch_size
            if not main:
                return replace(services, source=None)
            check_saved_chains(read_groups(saved), tokenizer, saved)
            if recipe.teacher is not None and recipe.teacher.context is not None:
                check_saved_prompts(read_groups(saved), saved)
            return replace(services, source=SavedGroups(saved, total, skip=taken))
        # every rank computes the trainer's logprobs, because the policy may be sharded
        servers: list[ServerControl] = []
        probes = _probes(recipe, tokenizer, folder)
        canary = Canary(servers, probes, recipe.model.dtype, rounded=bool(recipe.rounding))
        if not main:
            return replace(services, canary=canary)
        servers += [ServerControl(url, recipe.server.api_key_env) for url in recipe.server.urls]
        backend, turns = make_sync(recipe, servers, folder.sync, recipe.name), services.turns
        if recipe.placement.mode == "time_share":
            servers[0].require(SLEEP_ROUTES)
            turns = TimeShare(servers[0], self.accelerator.device, recipe.server.retry_seconds, services.stop)
            backend = turns.waking(backend)
        sync = RetryingSync(backend, canary, recipe.server.retry_seconds)
        self.stack.callback(sync.close)
        job = Job(
            recipe,
            base=folder.path,
            urls=[server.url for server in servers],
            trajectories=folder.trajectories,
            images=folder.images,
            batch_size=train.batch_size,
            total=total,
            teachers=recipe.teacher_servers,
            trained=train_state.trained,
            versions=train_state.labels,
            context=recipe.teacher.context if recipe.teacher is not None else None,
        )
        workers = RolloutWorkers(job, folder.logs, sync.bring_back)
        self.stack.callback(workers.close)

        def await_ready() -> None:
            checkpoints.note_renderer(workers.ready.chat_template, workers.ready.renderer)
            for server in servers:
                server.require(backend_of(recipe).routes)

        return replace(services, source=workers, sync=sync, canary=canary, turns=turns, await_ready=await_ready)


def _sft_rows(recipe: Recipe, renderer: Renderer, tasks: list[Task] | None) -> list[Row] | None:
    if recipe.train.from_trajectories:
        saved = Path(recipe.train.from_trajectories)
        chosen = saved_rows(saved, recipe.train.min_reward)
        check_saved_chains(read_groups(saved), renderer.tokenizer, saved)
        return chosen
    if tasks is None:
        return None
    images = renderer.images
    if isinstance(images, ShownImages) and images.shows:
        view = view_of(recipe.model.path, images.vision, recipe.rollout.coordinates)
        rows = [state_places(task, view, recipe.model.path, "data", row) for row, task in enumerate(tasks, 1)]
        tasks = images.take_tasks(rows, "data")
    return conversation_rows(tasks, renderer)


class _Display:
    """The display of a run for rank 0: progress, warnings and trackers. A symptom of train.stop_when stops the run."""

    def __init__(self, run: _Run, plan: TimePlan | None):
        recipe, folder, checkpoint, stack = run.recipe, run.folder, run.checkpoint, run.stack
        self._folder, self._stop, self._stop_when = folder, run.stop, recipe.train.stop_when
        self._plan = plan
        self._progress = Progress(recipe.train.steps, "sft" if recipe.train.algorithm == "sft" else "grpo")
        stack.callback(self._progress.close)
        self.notices = stack.enter_context(tell_warnings(self._progress.note))
        for text in changed_code(recipe, checkpoint) if checkpoint is not None else ():
            # shown when the run folder was rewound, and repeated at the end
            self.notices.take(Notice(text, text))
        self._tracking: Tracking | None = None
        if recipe.track.trackers:
            told, step = yaml.safe_load(recipe.to_yaml()), step_of(checkpoint) if checkpoint else 0
            tracking = Tracking(recipe.track, folder.title, folder.path, told, step, folder.images)
            self._tracking = stack.enter_context(tracking)
        self._health = Health(alike=ordered_by(recipe) is None)
        self.findings: list[Finding] = []
        for metrics in folder.read_metrics():
            for finding in self._health.note(metrics):
                self.findings.append(finding)
                self.notices.take(Notice(finding.topic, finding.text))
        folder.on_log = self._show

    @property
    def ended_by(self) -> signal.Signals | Symptom | None:
        return self._stop.agreed_on

    def _show(self, metrics: dict[str, Any]) -> None:
        self._progress.update(metrics)
        if self._plan is not None and (told := self._plan.told_after(metrics)) is not None:
            self._progress.note(told)
        if self._tracking is not None:
            self._tracking.log(metrics)
        for finding in self._health.note(metrics):
            notify(logger, finding.topic, finding.text)
            self.findings.append(finding)
            if finding.topic in self._stop_when:
                self._stop.ask(Symptom(finding.topic))

    def note_groups(self, step: int, groups: list[Group], credit: list[str]) -> None:
        self._folder.note_credit(credit)
        if self._tracking is not None:
            self._tracking.note_groups(step, groups)

    def say_what_ended_it(self, steps: int, is_launched: bool) -> None:
        """Print the cause of an early end after `steps`; print nothing if the run is complete."""
        if isinstance(self.ended_by, signal.Signals):
            # the launcher stops its trainer by SIGTERM, and names the signal that it got itself
            by = "" if is_launched else f" by {name_of(self.ended_by)}"
            self._progress.note(f"stopped{by} after step {steps}; continue with --resume")
        elif self.ended_by is not None:
            self._progress.note(f"stopped by train.stop_when ({self.ended_by}) after step {steps}")


def _probes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: RunFolder) -> list[CanaryRow]:
    longest = min(recipe.server.max_model_len, recipe.rollout.max_total_tokens) - 1
    vision = load_vision(recipe.model.path)
    # some tokenizers do not list image tokens as special
    left_out = {*tokenizer.all_special_ids, *(vision.banned_token_ids if vision is not None else ())}
    vocabulary = [token for token in range(len(tokenizer)) if token not in left_out]
    if vision is None:
        return canary_rows(vocabulary, longest, recipe.seed, CONTEXT_TOKENS[recipe.server.engine])
    rows = canary_rows(vocabulary, longest, recipe.seed)
    # a frozen vision tower is the same as the one that the server has loaded
    return with_image_rows(rows, vision, ImageStore(folder.images) if recipe.train.trains_vision else None, recipe.seed)


def _summary(recipe: Recipe, folder: RunFolder, result: TrainResult, display: _Display) -> dict[str, Any]:
    status, reason, ended_by = "completed", dict[str, str](), display.ended_by
    if isinstance(ended_by, signal.Signals):
        status, reason = "interrupted", {"reason": name_of(ended_by)}
    elif ended_by is not None:
        text = next(finding.text for finding in reversed(display.findings) if finding.topic == ended_by)
        status, reason = "stopped", {"reason": f"train.stop_when: {ended_by}: {text}"}
    best = find_best(found_checkpoints(folder.checkpoints), recipe.train.keep_best)

    def below(path: Path) -> str:
        return str(path.relative_to(folder.path))

    return {
        "status": status,
        **reason,
        **{f"{name}_before": value for name, value in _headline(result.before).items()},
        **{f"{name}_after": value for name, value in _headline(result.after).items()},
        "steps": result.steps,
        "evaluated_step": result.evaluated,
        "train_wall_seconds": result.seconds,
        "seed": recipe.seed,
        "checkpoint": below(result.checkpoint) if result.checkpoint else None,
        "best_checkpoint": best and {**asdict(best), "path": below(best.path)},
        **chains_dropped(folder.read_metrics()),
        "warnings": display.notices.last_lines(),
    }


def _headline(metrics: dict[str, float]) -> dict[str, float]:
    names = {"success": "eval/sampled/success", "greedy": "eval/greedy/success", "reward": "eval/sampled/reward"}
    return {short: metrics[name] for short, name in names.items() if name in metrics}
