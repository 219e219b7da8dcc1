"""The sites that a chain's browser opens: our own pages, MiniWoB++ pages, or any address."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "pages"
PAGE_NAMES = tuple(sorted(path.stem for path in PAGES.glob("*.html")))
_OURS, _MINIWOB = "http://pages.test", "http://miniwob.test"


@dataclass(frozen=True)
class Site:
    """An address, the files served there, and the JavaScript that begins and judges the task. The expression `begin`
    evaluates to the instruction, `state` to `{done, score}` with a score from 0 to 1."""

    address: str
    state: str
    begin: str = "null"
    files: Path | None = None
    is_ours: bool = False
    """True for our own pages, which store nothing and link nowhere."""

    @property
    def origin(self) -> str:
        return "/".join(self.address.split("/")[:3])


def site_of(page: str | None, miniwob: str | None, url: str | None, check: str | None, seed: int) -> Site:
    """Return the site of a data row. Raises ValueError as `check_fields`, or if MiniWoB++ lacks the page."""
    check_fields(page, miniwob, url, check, seed)
    if page is not None:
        return Site(f"{_OURS}/{page}.html", "task.state", f"task.begin({seed:d})", PAGES, is_ours=True)
    if miniwob is not None:
        return _miniwob(miniwob, seed)
    assert url is not None
    return Site(url, f"{{done: false, score: +({check or 0})}}")


def check_fields(page: Any = None, miniwob: Any = None, url: Any = None, check: Any = None, seed: Any = 0) -> None:
    """Check a data row's fields without the files of MiniWoB++. Raises ValueError if it names no page, several pages or
    an unknown page, or a field has the wrong type."""
    if sum(name is not None for name in (page, miniwob, url)) != 1:
        raise ValueError("a row of screens has one of the fields page, miniwob and url")
    if check is not None and url is None:
        raise ValueError("check: pages of ours and of MiniWoB++ have their own; leave it out")
    if not isinstance(seed, int):
        raise ValueError(f"seed: got {seed!r}; give a whole number")
    if not isinstance(check, str | None):
        raise ValueError(f"check: got {check!r}; give JavaScript as a text")
    if page is not None and page not in PAGE_NAMES:
        raise ValueError(f"page: got {page!r}; there are {', '.join(PAGE_NAMES)}")
    if url is not None and (not isinstance(url, str) or not url.startswith(("http://", "https://"))):
        raise ValueError(f"url: got {url!r}; it begins with http:// or https://")


def _miniwob(name: str, seed: int) -> Site:
    found = importlib.util.find_spec("miniwob")  # not imported: it needs selenium
    if found is None or found.origin is None:
        raise ValueError("miniwob: its pages are not installed; pip install miniwob")
    files = Path(found.origin).parent / "html"
    names = sorted(path.stem for path in (files / "miniwob").glob("*.html"))
    if name not in names:
        raise ValueError(f"miniwob: got {name!r}; there are {', '.join(names)}")
    begin = (
        # disables the published pages' time limit, which is made for humans
        f"(Math.seedrandom({json.dumps(str(seed))}), core.EPISODE_MAX_TIME = 2147483647, core.startEpisodeReal(), "
        "document.getElementById('query').innerText)"
    )
    state = "{done: WOB_DONE_GLOBAL, score: Math.max(0, WOB_RAW_REWARD_GLOBAL)}"
    return Site(f"{_MINIWOB}/miniwob/{name}.html", state, begin, files)


def screens_tasks(
    pages: list[str] | None = None, miniwob: list[str] | None = None, seeds: int = 100, first_seed: int = 0
) -> list[dict[str, Any]]:
    """Return a data row per page and seed, with `seeds` seeds from `first_seed`. Default: all of our own pages."""
    named = [{"page": name} for name in (PAGE_NAMES if pages is None and miniwob is None else pages or ())]
    named += [{"miniwob": name} for name in miniwob or ()]
    return [{"question": "", **name, "seed": seed} for seed in range(first_seed, first_seed + seeds) for name in named]
