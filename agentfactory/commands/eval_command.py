"""The target of `agentfactory eval`, from its options: a model, or the server at an address."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import proxy_for
from agentfactory.launching.served_weights import check_weights
from agentfactory.recipe.composition import COMMAND_LINE, display
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of, updated
from agentfactory.rollout.chains.chat_endpoint import look_at as ask_what_it_is
from agentfactory.rollout.chains.endpoint_chain import ChatRunner, check_recipe, open_chat_runner
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.evaluation.evaluate import Evaluation, open_sources
from agentfactory.rollout.evaluation.pass_at_k import Estimate
from agentfactory.rollout.evaluation.side_by_side import Difference, OtherEvaluation, differences, read_means
from agentfactory.rollout.sources import Loaded, Source, open_all
from agentfactory.rollout.text.tokenizer import load_tokenizer

_BESIDE = ("failed", "tool_calls", "sampled_tokens")  # means over all tasks that are shown below the estimates


def tables(found: Evaluation) -> list[str]:
    """Return the tables as text: metrics with their 95 % intervals over tasks, and a line on chains that failed."""
    told = [
        _table(mode, source, estimates, found.means if not source else {})
        for mode, sources in found.estimates.items()
        for source, estimates in sources.items()
    ]
    if failed := sum(found.failures.values()):
        reason, count = found.failures.most_common(1)[0]
        told.append(f"{failed} of {found.chains} chains failed and are excluded, {count} of them with: {reason}")
    return told


def compared(chains: Path, other: OtherEvaluation) -> list[str]:
    """Return the tables of an evaluation, from the folder of its chains, beside another one."""
    found, where = differences(read_means(chains), other.means), display(other.folder)
    if not found:
        problem = f"no task has a reward in both this evaluation and {where}"
        return [f"warning: nothing to compare: {problem}; fix: evaluate the same eval.data"]
    return [_beside(mode, where, metrics) for mode, metrics in found.items()]


def _beside(mode: str, where: str, metrics: dict[str, Difference]) -> str:
    table = _empty_table("this", "other", "difference")
    for name, found in metrics.items():
        values = f"{found.this:.4f}", f"{found.other:.4f}", f"{found.difference.value:+.4f}"
        table.add_row(name, *values, _interval(found.difference, "+"), str(found.difference.tasks))
    return f"{mode}, beside {where}\n{_as_text(table)}"


def _table(mode: str, source: str, estimates: dict[str, Estimate], means: dict[str, float]) -> str:
    table = _empty_table("value")
    for name, estimate in estimates.items():
        table.add_row(name, f"{estimate.value:.4f}", _interval(estimate), str(estimate.tasks))
    for name in _BESIDE:
        if f"{mode}/{name}" in means:
            table.add_row(name, f"{means[f'{mode}/{name}']:.4f}", "", "")
    return f"{mode}, {f'source {source}' if source else 'all tasks'}\n{_as_text(table)}"


def _empty_table(*values: str) -> Table:
    table = Table()
    table.add_column("figure", overflow="fold")
    for name in values:
        table.add_column(name, justify="right")
    table.add_column("95 % interval")
    table.add_column("tasks", justify="right")
    return table


def _interval(estimate: Estimate, sign: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return "not known"
    return f"{estimate.low:{sign}.4f} to {estimate.high:{sign}.4f}"


def _as_text(table: Table) -> str:
    # as text, because it is printed like the other lines and must not be wider
    console = Console(file=StringIO(), width=80, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip()


_refusal = partial(SettingError, source=COMMAND_LINE)


def check(
    recipe: Recipe | StagedRecipe, checkpoint: Path | None, model: str | None, url: str | None, samples: int | None
) -> None:
    """Raise SettingError if the options conflict with each other or with the recipe."""
    if checkpoint is not None and (model or url):
        other = "--model" if model else "--url"
        raise _refusal("--checkpoint", f"given with {other}", "evaluate one of them at a time")
    option = "--checkpoint" if checkpoint is not None else "--model"
    if (checkpoint is not None or model) and url is None and stages_of(recipe)[-1].server.url is not None:
        problem = "given with server.url, whose server has its own weights"
        raise _refusal(option, problem, "set server.url=null to start a server, or evaluate that one with --url")
    if samples is not None and samples < 1:
        raise _refusal("--samples", f"got {samples}", "use at least 1")


def with_samples(recipe: Recipe | StagedRecipe, samples: int) -> Recipe | StagedRecipe:
    if isinstance(recipe, StagedRecipe):
        *first, last = recipe.stages
        return recipe.model_copy(update={"stages": [*first, with_samples(last, samples)]})
    return updated(recipe, "eval", samples=samples)


def named(model: str) -> str | Path:
    """Return the folder or hub name that --model gives. Raises SettingError for a missing folder."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        check_weights(folder, "--model")
        return folder
    if folder.is_absolute() or model.startswith("."):
        raise _refusal("--model", f"{model}: no such folder", "name a folder, or a model of the hub")
    return model


@dataclass(frozen=True)
class There:
    """The server at `url`, its name for the weights, and the recipe for it."""

    recipe: Recipe
    url: str
    model: str
    by_token_ids: bool


def look_at(recipe: Recipe, url: str, model: str | None) -> There:
    """Determine the protocol of the server at `url`, and its model. Raises SettingError, ServerUnreachableError."""
    cards = ask_what_it_is(url, model, recipe.server.api_key_env)
    if isinstance(cards, str):
        for part in recipe.held_out_parts():
            check_recipe(part.recipe)
        return There(recipe, url, cards, by_token_ids=False)
    names = [str(card["id"]) for card in cards]
    base = next(card for card in cards if not card.get("parent"))
    if model is not None and model not in names:
        raise _refusal("--model", f"{url} serves no {model!r}", f"name one of {', '.join(names)}")
    return There(_with_tokenizer_of(recipe, url, base), url, model or str(base["id"]), by_token_ids=True)


def _with_tokenizer_of(recipe: Recipe, url: str, card: dict[str, Any]) -> Recipe:
    path = str(card.get("root") or card["id"])
    if path == recipe.model.path:
        return recipe
    try:
        load_tokenizer(path)
    except ValueError:
        # the ids of another tokenizer would mean other text
        problem = f"{url} serves {path}, and there is no tokenizer of that name here"
        fix = f"name its tokenizer as model.path, and the server as server.url={url} in place of --url"
        raise _refusal("--url", problem, fix) from None
    return recipe.with_model(path)


def open_sources_at(
    there: There, base: Path, images: Path, loaded: Sequence[Loaded]
) -> AbstractAsyncContextManager[Sequence[Source[Any]]]:
    """Open the runners of each part's chains against this server; `images` is the folder for their images."""
    if there.by_token_ids:
        return open_sources(there.recipe, loaded, base, there.url, images=images, proxy=proxy_for(there.url))

    def opener(recipe: RolloutRecipe) -> AbstractAsyncContextManager[ChatRunner]:
        return open_chat_runner(recipe, base, there.url, there.model, images)

    return open_all(loaded, opener)
