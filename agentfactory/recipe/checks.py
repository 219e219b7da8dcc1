"""Checks of a recipe's fields against each other, this machine's files and the user's code."""

import ast
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.base.errors import Fault, SettingError, refuse, short
from agentfactory.base.processes.environment import is_setting
from agentfactory.base.user_code.source_files import source_files, variables_read
from agentfactory.recipe.adapters import check_adapter, doubts_about_adapter
from agentfactory.recipe.code_checks import (
    check_programs,
    check_resets,
    check_servers,
    check_user,
    check_user_code,
    gives_reward,
    may_open_chains,
)
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Purpose, Recipe, StagedRecipe
from agentfactory.recipe.server_checks import check_engine, server_faults, sglang_faults
from agentfactory.recipe.train_checks import Lack, check_training, placement_faults
from agentfactory.rollout.chains.opening_prompt import check_lengths, check_texts
from agentfactory.rollout.config import Inflight, Part, RolloutRecipe, distinct
from agentfactory.rollout.data import Task, check_source, conversation_of, load_tasks
from agentfactory.rollout.data.files import FORMATS, is_data_file, is_quick, unreadable
from agentfactory.rollout.images.parts import images_of_row
from agentfactory.rollout.model_hub import HubName, is_hub_name, load_fault, model_names, use_hub_if_it_answers
from agentfactory.rollout.rewards import Rewards
from agentfactory.tools.images.decode import is_path

_TRIED_ROWS = 3


def runs_chains(recipe: Recipe, purpose: Purpose) -> bool:
    """Return whether agents run, which requires tools, rewards and a server."""
    if purpose == "train":
        return recipe.train.algorithm != "sft" and recipe.train.from_trajectories is None
    return purpose in ("rollout", "eval")


def check_recipe(
    recipe: Recipe | StagedRecipe, purpose: Purpose = "train", lacks: list[SettingError] | None = None
) -> None:
    """Check a recipe for the command `purpose`; errors about missing programs go to `lacks`. Raises SettingError."""
    with recipe.composed.located():
        _check_prepare(recipe.prepare)
    prepared = recipe.output / "prepared" if recipe.prepare else None
    if isinstance(recipe, Recipe):
        _check_run(recipe, purpose, prepared, None, lacks)
        return
    for before, stage in zip([None, *recipe.stages], recipe.stages, strict=False):
        # the other commands use the last stage
        used = purpose if purpose == "tools" or stage is recipe.stages[-1] else "train"
        with recipe.composed.stage_named(stage.name):
            _check_run(stage, used, prepared, before.name if before else None, lacks)


def _check_run(
    recipe: Recipe, purpose: Purpose, prepared: Path | None, after: str | None, lacks: list[SettingError] | None
) -> None:
    """Check one run. `prepared`: the folder that `prepare` will fill, if any. `after`: the stage before."""

    def lack(field: str, problem: str, fix: str) -> None:
        error = SettingError(field, problem, fix)
        if lacks is None:
            raise error
        lacks.append(error)

    with recipe.composed.located():
        _check(recipe, purpose, prepared, after, lack)
        for part in parts_of(recipe) if purpose != "tools" else ():
            with part_named(part):
                _check_data_file(part.recipe, prepared)
        for part in distinct(parts_of(recipe)):
            with part_named(part):
                check_programs(part.recipe, lack, prepared)
                check_user_code(part.recipe, lack, tools_only=purpose == "tools")
                if runs_chains(part.recipe, purpose) or purpose == "tools":
                    check_servers(part.recipe, prepared)
        if runs_chains(recipe, purpose):
            refuse(_missing_tasks(recipe, purpose))
            for part in parts_of(recipe):
                with part_named(part):
                    refuse(_chain_faults(part.recipe, purpose, part.section.startswith("eval.")))
        if purpose == "train":
            refuse(_variable_faults(recipe))
        if runs_chains(recipe, purpose) or purpose == "serve":
            refuse(server_faults(recipe))
            check_engine(recipe, lack)
            if purpose in ("train", "serve"):
                refuse(placement_faults(recipe))
        for part in _used_parts(recipe, purpose):
            with part_named(part):
                _check_rows(part, purpose, prepared)


def parts_of(recipe: Recipe) -> list[Part[Recipe]]:
    """Return a recipe's parts, one per source of tasks and of held-out tasks; the recipe itself if it has no tasks."""
    return [*recipe.parts(), *recipe.held_out_parts()] or [Part("data", recipe)]


@contextmanager
def part_named(part: Part[Recipe]) -> Iterator[None]:
    """Give the errors about a part the names of its fields in the whole recipe."""
    try:
        yield
    except SettingError as error:
        raise part.located(error) from error.__cause__


