"""The viewer in a real browser: what it draws, lists, colours and follows, and what it never runs or tells others."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.groups.group_files import CREDIT_FILE
from agentfactory.rollout.trajectory import Group
from agentfactory.viewer.charts import charts
from tests.http_pages import serving
from tests.saved_groups import old_line
from tests.viewer.browsing import api, ask, command, opened, run_id, trajectory, view, viewing
from tests.viewer.viewer_runs import (
    BEST,
    IMAGES,
    LONG_CHAIN,
    NASTY,
    chain,
    credit,
    credited,
    image,
    many_chains,
    show_run,
    tokenizer,
)
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, quickstart_run: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [quickstart_run, show_run(folder).path, many_chains(folder / "many", 12).path]


@pytest.fixture(scope="module")
def viewer(folders: list[Path]) -> Iterator[str]:
    """One viewer for most tests, which has read everything."""
    saved = (file for folder in folders for file in folder.rglob("trajectories/**/*.jsonl"))
    held = sum(file.stat().st_size for file in saved if file.name != CREDIT_FILE)
    with command(*folders) as url:
        wait_for(lambda: api(url, "/api/state")["progress"] == {"read": held, "total": held}, 60)
        yield url


@pytest.fixture(scope="module")
def exported(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same runs as one file, and what the command said."""
    file = tmp_path_factory.mktemp("exported") / "page.html"
    arguments = [sys.executable, "-m", "agentfactory", "view", *map(str, folders), "--export", str(file)]
    before = {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    # nothing is written into a run's folder
    assert before == {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")}
    return file, done.stdout


@pytest.fixture(scope="module")
def file_page(context: "BrowserContext", exported: tuple[Path, str]) -> "Iterator[tuple[Page, list[str]]]":
    """The exported file, and the addresses that it has asked for."""
    with opened(context) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(exported[0].as_uri())
        yield page, requests


def open_chain(page: "Page", url: str, name: str, options: str = "") -> None:
    found = api(url, f"/api/trajectories?text={quote(name)}&run={run_id(url, 'show<b>')}")["rows"]
    page.goto("about:blank")
    page.goto(url + trajectory(next(row for row in found if row["chain"] == name), options))
    page.wait_for_selector(".message, .tokens span")


def traces(page: "Page", chart: str) -> list[dict[str, Any]]:
    """What a chart has drawn: per trace its name and points, and the number of drawn paths."""
    plot = page.locator(f'[data-chart="{chart}"] .plot')
    plot.scroll_into_view_if_needed()
    plot.locator(".scatterlayer .trace path").first.wait_for(state="attached")
    return plot.evaluate("plot => plot.data.map(t => ({name: t.name, x: [...t.x], y: [...t.y], mode: t.mode}))")


# ---- curves


@pytest.mark.extended
@pytest.mark.processes
def test_curves_of_several_runs_are_drawn_in_one_plot(viewer: str, page: "Page", quickstart_run: Path) -> None:
    page.goto(viewer)
    drawn = {trace["name"]: trace for trace in traces(page, "reward")}
    lines = list(RunFolder(quickstart_run / "grpo").read_metrics())
    trained = [(line["step"], line["reward"]) for line in lines if "reward" in line]
    held_out = [(line["step"], line["eval/greedy/reward"]) for line in lines if "eval/greedy/reward" in line]
    quickstart = f"{quickstart_run.name}/grpo"
    assert min(len(trained), len(held_out)) >= 2
    for name, points in [(quickstart, trained), (f"{quickstart}, held-out, greedy", held_out)]:
        assert list(zip(drawn[name]["x"], drawn[name]["y"], strict=True)) == points
    # a name from outside is text for the plots too
    shown = drawn["show&lt;b>"]
    assert shown["x"] == list(range(1, 41))
    assert shown["y"] == [step / 40 for step in range(1, 41)]
    # a figure that is not a number is left out, and nothing else is
    loss = next(trace for trace in traces(page, "loss") if trace["name"] == "show&lt;b>")
    assert loss["x"] == [step for step in range(1, 41) if step != 7]
    latency = next(trace for trace in traces(page, "latency of look") if trace["name"] == "show&lt;b>")
    assert set(latency["y"]) == {0.25}
    shown_run = run_id(viewer, "show<b>")
    spent = {trace["name"]: trace["y"] for trace in traces(page, f"time of {shown_run}")}
    assert spent == {"waiting for chains": [1.0] * 40, "update": [0.75] * 40, "rest": [0.25] * 40}


def test_every_metric_of_a_run_has_a_chart_with_its_meaning(quickstart_run: Path) -> None:
    names = {name for line in RunFolder(quickstart_run / "grpo").read_metrics() for name in line} - {"step"}
    made = charts(names)
    shown = [chart for section in made["sections"] for chart in section["charts"]]
    assert {line["name"] for chart in [*shown, *made["others"]] for line in chart["lines"]} == names
    assert [chart["key"] for chart in made["others"]] == ["chains", "version"]
    assert [chart["key"] for chart in shown if not chart["meaning"]] == []
    # what rollout itself measures of chains is explained, and nothing of it taken for the task's own
    assert "Task metrics" not in [section["title"] for section in made["sections"]]


# ---- list


def test_the_list_is_filtered_sorted_and_paged_by_the_server(viewer: str, page: "Page") -> None:
    page.goto(f"{viewer}#/trajectories")
    count, rows = page.locator(".count"), page.locator("table.list tbody tr")
    count.wait_for()
    page.get_by_label("all runs").select_option(run_id(viewer, "many"))

    def counted(text: str) -> None:
        page.wait_for_function("text => document.querySelector('.count')?.textContent === text", arg=text)

    def rewards() -> list[float]:
        return [float(row.split("\t")[6]) for row in rows.all_inner_texts()]

    counted("1–50 of 96 trajectories")
    assert rows.count() == 50
    page.get_by_label("any tool").select_option("tool7")
    counted("1–12 of 12 trajectories")
    assert {row.split("\t")[0].rpartition(".")[2] for row in rows.all_inner_texts()} == {"7"}
    page.get_by_label("reward, highest").fill("0.5")
    counted("no trajectories")
    assert page.locator("table .empty").inner_text() == "Nothing matches these filters. Show all"
    page.get_by_label("any tool").select_option("")
    counted("1–50 of 60 trajectories")
    page.get_by_role("button", name="next").click()
    counted("51–60 of 60 trajectories")
    page.locator("thead").get_by_role("button", name="reward").click()
    counted("1–50 of 60 trajectories")
    assert rewards() == [0.5] * 12 + [0.375] * 12 + [0.25] * 12 + [0.125] * 12 + [0.0] * 2
    # what is asked for stands in the address
    page.reload()
    counted("1–50 of 60 trajectories")
    page.get_by_label("text").fill("WORD 00011")
    counted("1–5 of 5 trajectories")
    page.get_by_label("trajectories").select_option("groups")
    counted("1–1 of 1 groups")
    assert rows.inner_text().split("\t")[0] == "g-00011"
    page.goto(f"{viewer}#/trajectories?outcome=timeout")
    counted("1–1 of 1 trajectories")
    page.get_by_label("any outcome").select_option("")
    page.get_by_label("any success").select_option("yes")
    found = api(viewer, "/api/trajectories")["facets"]["success"]
    counted(f"1–50 of {found['yes']} trajectories")
    assert {row.split("\t")[7] for row in rows.all_inner_texts()} == {"1"}


def test_text_is_found_wherever_it_was_said_and_however_it_is_written(viewer: str) -> None:
    def found(text: str) -> set[str]:
        answer = api(viewer, f"/api/trajectories?text={quote(text)}&source=train")
        return {row["chain"] for row in answer["rows"]}

    assert found("the TOWER \N{SNOWMAN}") == {"c0"}
    assert found("onerror='window.broken = 1'><script>") == {NASTY}
    assert found('"direction": "nor') >= {"c0"}
    assert found("look(x)") == {LONG_CHAIN}
    assert found("g-00010.5") == {"g-00010.5"}
    # streams of tokens, and pictures, are no text
    assert found("0.123456789") == set()
    assert found("iVBORw0KGgo") == set()


# ---- a trajectory


def test_a_chain_of_fifty_turns_has_its_images_in_their_order(viewer: str, page: "Page") -> None:
    row = api(viewer, f"/api/trajectories?text={LONG_CHAIN}&run={run_id(viewer, 'show<b>')}")["rows"][0]
    assert row["preview"] == "Look around.\nYou are on a hill.", "the question, and what reset said"
    page.goto(viewer + trajectory(row))
    page.wait_for_function("turns => document.querySelectorAll('.message.assistant').length === turns", arg=IMAGES)
    last = page.locator(".message img").nth(IMAGES - 1)
    last.scroll_into_view_if_needed()
    wait_for(lambda: last.evaluate("image => image.complete && image.naturalWidth"))
    data = page.request.get(f"{viewer}{last.get_attribute('src')}", headers={"Sec-Fetch-Site": "same-origin"})
    assert (data.headers["content-type"], data.body()) == ("image/png", image(IMAGES - 1))
    code = page.locator(".message.assistant").nth(7).locator(".call pre")
    assert code.inner_text() == "x = 7\nlook(x)"
    # a long row is written piece by piece
    page.get_by_role("tab", name="tokens").click()
    length = len(tokenizer().encode("look " * 1500).ids) + len(tokenizer().encode("north " * 1500).ids)
    page.wait_for_function("count => document.querySelectorAll('.tokens span').length === count", arg=length)


def test_a_trajectory_shows_what_it_earned_and_how_it_ended(viewer: str, page: "Page") -> None:
    open_chain(page, viewer, "c0")
    assert page.locator("#reward dl").inner_text().split("\n") == [
        *("reward", "1.25", "success", "1", "exact, before its weight", "0.75", "brief, before its weight", "0.5"),
        *("penalty, taken off", "0.25", "turn 1", "0.5", "turn 2", "-0.5"),
    ]
    ending = page.locator("#ending dl").inner_text()
    assert ending.startswith("outcome\ncompleted\nstop reason\nanswer\nlimit calls reached\n1\nturns\n2\n")
    assert "weights 3, trained in step 4" in page.locator(".headline").inner_text()
    assert page.locator(".member").all_inner_texts() == ["1.25", "-1"]
    # without pictures there is no film
    assert page.locator(".tabs button").all_inner_texts() == ["conversation", "tokens", "time", "task"]
    heads = page.locator(".message.assistant h4").all_inner_texts()
    assert heads == ["assistant turn 1 reward 0.5", "assistant turn 2 reward -0.5"]
    # the runs look as they do on every other page
    page.locator(".run", has_text="step 40").wait_for()
    page.locator(".run .note", has_text=f"best checkpoint: step 30, {BEST} 0.75").wait_for()
    folders = list(dict.fromkeys(run["folder"] for run in page.evaluate("lastState.runs")))
    colours = page.evaluate("lastState.runs.map((run) => [run.folder, COLOURS.indexOf(colourOf(run.id))])")
    assert all(colour == folders.index(folder) for folder, colour in colours)
    page.locator(".member", has_text="-1").click()
    page.wait_for_function("() => document.querySelector('h1')?.textContent?.startsWith('c1')")
    assert page.locator("#ending dl").inner_text().startswith("outcome\ntool_limit\nstop reason\ncost\n")


def background(colour: tuple[int, int, int], share: float) -> tuple[float, ...]:
    return (*colour, round(0.6 * share, 3)) if share > 0 else (0, 0, 0, 0)


def test_token_texts_and_colours_are_those_of_the_data(viewer: str, page: "Page") -> None:
    group = credited(tokenizer())
    rows = group.trajectories[0].rows
    saved = credit(group)["chains"]["c0"]
    streams = {
        name: {
            (entry["row"], position): value
            for entry in saved
            for position, value in zip(entry["targets"], entry[name], strict=True)
            if value is not None
        }
        for name in ("advantage", "proximal")
    }
    places = [(number, position) for number, row in enumerate(rows) for position in range(len(row.token_ids))]
    # saved in float32
    behaviour = {(n, p): float(np.float32(rows[n].logprobs[p])) for n, p in streams["proximal"]}
    difference = {place: streams["proximal"][place] - behaviour[place] for place in behaviour}

    def signed(values: dict[tuple[int, int], float]) -> dict[tuple[int, int], tuple[float, ...]]:
        most, blue, orange = max(map(abs, values.values())), (46, 125, 216), (219, 98, 35)
        return {place: background(blue if value > 0 else orange, abs(value) / most) for place, value in values.items()}

    expected = {
        "mask": {place: background((63, 116, 209), 0.5) for place in behaviour},
        "advantage": signed(streams["advantage"]),
        "difference": signed(difference),
        "logprob": {place: background((198, 72, 120), 1 - math.exp(value)) for place, value in behaviour.items()},
    }
    open_chain(page, viewer, "c0", "?tab=tokens")
    for colouring, colours in expected.items():
        page.get_by_label("colour tokens by").select_option(colouring)
        shown = page.locator(".tokens span").evaluate_all(
            "spans => spans.map(span => getComputedStyle(span).backgroundColor.match(/[0-9.]+/g).map(Number))"
        )
        assert len(shown) == len(places)
        for place, colour in zip(places, shown, strict=True):
            wanted = colours.get(place, (0, 0, 0, 0))
            got = tuple(colour) if len(colour) == 4 else (*colour, 1.0)
            assert got == pytest.approx(wanted, abs=0.006), (colouring, place)
    # each character stands once, though a sign beyond ASCII is several tokens
    texts = ["".join(row.locator("span").all_text_contents()) for row in page.locator(".tokens").all()]
    plain = [text.replace("⏎", "").replace("·", "") for text in texts]
    assert plain == [tokenizer().decode(row.token_ids) for row in rows]
    sampled = page.locator(".tokens").nth(1).locator("span.sampled")
    sampled.nth(1).hover()
    told = page.locator("#tip").inner_text().split("\n")
    position = saved[1]["targets"][1]
    assert told[told.index("id") + 1] == str(rows[1].token_ids[position])
    assert float(told[told.index("advantage") + 1].replace("−", "-")) == pytest.approx(
        saved[1]["advantage"][1], rel=1e-3
    )
    assert told[told.index("weight version") + 1] == "3"


# ---- following a run


def test_a_live_run_is_followed_without_reloading(page: "Page", tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "live", "name: live\n")
    saved = run.trajectories / "train.jsonl"
    line = old_line(Group("g0", {}, [chain("g0.0", [{"role": "user", "content": "hello"}], [])])) + "\n"

    def drawn(rewards: list[float]) -> None:
        found = """rewards => JSON.stringify(document.querySelector('[data-chart="reward"] .plot')?.data?.[0]?.y)
            === JSON.stringify(rewards)"""
        page.wait_for_function(found, arg=rewards)

    with viewing(run.path) as url:
        page.goto(url)
        page.evaluate("window.same = true")
        page.get_by_text("Nothing is measured yet.").wait_for()
        page.get_by_role("link", name="Trajectories").click()
        page.get_by_text("No trajectory is saved yet.").wait_for()
        page.get_by_role("link", name="Curves").click()
        run.log({"step": 1, "reward": 0.5})
        drawn([0.5])
        with run.metrics.open("a") as metrics, saved.open("a") as groups:
            # whole lines, and the beginnings of others, which the next look finds
            metrics.write('{"step": 2, "reward": 1.0}\n{"step": 3, "rew')
            groups.write(line + line.replace("g0", "g1")[:100])
            metrics.flush()
            groups.flush()
            drawn([0.5, 1.0])
            page.get_by_role("link", name="Trajectories").click()
            page.locator("tbody tr", has_text="g0.0").wait_for()
            # what may never get its end is not waited for
            page.locator("#status", has_text="live").wait_for()
            assert api(url, "/api/state")["progress"] == {"read": len(line), "total": len(line)}
            assert page.locator("tbody tr").count() == 1
            assert page.locator("#problems").is_hidden()
            metrics.write('ard": 0.75, "entropy": 2.0}\n')
            groups.write(line.replace("g0", "g1")[100:])
        page.locator("tbody tr", has_text="g1.0").wait_for()
        page.get_by_role("link", name="Curves").click()
        drawn([0.5, 1.0, 0.75])
        page.wait_for_selector('[data-chart="entropy"]')
        # a run that goes on from a checkpoint has cut its files first
        run.cut({})
        run.log({"step": 1, "reward": 0.125})
        with saved.open("a") as groups:
            groups.write(line.replace("g0", "g2").replace("hello", "a longer text than before"))
        drawn([0.125])
        page.get_by_role("link", name="Trajectories").click()
        page.locator("tbody tr", has_text="g2.0").wait_for()
        assert page.locator("tbody tr").count() == 1
        run.write_summary({"status": "completed"})
        page.locator(".run", has_text="completed").wait_for()
        assert page.evaluate("window.same")


# ---- what is never run, and never told to others


def test_html_in_what_tools_say_is_shown_as_text_and_never_run(viewer: str, page: "Page") -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    open_chain(page, viewer, NASTY)
    assert page.locator("h1").inner_text().startswith(NASTY)
    assert page.locator(".message.tool .text").inner_text() == NASTY
    assert page.locator(".message.tool h4").inner_text() == f"tool: {NASTY}"
    assert page.locator(".call-name").inner_text() == NASTY
    assert NASTY in page.locator("#ending").inner_text()
    for tab in ("tokens", "task", "conversation"):
        page.get_by_role("tab", name=tab).click()
    page.get_by_role("tab", name="tokens").click()
    page.get_by_label("colour tokens by").select_option("version")
    page.locator(".tokens span.sampled").first.hover()
    assert NASTY in page.locator("#tip").inner_text()
    page.get_by_label("colour tokens by").select_option("advantage")
    assert "credit.jsonl does not fit this trajectory" in page.locator(".missing").inner_text()
    page.goto(f"{viewer}#/trajectories?outcome=timeout")
    page.locator("tbody tr", has_text=NASTY).wait_for()
    # a line that is no group is told, and the others of its file are shown
    problem = page.locator("#problems").inner_text()
    assert problem.startswith("show<b>: trajectories/odd.jsonl, byte 0: not a saved group")
    assert len(api(viewer, "/api/trajectories?source=odd")["rows"]) == 1
    page.goto(f"{viewer}#/curves")
    page.get_by_label("find or add a metric").fill("window.broken")
    page.locator("h3", has_text="<script>window.broken").hover()
    page.wait_for_selector(".js-plotly-plot .trace", state="attached")
    page.mouse.move(700, 300)
    time.sleep(0.3)
    assert page.locator("main script, main b, #runs b, main [onerror]").count() == 0
    assert page.evaluate("window.broken") is None
    # were an element to slip in, the browser would not run it either
    page.evaluate("text => { document.body.insertAdjacentHTML('beforeend', text); }", NASTY)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.text = 'window.broken = 2'; document.body.append(s); }"
    )
    time.sleep(0.3)
    assert page.evaluate("window.broken") is None
    assert dialogs == []


