"""`agentfactory index build | serve`: build an index of passages, or serve one as a retrieval server.

Registered as a command of `agentfactory`, which imports this module on every start: keep its imports cheap.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extras import DISTRIBUTION, check_extra

ABOUT = "build an index of passages for the tool `search`, or serve one to other programs"
EXAMPLES = [
    "index build passages.jsonl --output indexes/passages",
    "index build PeterJinGo/wiki-18-corpus --output indexes/wiki-18",
    "index build passages.jsonl --output indexes/e5 --dense intfloat/e5-base-v2",
    "index serve indexes/passages --port 8000",
]
_ACTIONS = {
    "build": "build an index from passages; the same command resumes an interrupted build",
    "serve": "serve an index with Search-R1's protocol: POST /retrieve",
}


def add_options(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    build, serve = (
        actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        for name, text in _ACTIONS.items()
    )
    about = "a file .jsonl, .jsonl.gz or .parquet, or a hub data set; its rows have id, and contents or title and text"
    build.set_defaults(goes_on="the same command resumes it")
    build.add_argument("corpus", metavar="CORPUS", help=about)
    build.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder to create")
    build.add_argument("--subset", metavar="NAME", help="subset of a hub data set")
    build.add_argument("--split", metavar="NAME", default="train", help="split of a hub data set; default: train")
    about = "language for stemming, or none; default: english"
    build.add_argument("--language", metavar="NAME", default="english", help=about)
    about = f"also index the vectors of this sentence-transformers model; needs {DISTRIBUTION}[dense]"
    build.add_argument("--dense", metavar="MODEL", help=about)
    for name in ("query", "passage"):
        about = f"text before each {name} that the model of --dense encodes; default: the model's own"
        build.add_argument(f"--{name}-prefix", metavar="TEXT", help=about)
    serve.add_argument("index", type=Path, metavar="DIR", help="an index made by `build`")
    serve.add_argument("--port", type=int, metavar="N", default=8000, help="port; 0: a free one; default: 8000")
    about = "address to listen on; any but loopback needs --api-key-env; default: 127.0.0.1"
    serve.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=about)
    about = "environment variable with the key that clients must send; default: a random key"
    serve.add_argument("--api-key-env", metavar="NAME", help=about)
    about = "passages per query if a request gives no number; default: 3"
    serve.add_argument("--topk", type=int, metavar="K", default=3, help=about)
    about = "bm25, dense or hybrid; default: hybrid if the index was built with a dense model, else bm25"
    serve.add_argument("--ranking", choices=("bm25", "dense", "hybrid"), help=about)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run `build` or `serve`. Raises SettingError (the corpus, an option or the index), DiskError."""
    if options.action == "build":
        _build(options, say)
    elif options.topk < 1:
        raise SettingError("--topk", f"got {options.topk}", "use at least 1")
    else:
        from agentfactory.worlds.search.ranking import open_index
        from agentfactory.worlds.search.retrieval_server import serve

        index = open_index(options.index, options.ranking)
        serve(index, options.host, options.port, options.topk, options.api_key_env, say)


def _build(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    check_extra("search")
    from agentfactory.worlds.search.corpus import Corpus
    from agentfactory.worlds.search.local_index import build_index

    if options.dense is None and (options.query_prefix, options.passage_prefix) != (None, None):
        name = "--query-prefix" if options.query_prefix is not None else "--passage-prefix"
        raise SettingError(name, "only the model of --dense uses it", "add --dense MODEL, or remove it")
    if options.output.exists():
        raise SettingError("--output", f"{options.output} exists", "choose another folder, or remove it")
    corpus = Corpus(options.corpus, options.subset, options.split)
    language = None if options.language == "none" else options.language
    started = time.monotonic()
    with _Bar() as bar:
        indexed = 0

        def show_indexed(done: int) -> None:
            nonlocal indexed
            indexed = done
            bar.show("indexed", done, corpus.share)

        finish = None
        if options.dense is not None:
            check_extra("dense")
            from agentfactory.worlds.search.dense import EncoderSpec, build_dense

            spec = EncoderSpec(options.dense, options.query_prefix, options.passage_prefix)

            def finish(folder: Path) -> None:
                build_dense(
                    corpus, folder, spec, lambda done: bar.show("embedded", done, done / max(1, indexed)), bar.say
                )

        total = build_index(corpus, options.output, corpus.name, language, show_indexed, finish)
    size = sum(file.stat().st_size for file in options.output.rglob("*") if file.is_file())
    seconds = time.monotonic() - started
    say(f"indexed {total:,} passages in {seconds:,.0f} s; {options.output} takes {size / 1e6:,.1f} MB")


class _Bar:
    """A progress bar on a terminal; a progress line every few seconds otherwise."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

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

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, done_what: str, done: int, share: float | None) -> None:
        """Show that `done` passages are `done_what`, including those of an earlier build, which is `share` of all."""
        now = time.monotonic()
        if self._first is None or self._progress.tasks[0].description != done_what:
            self._first, self._began = done, now
        speed = (done - self._first) / max(1e-3, now - self._began)
        figures = f"{done:,} passages, {speed:,.0f}/s"
        total = None if share is None else 1.0
        self._progress.update(self._task, description=done_what, figures=figures, total=total, completed=share or 0.0)
        if not self._console.is_terminal and now - self._said > 10.0:
            self._said = now
            self._console.print(f"{done_what} {figures}" + ("" if share is None else f", {share:.0%} of the corpus"))