def _check(recipe: Recipe, purpose: Purpose, prepared: Path | None, after: str | None, lack: Lack) -> None:
    if purpose != "tools":
        _check_files(recipe, prepared, after)
    sources = recipe.data.sources if recipe.data is not None else []
    if recipe.train.algorithm == "sft" and purpose == "train" and sources:
        problem = "set, but sft reads the conversations of one file"
        raise SettingError("data.sources", problem, "join the files, or train a stage on each")
    if recipe.server.engine == "sglang" and (runs_chains(recipe, purpose) or purpose == "serve"):
        refuse(sglang_faults(recipe))
    if purpose == "train":
        check_training(recipe, lack, runs_chains(recipe, purpose))
    if purpose == "serve" and recipe.server.url is not None:
        problem = f"got {short(recipe.server.url)}, which is already running"
        raise SettingError("server.url", problem, "set null to start one here")


def check_prepared(recipe: Recipe, prepared: Path, is_first: bool) -> None:
    """Check the files and tasks of a stage that `prepare` has created since `check`. Raises SettingError."""
    try:
        _check_files(recipe, None, None if is_first else "the stage before")
        for part in parts_of(recipe):
            with part_named(part):
                _check_data_file(part.recipe, None)
        for part in _used_parts(recipe, "train"):
            with part_named(part):
                _check_rows(part, "train", None)
        for part in distinct(parts_of(recipe)) if runs_chains(recipe, "train") else ():
            with part_named(part):
                check_servers(part.recipe, None)
    except SettingError as error:
        fix = f"correct the prepare function, and delete {display(prepared)} so that it runs again"
        raise SettingError(error.field, error.problem, fix, source=error.source or recipe.name) from error.__cause__


def _check_prepare(reference: str | None) -> None:
    """Check that the file of `prepare` defines its name, without running it: it may import torch."""
    if reference is None:
        return
    file, colon, name = reference.rpartition(":")
    if not colon:
        raise SettingError("prepare", f"got {reference!r}", "write FILE.py:NAME")
    if not Path(file).is_file():
        raise SettingError("prepare", f"{display(Path(file))}: no such file", "name an existing Python file")
    try:
        body = ast.parse(Path(file).read_bytes(), file).body
    except SyntaxError as error:
        raise SettingError("prepare", f"{error}", "correct the file") from None
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if name not in functions:
        problem = f"{display(Path(file))} defines no function {name!r}; it defines {', '.join(functions) or 'none'}"
        raise SettingError("prepare", problem, "name a function (folder, seed) of that file")


def _check_files(recipe: Recipe, prepared: Path | None, after: str | None) -> None:
    require = partial(_require, recipe=recipe, made=prepared)
    models = {
        "model.path": recipe.model.path if after is None else None,
        "server.model": recipe.server.model,
        "teacher.model": recipe.teacher.model if recipe.teacher is not None else None,
    }
    for name, path in models.items():
        # a path that is not absolute is a hub name
        if path and os.path.isabs(path):
            require(name, path, Path.is_dir, "folder with a model, or a hub name")
    if recipe.model.chat_template:
        require("model.chat_template", recipe.model.chat_template, Path.is_file, "Jinja file")
    check_adapter(recipe, prepared, after)
    if recipe.train.from_trajectories:
        require("train.from_trajectories", recipe.train.from_trajectories, Path.exists, "JSONL file or folder of them")


def _check_data_file(recipe: Recipe, prepared: Path | None) -> None:
    data = recipe.data
    if data is not None and data.file is not None:
        _require("data.path", str(data.file), Path.exists, f"{FORMATS} file, or a hub name", recipe, prepared)
        if data.file.exists() and not is_data_file(data.file):
            raise unreadable(data.file).at("data.path")


def _require(
    name: str, value: str, is_right: Callable[[Path], bool], kind: str, recipe: Recipe, made: Path | None
) -> None:
    """Raise SettingError unless a field names a path of this kind, or one that `prepare` will make in `made`."""
    path = Path(value)
    if made is not None and path.is_relative_to(made):
        return
    if not path.exists():
        in_prepared = path.is_relative_to(recipe.output / "prepared")
        fix = "set prepare: FILE.py:NAME to create it" if in_prepared else f"name an existing {kind}"
        raise SettingError(name, f"{display(path)}: no such file", fix)
    if not is_right(path):
        raise SettingError(name, f"{display(path)} is not a {kind}", f"name a {kind}")


