"""The viewer's views of time, rewards, stages and recipes, while they load, on a phone, and for runs of every age."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.groups.group_files import arrays_file, encode_group, read_groups
from agentfactory.rollout.trajectory import Activity, Group, Outcome, Stretch
from agentfactory.viewer.html_export import export
from agentfactory.viewer.runs.chain_index import Index, rows_of
from agentfactory.viewer.runs.follower import Follower
from agentfactory.viewer.runs.query import Query
from agentfactory.viewer.runs.recipe_difference import difference
from tests.saved_groups import old_line, write_groups
from tests.viewer.browsing import api, opened, run_id, viewing
from tests.viewer.viewer_runs import NASTY, called, chain, credit, many_chains, sampled_row, tokenizer
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.extended

STEPS = 20
RECIPE = {
    "name": "staged",
    "tools": ["hunt.py:Hunt"],
    "rollout": {"group_size": 4, "system_prompt": NASTY},
    "train": {"algorithm": "grpo", "learning_rate": 1e-5},
    "eval": {"data": None},
}
TIMELINE = [
    Stretch(Activity.WAIT, 0.0, 0.5, None, "hunt"),
    Stretch(Activity.SETUP, 0.0, 1.0),
    Stretch(Activity.MODEL, 1.0, 3.0, 0),
    # two calls at once, and one that waits for its start
    Stretch(Activity.TOOL, 3.0, 5.0, 0, "look"),
    Stretch(Activity.WAIT, 3.0, 4.0, 0, NASTY),
    Stretch(Activity.TOOL, 4.0, 6.0, 0, NASTY),
    Stretch(Activity.MODEL, 6.0, 9.0, 1),
    Stretch(Activity.REWARD, 9.0, 9.5),
]
LONG_NAME = "a_tool_with_a_name_that_no_phone_has_room_for_" * 4


def staged_run(folder: Path) -> RunFolder:
    """A supervised stage of many large steps, and one of RL with few small ones; every fourth chain gets a reward."""
    whole = RunFolder.create(folder, yaml.safe_dump({"stages": [{"name": "sft"}, {"name": "grpo"}]}))
    sft = RunFolder.create(folder / "sft", yaml.safe_dump({**RECIPE, "train": {"algorithm": "sft"}}))
    for step in range(1, 301):
        sft.log({"step": step, "loss": 600.0 / step, "tokens": 5000, "seconds/step": 0.5})
    grpo = RunFolder.create(folder / "grpo", yaml.safe_dump(RECIPE))
    ids = tokenizer()
    groups, credits = [], []
    for step in range(1, STEPS + 1):
        grpo.log({"step": step, "loss": -0.01, "reward": step / STEPS, "tokens": 50, "seconds/step": 2.0})
        members = [_chain(ids, step, member) for member in range(4)]
        group = Group(f"g{step}", {"question": "Where?"}, members, step - 1)
        groups.append(group)
        credits.append(json.dumps({**credit(group), "step": step}))
    write_groups(grpo.trajectories / "train.jsonl", groups)
    grpo.note_credit(credits)
    return whole


def _chain(ids: Any, step: int, member: int) -> Any:
    two = [*called(0, "look", {"at": "it"}, "a tower"), *called(1, NASTY, {NASTY: NASTY}, NASTY)]
    two[0]["tool_calls"] += two[2]["tool_calls"]
    said = [{"role": "user", "content": "Where?"}, two[0], two[1], two[3], {"role": "assistant", "content": "north"}]
    row = sampled_row([("Where?", False), ("look", True), ("a tower", False), ("north", True)], ids, ["1", "2"])
    reward = {0: 0.0, 1: 1.0, 2: step / STEPS, 3: None}[member]
    outcome = Outcome.COMPLETED if reward is not None else Outcome.TIMEOUT
    fields = {"reward": reward, "outcome": outcome, "seconds": 10.0, "timeline": TIMELINE}
    return chain(f"g{step}.{member}", said, [row], **fields)


def old_run(folder: Path) -> RunFolder:
    """What an older version has written: no times, no roles, no credit, another recipe."""
    recipe = {
        **RECIPE,
        "name": "old",
        "train": {"algorithm": "grpo", "learning_rate": "1e-5"},
        "eval": {"data": {"path": NASTY, "limit": None}},
    }
    recipe["rollout"] = {"group_size": 4, "system_prompt": f"{NASTY}\nand more"}
    run = many_chains(folder, 3, members=2)
    run.recipe.write_text(yaml.safe_dump(recipe))
    saved = run.trajectories / "train.jsonl"
    groups = [json.loads(old_line(group).replace("tool1", LONG_NAME)) for group in read_groups(saved)]
    for group in groups:
        for one in group["trajectories"]:
            for name in ("timeline", "malformed_turns", "stop_reason"):
                del one[name]
            for row in one["rows"]:
                del row["roles"], row["turn_ends"]
            one |= {"seconds": 8.0, "metrics": {**one["metrics"], "tool_seconds": 2.0}}
    saved.write_text("".join(json.dumps(group) + "\n" for group in groups))
    arrays_file(saved).unlink()
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("views")
    bare = RunFolder.create(folder / "bare", "name: bare\n")
    bare.log({"step": 1, "reward": 0.5})
    return [staged_run(folder / "staged").path, old_run(folder / "old").path, bare.path]


@pytest.fixture(scope="module")
def viewer(folders: list[Path]) -> Iterator[str]:
    with viewing(*folders) as url:
        wait_for(lambda: api(url, "/api/trajectories")["total"] == 4 * STEPS + 6)
        yield url


@contextmanager
def phone(browser: "Browser") -> "Iterator[Page]":
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    with opened(context) as page:
        yield page
    context.close()


def address(url: str, run: str, place: int = 0) -> str:
    return f"#/trajectory/{run_id(url, run)}/train.jsonl/0/{place}"


# ---- while it loads


def test_metrics_are_read_before_trajectories(tmp_path: Path) -> None:
    run = many_chains(tmp_path / "many", 20)
    follower = Follower([run.path])
    assert follower.read_some()
    (found,) = follower.runs
    assert (len(found.lines), follower.index.counts()) == (1, {})
    follower.read_all()
    assert follower.index.counts() == {found.id: 160}


# ---- stages


def test_supervised_stages_and_rl_are_never_on_one_axis(viewer: str, page: "Page") -> None:
    page.goto(viewer)

    def drawn(chart: str) -> list[dict[str, Any]]:
        plot = page.locator(f'[data-chart="{chart}"] .plot')
        plot.scroll_into_view_if_needed()
        plot.locator(".trace").first.wait_for(state="attached")
        return plot.evaluate("plot => plot.data.map(t => ({name: t.name, x: [...t.x], y: [...t.y]}))")

    (rl,) = drawn("loss")
    assert (rl["name"], rl["x"], set(rl["y"])) == ("staged/grpo", list(range(1, STEPS + 1)), {-0.01})
    section = page.locator("section.curves", has_text="Supervised fine-tuning")
    # runs are compared: what only prepares them is folded
    assert section.locator(".card").count() == 0
    names = [text.split()[0] for text in page.locator("#runs > .run").all_inner_texts()]
    assert names == ["staged/grpo", "old", "bare"]
    assert page.locator("#runs details:not([open]) summary").inner_text() == "SFT stages (1)"
    section.get_by_role("button", name="show").click()
    (supervised,) = drawn("loss (SFT)")
    assert (supervised["name"], supervised["x"][-1], supervised["y"][0]) == ("staged/sft", 300, 600.0)
    assert {card.get_attribute("data-chart") for card in section.locator(".card").all()} >= {"tokens (SFT)"}
    sft = run_id(viewer, "staged/sft")
    # it measures no parts of its steps, which would all be rest
    assert page.locator(f'[data-chart="time of {sft}"]').count() == 0


def test_an_evaluation_is_where_its_step_is_on_every_axis(tmp_path: Path, page: "Page") -> None:
    whole = staged_run(tmp_path / "staged").path
    evaluation = RunFolder.create(whole / "eval", "model: {path: '${here}/../grpo/checkpoints/step-000008'}\n")
    figures = {"reward": 0.5, "reward/low": 0.25, "reward/high": 0.75, "success": 0.5, "success/low": 0.4}
    evaluation.log({"step": 8, **{f"eval/sampled/{name}": value for name, value in figures.items()}})
    with viewing(whole) as url:
        wait_for(lambda: api(url, "/api/trajectories")["total"] == 4 * STEPS)
        page.goto(url)
        plot = page.locator('[data-chart="reward"] .plot')
        plot.locator(".errorbar").first.wait_for(state="attached")
        bars = "plot => plot.data.filter(t => t.error_y).map(t => [t.error_y.array, t.error_y.arrayminus, t.text])"
        assert plot.evaluate(bars) == [[[0.25], [0.25], [" (95 %: 0.25 to 0.75)"]]]
        made = api(url, "/api/charts")
        shown = [chart["key"] for part in [*made["sections"], {"charts": made["others"]}] for chart in part["charts"]]
        # one end alone is no interval
        assert [key for key in shown if "low" in key or "high" in key] == ["trajectory/success/low"]

        def place(by: str) -> float:
            page.get_by_label("horizontal axis").select_option(by)
            drawn = plot.evaluate("plot => plot.data.map(t => [t.name, [...t.x]])")
            (found,) = dict(drawn)["staged/eval, held-out, sampled"]
            return found

        assert place("step") == 8
        assert place("tokens") == 8 * 50
        assert place("hours") == pytest.approx(8 * 2 / 3600)


# ---- the time of a trajectory


def test_a_waterfall_shows_when_each_turn_and_call_ran(viewer: str, page: "Page") -> None:
    page.goto(viewer + address(viewer, "staged/grpo") + "?tab=time")
    rows = page.locator(".waterfall tbody tr")
    rows.first.wait_for()
    names = [row.locator("th").inner_text() for row in rows.all()]
    assert names == ["setup", "turn 1", "look", NASTY, "turn 2", "reward"]
    bars = page.locator(".bars").evaluate_all(
        "all => all.map(bars => [...bars.children].map(bar => [bar.className.split(' ')[1], "
        "parseFloat(bar.style.left), parseFloat(bar.style.width)]))"
    )
    assert bars == [
        [["setup", 0, 10], ["wait", 0, 5]],
        [["model", 10, 20]],
        [["tool", 30, 20]],
        [["wait", 30, 10], ["tool", 40, 20]],
        [["model", 60, 30]],
        [["reward", 90, 5]],
    ]
    # of several things at once, one counts
    told = page.locator(".share-list > div").all_inner_texts()
    assert [" ".join(one.split()) for one in told] == [
        *("setup 0.5 s 5 %", "waiting 0.5 s 5 %", "model 5 s 50 %"),
        *("tools 3 s 30 %", "reward 0.5 s 5 %", "rest 0.5 s 5 %"),
    ]
    page.locator(".bars .stretch.tool").last.hover()
    assert NASTY in page.locator("#tip").inner_text()
    # by keyboard from a turn to what was said in it
    page.get_by_role("button", name="turn 2").focus()
    page.keyboard.press("Enter")
    focused = page.evaluate("document.activeElement.textContent")
    assert focused.startswith("assistant turn 2")
    assert "tab=conversation" in page.url
    assert page.evaluate("window.broken") is None


# ---- the rewards of a step


def bins_of(page: "Page") -> dict[str, int]:
    labels = page.locator("#rewards button.bin").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    return {label.partition(":")[0]: int(label.partition(": ")[2].split()[0]) for label in labels}


def test_a_histogram_shows_the_rewards_of_a_step(viewer: str, page: "Page") -> None:
    run = run_id(viewer, "staged/grpo")
    page.goto(f"{viewer}#/trajectories?run={run}&step_min=5&step_max=5")
    head = page.locator(".rewards-head")
    head.wait_for()
    page.wait_for_function("() => document.querySelectorAll('#rewards button.bin').length === 3")
    assert head.locator(".unit").inner_text() == "step 5"
    assert head.locator(".note").inner_text() == "3 chains, mean 0.4167, 1 without a reward"
    assert bins_of(page) == {"reward 0 to below 0.05": 1, "reward 0.25 to below 0.3": 1, "reward 0.95 to 1": 1}
    # step by step, by keyboard too
    after = page.get_by_role("button", name="step after")
    after.focus()
    page.keyboard.press("Enter")
    page.locator(".rewards-head .unit", has_text="step 6").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "step after"
    assert "step_min=6&step_max=6" in page.url
    assert page.get_by_label("step, lowest").input_value() == "6"
    page.get_by_role("button", name="last step").click()
    page.locator(".rewards-head .unit", has_text=f"step {STEPS}").wait_for()
    assert after.is_disabled()
    page.wait_for_function("() => document.querySelectorAll('#rewards button.bin').length === 2")
    assert bins_of(page) == {"reward 0 to below 0.05": 1, "reward 0.95 to 1": 2}
    # a bar leads to its chains
    page.locator("#rewards button.bin").last.click()
    page.wait_for_function("() => document.querySelector('.count')?.textContent === '1–2 of 2 trajectories'")
    page.get_by_role("button", name="all steps").click()
    page.get_by_role("button", name="all rewards").click()
    page.wait_for_function(
        "text => document.querySelector('.count')?.textContent === text", arg=f"1–50 of {4 * STEPS} trajectories"
    )
    wait_for(lambda: sum(bins_of(page).values()) == 3 * STEPS)


def index_of(rewards: list[float | None]) -> Index:
    index = Index()
    group = Group("g", {}, [chain(f"c{number}", [], [], reward=reward) for number, reward in enumerate(rewards)])
    index.add(rows_of("run", "train.jsonl", 0, encode_group(group).line))
    return index


@pytest.mark.parametrize(
    ("rewards", "width", "bins"),
    [
        ([0.0, 1.0, 1.0, None], 0.05, [(0.0, 1), (0.95, 2)]),
        ([0.5, 0.5], 0.0, [(0.5, 2)]),
        ([math.inf, -math.inf, math.nan, 2.0], 0.0, [(2.0, 1)]),
        ([None], 0.0, []),
    ],
)
def test_rewards_fall_into_round_bins(rewards: list[float | None], width: float, bins: list[tuple[float, int]]) -> None:
    found = index_of(rewards).rewards(Query(), None)
    assert found["width"] == pytest.approx(width)
    assert [(bin_["from"], bin_["chains"]) for bin_ in found["bins"]] == [(pytest.approx(a), b) for a, b in bins]
    assert (found["chains"], found["scored"]) == (len(rewards), sum(count for _, count in bins))


def test_the_histogram_and_times_of_an_exported_file_are_those_of_the_server(
    folders: list[Path], viewer: str, page: "Page", tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    export(folders, file)
    page.goto(file.as_uri())
    page.wait_for_selector("#runs .run")
    grpo = run_id(viewer, "staged/grpo")
    of_one_run = (f"run={grpo}", f"run={grpo}&step_min=5&step_max=5")
    for query in ("", *of_one_run, "version_max=3", "outcome=timeout", "reward_min=0.5"):
        asked = api(viewer, f"/api/rewards?{query}")
        found = page.evaluate("query => source.rewards(Object.fromEntries(new URLSearchParams(query)))", query)
        assert [bin_["chains"] for bin_ in found["bins"]] == [bin_["chains"] for bin_ in asked["bins"]], query
        for name in ("by", "steps", "chains", "scored"):
            assert found[name] == asked[name], query
        assert (found["mean"] or 0) == pytest.approx(asked["mean"] or 0)
        assert [bin_["from"] for bin_ in found["bins"]] == pytest.approx([bin_["from"] for bin_ in asked["bins"]])
    # recipes are not in it
    assert page.get_by_role("link", name="Recipes").count() == 0
    page.goto("about:blank")
    page.goto(file.as_uri() + address(viewer, "staged/grpo") + "?tab=time")
    page.locator(".bars .stretch").first.wait_for()
    assert page.locator(".bars .stretch").count() == len(TIMELINE)


# ---- recipes


def test_recipes_are_compared_setting_by_setting() -> None:
    one = "{name: a, train: {lr: 1.0e-5, steps: 5}, tools: [], rewards: [{reward: x, weight: 1}], eval: null}"
    other = (
        "{name: a, train: {lr: '1e-5', steps: 5.0, new: true}, rewards: [{reward: x, weight: 2}, {reward: y}], "
        "eval: {data: {path: p, limit: null}}}"
    )
    told = difference(one, other)
    rows = {row["key"]: row["values"] for row in told["rows"]}
    assert rows == {
        "train.lr": ["1e-05", '"1e-5"'],
        "train.steps": ["5", "5.0"],
        "train.new": [None, "true"],
        "tools": ["[]", None],
        "rewards.0.weight": ["1", "2"],
        "rewards.1": [None, "reward: y"],
        "eval": ["null", "data:\n  path: p\n  limit: null"],
    }
    assert told["same"] == 2
    assert difference("a: 1", "a: 1") == {"rows": [], "same": 1}
    assert difference("a: [", "a: 1")["rows"] == [{"key": "", "values": ["a: [", "a: 1"]}]
    assert difference("", "a: 1")["rows"][0]["values"] == ["null", "a: 1"]


def test_the_difference_of_two_recipes_is_shown_side_by_side(viewer: str, page: "Page") -> None:
    page.goto(viewer)
    page.get_by_role("link", name="Recipes").click()
    page.get_by_label("run", exact=True).select_option(run_id(viewer, "staged/grpo"))
    page.get_by_label("other run").select_option(run_id(viewer, "old"))
    page.locator("thead", has_text="old").wait_for()
    rows = page.locator(".difference tbody tr")

    def shown() -> dict[str, list[str]]:
        return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows.all()}

    assert shown() == {
        "eval.data": ["null", f"path: {NASTY}"],
        "name": ["staged", "old"],
        "rollout.system_prompt": [NASTY, f"{NASTY}\nand more"],
        "train.learning_rate": ["1e-05", '"1e-5"'],
    }
    assert page.locator("main script, main b, main [onerror]").count() == 0
    # from a run's own page
    page.goto(f"{viewer}#/run/{run_id(viewer, 'old')}")
    page.get_by_role("link", name="differences").click()
    page.locator(".difference thead", has_text="old").wait_for()
    assert page.evaluate("window.broken") is None


# ---- a phone


def test_nothing_is_wider_than_a_phone(viewer: str, browser: "Browser") -> None:
    grpo, old = (run_id(viewer, label) for label in ("staged/grpo", "old"))
    with phone(browser) as page:
        pages = {
            "#/curves": '[data-chart="reward"] .trace',
            "#/trajectories": "tbody tr",
            "#/trajectories?view=groups": "tbody tr",
            f"#/trajectories?run={grpo}&step_min=5&step_max=5": "#rewards .bin",
            **{
                f"{address(viewer, run)}?tab={tab}": "#reward"
                for run in ("staged/grpo", "old")
                for tab in ("conversation", "tokens", "time", "task")
            },
            f"#/run/{grpo}": ".panel pre",
            f"#/recipes/{grpo}/{old}": ".difference td",
        }
        for place, there in pages.items():
            page.goto("about:blank")
            page.goto(viewer + place)
            page.locator(there).first.wait_for(state="attached")
            wide = page.evaluate("""() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.plot')
                && e.getBoundingClientRect().right > 391).map(e => e.tagName + '.' + e.className)""")
            assert (page.evaluate("document.documentElement.scrollWidth"), wide) == (390, []), place
