"""`python -m benchmarks.viewer_pictures QUICKSTART OTHER`: takes the pictures of docs/viewer.md, of two such runs.
Without them, that of a film, of a run that it makes."""

import asyncio
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.viewer.browsing import api, trajectory, viewing, when_read
from tests.viewer.conftest import CHROMIUM
from tests.viewer.screen_runs import screen_run

DOCS = Path(__file__).parents[1] / "docs"
PHONE = (390, 740)
GAP = 16


def picture(page: Page, url: str, place: str, there: str) -> Image.Image:
    """What the page shows at a place, when it is there: all tokens of a chain, of other pages what fits the window."""
    page.goto("about:blank")
    page.goto(url + place)
    page.locator(there).first.wait_for(state="attached")
    page.wait_for_timeout(1500)
    return Image.open(BytesIO(page.screenshot(full_page="tab=tokens" in place)))


def save(image: Image.Image, name: str) -> None:
    """Write a picture with its true colours: a run has the same one in all pictures."""
    image.convert("RGB").save(DOCS / f"viewer-{name}.png", optimize=True)


def beside(images: list[Image.Image]) -> Image.Image:
    width = sum(image.width + GAP for image in images) + GAP
    whole = Image.new("RGB", (width, images[0].height + 2 * GAP), "#d5dae2")
    left = GAP
    for image in images:
        whole.paste(image, (left, GAP))
        left += image.width + GAP
    return whole


def main(folders: list[Path]) -> None:
    with viewing(*folders) as url, sync_playwright() as playwright:
        runs = [run["id"] for run in when_read(url)["runs"] if run["credited"]]

        def chain(query: str) -> str:
            row = api(url, f"/api/trajectories?source=train&{query}")["rows"][0]
            return trajectory(row)

        def rewarded() -> str:
            """A short chain with reward 1 whose group has a reward below 0.5 too: its advantages are positive."""
            trained = f"source=train&run={runs[0]}&step_min=1&size=200"
            groups = api(url, f"/api/trajectories?{trained}&view=groups&sort=step&ascending=1")["rows"]
            for group in groups:
                if group["lowest"] < 0.5 and group["highest"] == 1:
                    asked = f"{trained}&group={group['group_id']}&reward_min=1&sort=turns&ascending=1"
                    row = api(url, f"/api/trajectories?{asked}")["rows"][0]
                    if row["turns"] == 3:
                        return f"{trajectory(row)}?tab=tokens&colour=advantage"
            raise LookupError(
                "no group of the first run has rewards that differ, and a chain with reward 1 in three turns"
            )

        curves = ("#/curves", '[data-chart="reward"] .trace')
        hunt = chain(f"run={runs[1]}&sort=turns")
        time = (f"{hunt}?tab=time", ".bars .stretch")
        recipes = (f"#/recipes/{runs[0]}/{runs[1]}", ".difference td")
        step = ("#/trajectories?source=train&step_min=12&step_max=12&sort=reward", "#rewards .bin-part")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 820})
        save(picture(page, url, *curves), "curves")
        save(picture(page, url, "#/trajectories?tool=move&outcome=completed&sort=turns", "tbody tr"), "list")
        save(picture(page, url, *time), "time")
        page.set_viewport_size({"width": 1400, "height": 540})
        save(picture(page, url, *step), "rewards")
        save(picture(page, url, *recipes), "recipes")
        page.set_viewport_size({"width": 1100, "height": 540})
        save(picture(page, url, rewarded(), ".tokens span"), "tokens")
        phone = browser.new_context(viewport={"width": PHONE[0], "height": PHONE[1]}, is_mobile=True).new_page()
        save(beside([picture(phone, url, *place) for place in (curves, step, time, recipes)]), "phone")
        browser.close()


def film() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(screen_run(Path(folder) / "run", ["form"]))
        with viewing(run.path) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1400, "height": 850})
            [row] = api(url, "/api/trajectories")["rows"]
            shown = picture(page, url, f"{trajectory(row)}?tab=film", ".film .place")
            shown.convert("RGB").save(DOCS / "screens-film.png", optimize=True)
            browser.close()


if __name__ == "__main__":
    if sys.argv[1:]:
        main([Path(name) for name in sys.argv[1:]])
    else:
        film()