def _check_rows(part: Part[Recipe], purpose: Purpose, prepared: Path | None) -> None:
    """Check that a data file's rows have what rewards and resets need, if it is quick to read."""
    recipe, section, data = part.recipe, part.section, part.recipe.data
    assert data is not None
    acts = runs_chains(recipe, purpose)
    check_source(data, section)
    if data.registered is not None:
        tasks = load_tasks(data, section)
        if acts:
            _check_tasks(recipe, tasks, section, acts)
    if (path := data.file) is None:
        return
    is_made = prepared is not None and path.is_relative_to(prepared)
    if not is_made and is_quick(path):
        _check_tasks(recipe, load_tasks(data, section), section, acts)


def _check_tasks(recipe: Recipe, tasks: list[Task], section: str, acts: bool) -> None:
    # whether images can be decoded is checked before the first chain
    for number, row in enumerate(tasks, 1):
        for image in images_of_row(row):
            if is_path(image) and not Path(image).is_file():
                problem = f"row {number}: the image {display(Path(image))}: no such file"
                raise SettingError(section, problem, "correct it, or leave the row out")
    if not acts:
        for number, task in enumerate(tasks, 1):
            conversation_of(task, number)
        return
    if recipe.rollout.agent is None:
        check_lengths(tasks, recipe.rollout, section)
        if not recipe.rollout.system_prompt and not may_open_chains(recipe):
            check_texts(tasks, section)
    Rewards(recipe.rewards, Path.cwd()).check_rows(tasks, section)
    check_user(recipe, tasks, section)
    if recipe.teacher is not None and recipe.teacher.context == "answer" and not section.startswith("eval."):
        from agentfactory.rollout.groups.teacher_context import check_answers

        check_answers("answer", tasks)
    check_resets(recipe, tasks, section)
    if recipe.rollout.agent is not None:
        from agentfactory.rollout.chains.agent_hooks import has_own_loop, load_agent

        agent = load_agent(recipe.rollout.agent, Path.cwd())
        if has_own_loop(agent):
            agent.check_rows(tasks, section)


def try_sources(recipe: Recipe, purpose: Purpose) -> list[SettingError]:
    """Load and check the first rows of task sources. Return errors of this machine; raise SettingError for others."""
    lacks = []
    for part in _used_parts(recipe, purpose):
        data, section = part.recipe.data, part.section
        if data is None or data.source is None:
            continue
        use_hub_if_it_answers()
        try:
            tasks = load_tasks(data.model_copy(update={"limit": _TRIED_ROWS}), section)
        except SettingError as error:
            # the source's errors about its own options, such as a missing program, name another field
            is_faulty = error.field.startswith((f"{section}.source", f"{section}.columns"))
            if is_faulty and not isinstance(error.__cause__, (OSError, ImportError)):
                raise
            lacks.append(error)
        else:
            with part_named(part):
                _check_tasks(part.recipe, tasks, section, runs_chains(recipe, purpose))
    return lacks


def try_template(recipe: Recipe) -> dict[str, Any]:
    """Probe the chat template of the recipe's model, and return the findings. Raises SettingError."""
    from transformers import AutoConfig

    from agentfactory.rollout.text.load_renderer import format_tokens, load_renderer, token_id
    from agentfactory.rollout.text.templates import RenderError

    if is_hub_name(recipe.model.path):
        use_hub_if_it_answers(recipe.model.path)
    try:
        config = AutoConfig.from_pretrained(recipe.model.path, trust_remote_code=False)
    except ValueError as error:
        if (fault := load_fault(error)) != str(error):
            fix = "name a model whose architecture transformers has"
            raise SettingError("model.path", f"transformers cannot load {recipe.model.path}: {fault}", fix) from error
        config = None
    rollout, data, told = recipe.rollout, recipe.data if recipe.train.algorithm == "sft" else None, list[Task]()
    # conversations bring their own tools
    if data is not None and data.file is not None and data.file.is_file() and is_quick(data.file):
        told = load_tasks(data)
    tools = bool(recipe.tools or recipe.mcp_servers) or any(task.get("tools") for task in told)
    try:
        renderer = load_renderer(
            recipe.model, rollout.parser, reasoning=rollout.reasoning, tools=tools, base=Path.cwd()
        )
    except RenderError as error:
        fix = "change rollout.parser or model.chat_template, as the error says"
        raise SettingError("rollout.parser", f"got {rollout.parser!r}, and {error}", fix) from error
    if config is not None and isinstance(rows := getattr(config.get_text_config(), "vocab_size", None), int):
        format_tokens(renderer).check(rows)
    asked = recipe.model.lora.trainable_tokens if recipe.model.lora is not None else None
    for text in asked if isinstance(asked, list) else []:
        token_id(renderer.tokenizer, text)
    return renderer.info