ELSEWHERE = """<iframe src="VIEWER"></iframe><img id="image" src="VIEWERapi/state">
<script src="VIEWERapi/state"></script><script src="VIEWERelements.js"></script>
<script>window.asked = Promise.all(['cors', 'no-cors'].map(mode =>
    fetch('VIEWERapi/state', {mode}).then(r => r.text()).catch(() => 'blocked')));</script>"""
"""A page of another origin, which asks the viewer in every way that a page can."""


def test_other_origins_get_nothing(viewer: str, page: "Page") -> None:
    elsewhere = ELSEWHERE.replace("VIEWER", viewer).encode()
    answers: list[tuple[str, int]] = []
    page.on("response", lambda got: got.url.startswith(viewer) and answers.append((got.url, got.status)))
    with serving(lambda _: (200, {"Content-Type": "text/html"}, elsewhere)) as other:
        page.goto(other)
        got = page.evaluate("window.asked")
    assert set(got) <= {"blocked", ""}
    assert page.evaluate("typeof make") == "undefined"
    assert page.frames[1].evaluate("() => document.body.innerText").find("AgentFactory") < 0
    assert answers
    assert {status for _, status in answers} == {403}
    # a name that is pointed at this machine
    rebound = viewer.replace("127.0.0.1", "rebound.test")
    assert page.goto(f"{rebound}api/state").status == 403
    assert page.goto(f"{viewer}api/state").status == 200


