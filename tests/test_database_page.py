"""The page on a database and a public MCP server: every block of it, with few steps. `make learn` takes all of them."""

import re
import sqlite3
from pathlib import Path

import pytest
import yaml

from tests.database_page import PAGE, bash, follow

pytestmark = [pytest.mark.long, pytest.mark.processes]


def test_every_block_of_the_page_works(tmp_path: Path) -> None:
    shop = follow(tmp_path, "sft.train.steps=20 grpo.train.steps=3 grpo.eval.data.limit=4")
    assert len((shop / "tasks.jsonl").read_text().splitlines()) == 200
    assert len((shop / "runs/shop-tiny/grpo/metrics.jsonl").read_text().splitlines()) == 6
    said = bash("""agentfactory tools call recipe.yaml read_query query="SELECT count(*) AS n FROM products" """, shop)
    assert said.strip() == "[{'n': 50}]"

    # each chain with a copy of the database: a chain that writes changes nothing for the next one
    found = yaml.safe_load(re.search(r"^mcp_servers:\n(?:  .*\n)+", PAGE.rpartition("## Which isolation")[2], re.M)[0])
    recipe = yaml.safe_load((shop / "recipe.yaml").read_text()) | found
    (shop / "writes.yaml").write_text(yaml.safe_dump(recipe))
    (shop / "data").mkdir()
    (shop / "shop.db").rename(shop / "data" / "shop.db")
    said = bash("""agentfactory tools call writes.yaml write_query query="DELETE FROM products" """, shop)
    assert said.strip() == "[{'affected_rows': 50}]"
    with sqlite3.connect(shop / "data" / "shop.db") as database:
        assert database.execute("SELECT count(*) FROM products").fetchone() == (50,)