def _used_parts(recipe: Recipe, purpose: Purpose) -> list[Part[Recipe]]:
    trains = (purpose == "train" and recipe.train.from_trajectories is None) or purpose == "rollout"
    evaluates = runs_chains(recipe, purpose) and purpose != "rollout"
    return [*(recipe.parts() if trains else []), *(recipe.held_out_parts() if evaluates else [])]


def hub_names(recipe: Recipe, purpose: Purpose) -> list[HubName]:
    # elsewhere, a running server has the model
    models = model_names(recipe) if purpose == "train" or not recipe.server.urls else []
    teacher = recipe.teacher.model if recipe.teacher is not None else None
    if purpose == "train" and teacher is not None and is_hub_name(teacher):
        models.append(HubName("teacher.model", teacher, "model"))
    named = ((f"{part.section}.path", part.recipe.data) for part in _used_parts(recipe, purpose))
    data = {field: data.path for field, data in named if data is not None}
    return models + [HubName(field, name, "dataset") for field, name in data.items() if name and is_hub_name(name)]


def _missing_tasks(recipe: Recipe, purpose: Purpose) -> Iterator[Fault]:
    if purpose == "eval" and recipe.eval.data is None:
        yield "eval.data", "missing: there is nothing to evaluate on", "set eval.data.path"
    if purpose != "eval" and recipe.data is None:
        fix = "set data.path to a file of rows with question or messages, or data.source"
        yield "data", "missing: there are no tasks", fix
    if recipe.eval.every and recipe.eval.data is None:
        yield "eval.every", f"got {recipe.eval.every} without held-out tasks", "set eval.data.path"


def _chain_faults(recipe: Recipe, purpose: Purpose, held_out: bool) -> Iterator[Fault]:
    rollout, longest = recipe.rollout, recipe.server.max_model_len
    if not gives_reward(recipe):
        fix = "name FILE.py:NAME of a @reward, or an Environment"
        if recipe.needs_rewards or purpose != "train":
            yield "rewards", "empty, and no environment gives a reward", fix
        if held_out:
            problem = "set, but there are no rewards by which held-out chains could be judged"
            yield "data", problem, f"set null; or rewards: {fix}"
    if rollout.max_total_tokens > longest:
        problem = f"got {rollout.max_total_tokens}, more than server.max_model_len={longest}"
        yield "rollout.max_total_tokens", problem, f"use at most {longest}, or raise server.max_model_len"
    if rollout.max_tokens >= rollout.max_total_tokens:
        problem = f"got {rollout.max_tokens}: one turn fills rollout.max_total_tokens={rollout.max_total_tokens}"
        yield "rollout.max_tokens", problem, "lower it, or raise rollout.max_total_tokens"
    if purpose == "train" and rollout.inflight == Inflight.KEEP:
        if recipe.model.lora is not None:
            yield "rollout.inflight", "got 'keep', but a turn keeps its adapter and its cache anyway", "remove it"
        if rollout.max_staleness == 0:
            problem = "got 'keep' with rollout.max_staleness=0: no turn runs during an update"
            yield "rollout.inflight", problem, "remove it, or raise rollout.max_staleness"


def _variable_faults(recipe: Recipe) -> Iterator[Fault]:
    for name in recipe.env:
        if name not in os.environ:
            yield "env", f"the environment variable {name} is not set", "export it, or remove it"
    data = recipe.model_dump(mode="json", include={"prepare", *RolloutRecipe.model_fields})
    passed = recipe.variables()
    for file in source_files(data, Path.cwd(), recipe.import_path):
        for name in sorted(variables_read(file) & os.environ.keys() - passed):
            if not is_setting(name):
                problem = f"{display(file)} reads {name}, which the recipe does not name, and so does not get it"
                yield "env", problem, f"env: [{', '.join([*recipe.env, name])}], or unset {name}"


def doubts(recipe: Recipe) -> list[str]:
    """Return warnings about settings of a training run that can work, but hardly as meant."""
    size, found = recipe.train.batch_size, doubts_about_adapter(recipe)
    if recipe.train.precision != "auto" and not recipe.train.compile:
        problem = f"got {recipe.train.precision!r} without train.compile, which fuses its casts"
        fix = "train.compile=true, or train.precision=auto"
        found.append(f"train.precision: {problem}: probably slower than auto (not measured yet); fix: {fix}")
    data = None if recipe.train.from_trajectories else recipe.data
    # only rows in a file that exists and is fast to read
    if data is None or data.file is None or not (data.file.is_file() and is_quick(data.file)):
        return found
    if (rows := len(load_tasks(data))) >= size:
        return found
    each = "the same row" if recipe.train.algorithm == "sft" else "groups of the same task"
    problem = f"got {size}, more than the rows of data ({rows}): a batch has {each} several times"
    return [*found, f"train.batch_size: {problem}; fix: lower it to {rows}, or add rows"]
