"""Export of one self-contained file with the page, the curves and some of the trajectories."""

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from agentfactory.base.errors import SettingError
from agentfactory.viewer.app import SCRIPTS, names_of, page_file, plotly_script
from agentfactory.viewer.charts import charts, series_of
from agentfactory.viewer.runs.follower import Follower
from agentfactory.viewer.runs.query import MOST_ROWS, Query
from agentfactory.viewer.runs.run_data import Run
from agentfactory.viewer.runs.saved_groups import task_text, texts_of
from agentfactory.viewer.trajectories.image_marks import data_url
from agentfactory.viewer.trajectories.trajectory_page import NotThere, find_chain, page_of

MOST_TRAJECTORIES = 200
MOST_BYTES = 64 * 2**20

_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def export(folders: Sequence[Path], file: Path) -> str:
    """Write the page of these runs to `file`, and return a description of its content. Raises SettingError. It contains
    at most MOST_TRAJECTORIES trajectories, of at most MOST_BYTES in all, of which each run has an equal share, plus
    what smaller runs leave unused, spread evenly. Recipes are left out, because they may contain private names."""
    if not file.parent.is_dir():
        raise SettingError("", f"--export {file}: {file.parent} is not a folder", "create it first")
    follower = Follower(folders)
    follower.read_all()
    pages, searched = _pages(follower)
    state = follower.state()
    data = {
        "state": state,
        "metrics": {run.id: {"generation": 0, **series_of(run.lines, 0)} for run in follower.runs},
        "charts": charts(names_of(follower.runs)),
        "pages": pages,
        "texts": searched,
    }
    aside = file.with_name(f"{file.name}.partial")
    try:
        aside.write_text(_page(data), encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        raise SettingError("", f"--export {file}: {error.strerror}", "name a file that can be written") from None
    total = sum(run["chains"] for run in state["runs"])
    size, problems = file.stat().st_size / 1e6, sum(len(run.problems) for run in follower.runs)
    unread = f"; the page lists {problems} unreadable files or lines" if problems else ""
    runs = f"{len(follower.runs)} run{'s' if len(follower.runs) > 1 else ''}"
    return f"{file}: {runs}, {len(pages)} of {total} trajectories, {size:.1f} MB{unread}"


def _page(data: dict[str, Any]) -> str:
    nonce = secrets.token_urlsafe(16)
    # in JSON, `<` occurs only in strings, where it can be escaped: no text can end the surrounding script element
    text = to_json(data, inf_nan_mode="null").decode().replace("<", "\\u003c")
    scripts = [plotly_script(), *map(page_file, SCRIPTS)]
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(nonce=nonce)}">\n'
        f"<style>\n{page_file('style.css')}</style>"
    )
    body = "\n".join(
        [
            f'<script type="application/json" id="exported" nonce="{nonce}">{text}</script>',
            *(f'<script nonce="{nonce}">\n{script}\n</script>' for script in scripts),
        ]
    )
    page = page_file("index.html")
    for name, part in (("head", head), ("scripts", body)):
        before, rest = page.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->\n")
        page = f"{before}{part}\n{after}"
    return page


def _pages(follower: Follower) -> tuple[list[dict[str, Any]], list[str]]:
    pages: list[dict[str, Any]] = []
    searched: list[str] = []
    left = MOST_BYTES
    # small runs first: what they leave unused goes to the others
    runs = sorted(follower.index.counts().items(), key=lambda counted: counted[1])
    for number, (run, _) in enumerate(runs):
        rows = _spread(follower, run, (MOST_TRAJECTORIES - len(pages)) // (len(runs) - number))
        left -= (share := left // (len(runs) - number))
        taken: dict[int, tuple[dict[str, Any], str]] = {}
        for place in _from_coarse_to_fine(len(rows)):
            row = rows[place]
            chain = find_chain(follower, run, row["file"], row["byte"], row["place"])
            try:
                page = page_of(follower, chain, partial(_inside, chain.run))
            except NotThere as error:
                chain.run.note(str(error))
                continue
            # without paths, because an exported page is shared with others
            page["workspaces"] = []
            page["facts"] |= {"tools": row["tools"], "preview": task_text(chain.group)[:240]}
            size = len(to_json(page, inf_nan_mode="null"))
            # if this one does not fit, another may
            if size <= share:
                share -= size
                taken[place] = page, "\n".join(texts_of(chain.group["task"], chain.saved))
        left += share
        for place in sorted(taken):
            pages.append(taken[place][0])
            searched.append(taken[place][1])
    return pages, searched


def _inside(run: Run, message: int, part: int, url: str) -> str:
    return data_url(run, url)


def _from_coarse_to_fine(count: int) -> list[int]:
    """Return the numbers below `count` in bit-reversed order, so that each prefix of the list is spread evenly."""
    width = count.bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{width}b}"[::-1])


def _spread(follower: Follower, run: str, most: int) -> list[dict[str, Any]]:
    """Return up to `most` rows of the index, from the run's first chain to its last."""
    total = follower.index.counts()[run]
    count = min(most, total)
    wanted = {round(number * (total - 1) / max(1, count - 1)) for number in range(count)}
    rows: list[dict[str, Any]] = []
    for page in range(-(-total // MOST_ROWS)):
        numbers = range(page * MOST_ROWS, (page + 1) * MOST_ROWS)
        if wanted.intersection(numbers):
            query = Query({"run": run}, ascending=True, page=page, size=MOST_ROWS)
            found = follower.index.page(query, None)["rows"]
            rows += [row for number, row in zip(numbers, found, strict=False) if number in wanted]
    return rows
