"""`agentfactory index build | serve`: an index of passages, and a retrieval server in front of it."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from agentfactory.tools.errors import SettingError
from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.local_index import build_index
from agentfactory.worlds.search.ranking import open_index
from agentfactory.worlds.search.retrieval_server import serve

_SAY_SECONDS = 10.0
"""Time between two lines of progress, where there is no terminal."""


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run `build` or `serve`.

    Raises:
        SettingError: the corpus, an option or the index cannot work.
        DiskError: the disk is full.
    """
    if options.action == "build":
        _build(options, say)
    elif options.topk < 1:
        raise SettingError("--topk", f"got {options.topk}", "use at least 1")
    else:
        index = open_index(options.index, options.ranking)
        serve(index, options.host, options.port, options.topk, options.api_key_env, say)


def _build(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    if options.output.exists():
        raise SettingError("--output", f"{options.output} exists", "choose another folder, or remove it")
    corpus = Corpus(options.corpus, options.subset, options.split)
    language = None if options.language == "none" else options.language
    started = time.monotonic()
    with _Bar(corpus) as bar:
        finish = None
        if options.dense is not None:
            from agentfactory.worlds.search.dense import build_dense, check_model

            check_model(options.dense)

            def finish(folder: Path) -> None:
                build_dense(corpus, folder, options.dense, lambda done: bar.show("embedded", done))

        total = build_index(
            corpus, options.output, corpus.name, language, lambda done: bar.show("indexed", done), finish
        )
    size = sum(file.stat().st_size for file in options.output.rglob("*") if file.is_file())
    seconds = time.monotonic() - started
    say(f"indexed {total:,} passages in {seconds:,.0f} s; {options.output} takes {size / 1e6:,.1f} MB")


class _Bar:
    """A bar on a terminal, and a line now and then elsewhere."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), console=self._console
        )
        self._task = self._progress.add_task("", total=None, figures="")
        self._said = self._began = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> "_Bar":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, done_what: str, done: int) -> None:
        """Show that so many passages are `done_what`, also those of an earlier build."""
        now = time.monotonic()
        if self._first is None or self._progress.tasks[0].description != done_what:
            self._first, self._began = done, now
        speed = (done - self._first) / max(1e-3, now - self._began)
        share = self._corpus.share
        figures = f"{done:,} passages, {speed:,.0f}/s"
        total = None if share is None else 1.0
        self._progress.update(self._task, description=done_what, figures=figures, total=total, completed=share or 0.0)
        if not self._console.is_terminal and now - self._said > _SAY_SECONDS:
            self._said = now
            self._console.print(f"{done_what} {figures}" + ("" if share is None else f", {share:.0%} of the corpus"))