def test_requests_are_refused_by_their_headers_and_paths(viewer: str) -> None:
    host = urlsplit(viewer).netloc
    port = host.partition(":")[2]
    assert ask(viewer, "/api/state", Host=host)[0] == 200
    assert ask(viewer, "/api/state", Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
    for headers in (
        {"Host": "rebound.test"},
        {"Host": f"127.0.0.1.rebound.test:{port}"},
        {"Host": "127.0.0.1"},
        {"Host": host, "Origin": "http://rebound.test"},
        {"Host": host, "Origin": "null"},
        {"Host": host, "Origin": f"http://127.0.0.1:{int(port) + 1}"},
        {"Host": host, "Sec_Fetch_Site": "cross-site"},
        {"Host": host, "Sec_Fetch_Site": "same-site"},
    ):
        for path in ("/", "/api/state", "/plotly.js"):
            status, body = ask(viewer, path, **headers)
            assert status == 403, headers
            assert len(body) < 100
    run = run_id(viewer, "show<b>")
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page/../../setup.py", "/app.py"):
        assert ask(viewer, path)[0] == 404
    for file in ("../recipe.yaml", "/etc/passwd", "credit.jsonl", "%2e%2e/metrics.jsonl", "eval/../train.jsonl"):
        assert ask(viewer, f"/api/trajectory?run={run}&file={file}&byte=0&place=0")[0] == 404
    train = f"/api/trajectory?run={run}&file=train.jsonl"
    assert ask(viewer, f"{train}&byte=0&place=0")[0] == 200
    for parameters, status in {"byte=1&place=0": 404, "byte=0&place=9": 404, "byte=-1&place=0": 400}.items():
        assert ask(viewer, f"{train}&{parameters}")[0] == status
    for far in ("page=inf", "page=1e300", "page=-inf", "size=inf", "size=-1e300", "view=groups&page=inf"):
        assert ask(viewer, f"/api/trajectories?{far}")[0] == 200, far
    for wrong in ("sort=id;drop", "reward_min=x", "version_max=nan"):
        status, body = ask(viewer, f"/api/trajectories?{wrong}")
        assert status == 400
        assert wrong.partition("=")[0] in json.loads(body)["error"]
    # loopback only
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{int(port):04X}" in listening
    assert f"00000000:{int(port):04X}" not in listening


# ---- the exported file, and errors


@pytest.mark.extended
def test_an_exported_file(file_page: "tuple[Page, list[str]]", exported: tuple[Path, str], folders: list[Path]) -> None:
    page, requests = file_page
    file, said = exported
    held, total = re.search(r"(\d+) of (\d+) trajectories", said).groups()
    assert int(held) == 200 < int(total)
    shown = next(trace for trace in traces(page, "reward") if trace["name"] == "show&lt;b>")
    assert shown["y"] == [step / 40 for step in range(1, 41)]
    page.get_by_role("link", name="Trajectories").click()
    count = page.locator(".count")
    count.wait_for()
    assert count.inner_text() == (f"1–50 of {held} trajectories; this file holds {held} of {int(total):,} trajectories")
    page.get_by_label("text").fill("the TOWER")
    page.locator("tbody tr", has_text="c0").wait_for()
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    page.locator("tbody a").click()
    page.get_by_role("tab", name="tokens").click()
    page.get_by_label("colour tokens by").select_option("advantage")
    assert page.locator(".tokens span[style*=rgba]").count() > 3
    page.get_by_role("link", name="Trajectories").click()
    page.get_by_label("text").fill("look(x)")
    page.locator("tbody tr", has_text=LONG_CHAIN).click()
    page.wait_for_function("() => document.querySelector('.message img')?.naturalWidth === 192")
    page.get_by_role("link", name="Trajectories").click()
    page.get_by_label("any outcome").select_option("timeout")
    page.locator("tbody a", has_text=NASTY).click()
    page.wait_for_selector(".message.tool")
    assert page.locator(".message.tool .text").inner_text() == NASTY
    assert page.evaluate("window.broken") is None
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob"}
    assert str(folders[1].parent) not in file.read_text(encoding="utf-8")


@pytest.mark.extended
def test_filters_of_an_exported_file_are_those_of_the_server(file_page: "tuple[Page, list[str]]", viewer: str) -> None:
    queries = ["", "sort=reward", "sort=reward&ascending=1&page=1", "tool=tool3", "version_max=0&source=train"]
    queries += ["reward_min=0.25&reward_max=0.5&sort=tokens", "text=WORD 00007", "group=g-00003", "outcome=timeout"]
    queries += ["view=groups", "view=groups&sort=reward&reward_min=0.5", "success=yes", "success=no&outcome=completed"]
    page, _ = file_page
    page.wait_for_selector("#runs .run")
    # of these two runs the file holds every trajectory
    for run in ("show<b>", "many"):
        for query in queries:
            query = f"run={run_id(viewer, run)}&{query}"
            asked = api(viewer, f"/api/trajectories?{query.replace(' ', '%20')}")
            found = page.evaluate("query => source.list(Object.fromEntries(new URLSearchParams(query)))", query)
            keys = ["file", "byte", "group_id", "reward", "success", "turns", "calls"]
            of_groups, of_chains = ["chains", "lowest", "highest", "unscored"], ["place", "tools", "errors"]
            keys += of_groups if "view=groups" in query else of_chains
            assert found["total"] == asked["total"], query
            for mine, theirs in zip(found["rows"], asked["rows"], strict=True):
                assert [mine[key] for key in keys] == [theirs[key] for key in keys], query


def test_errors_are_lines_that_say_what_to_do(tmp_path: Path, viewer: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "runs" / "mine", "name: mine\n")
    port = str(urlsplit(viewer).port)
    for arguments, said in {
        (str(tmp_path / "none"),): "no such folder; fix: name the folder of a run",
        (str(run.path.parent),): f"has no recipe.yaml; fix: name a run in it, such as {run.path}",
        (str(run.path), "--port", port): f"--port {port}: Address already in use; fix: --port 0 takes a free one",
        (str(run.path), "--export", str(tmp_path / "no" / "file.html")): "is not a folder; fix: create it first",
    }.items():
        assert view(arguments) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        assert said in told
    # a run that has just begun can be looked at
    assert view((str(run.path), "--export", str(tmp_path / "page.html"))) == 0
    assert "page.html: 1 run, 0 of 0 trajectories" in capsys.readouterr().out
