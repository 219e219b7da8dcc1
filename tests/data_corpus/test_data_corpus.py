"""Rough data files: each gives its rows, with its notices, or an error that names the row and what to type."""

import json
import logging
import re
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notice_of
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import conversation_of, load_tasks
from tests.conftest import REPOSITORY
from tests.data_corpus.cases import CASES, CONVERTED, Case, Rows
from tests.data_corpus.fuzz import fuzz


def loaded(config: DataConfig, sft: bool) -> Rows:
    rows = load_tasks(config, tell=True)
    if not sft:
        return rows
    conversations = [conversation_of(row, number) for number, row in enumerate(rows, 1)]
    return [{"messages": messages, "tools": [s.to_openai() for s in specs]} for messages, specs in conversations]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rough_file_works_or_is_named(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DataConfig(path=str(case.write(tmp_path)), columns=case.columns)
    if isinstance(case.outcome, str):
        with pytest.raises(SettingError, match=case.outcome) as refused:
            loaded(config, case.sft)
        assert refused.value.field.startswith("data.")
        assert refused.value.fix
        return
    with caplog.at_level(logging.INFO):
        assert loaded(config, case.sft) == case.outcome
    told = [str(notice) for record in caplog.records if (notice := notice_of(record))]
    assert len(told) == len(case.notices), told
    for pattern, text in zip(case.notices, told, strict=True):
        assert re.search(pattern, text)


@pytest.mark.parametrize("name", CONVERTED)
def test_the_functions_of_the_page_convert_rows_of_other_projects(name: str, tmp_path: Path) -> None:
    row, options, messages, tools = CONVERTED[name]
    page = (REPOSITORY / "docs/data.md").read_text()
    (code,) = re.findall(r"```python\n# my_rows\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rows.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = f"{tmp_path}/my_rows.py:{name.partition(',')[0]}"
    config = DataConfig(source=source, options={"path": str(tmp_path / "rows.jsonl"), **options})
    assert loaded(config, sft=True) == [{"messages": messages, "tools": tools}]


@pytest.mark.extended
def test_mutants_are_trained_as_they_are_or_named(tmp_path: Path) -> None:
    """In a short run of the fuzzer."""
    fuzzer = fuzz(seed=39, seconds=0, folder=tmp_path / "data", steps=400)
    assert not fuzzer.faults, "\n".join(fuzzer.faults[:3])
    assert sum(fuzzer.found.values()) == 400
    trained = sum(count for outcome, count in fuzzer.found.items() if "trained: " in outcome)
    assert trained > 50, fuzzer.found
