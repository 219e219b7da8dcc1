"""What a command line that cannot be understood is told."""

import pytest

from agentfactory.commands.options import parse


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trian recipe.yaml", "agentfactory: error: there is no command 'trian'; did you mean train?"),
        ("xyz", "argument COMMAND: invalid choice: 'xyz' (choose from"),
        ("train recipe.yaml --owerwrite", "agentfactory train: error: unrecognized arguments: --owerwrite"),
        ("completion csh", "argument shell: invalid choice: 'csh'"),
        ("train", "agentfactory train: error: the following arguments are required: RECIPE\n"),
        ("tools call recipe.yaml", "agentfactory tools call: error: the following arguments are required: TOOL\n"),
        ("doctor --sample 4", "agentfactory doctor: error: --sample runs chains of a recipe: name a recipe\n"),
        ("doctor recipe.yaml --sample 0", "agentfactory doctor: error: --sample: got 0; use at least 1 chain\n"),
    ],
)
def test_a_slip_is_told_by_what_was_meant(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(typed.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_overrides_are_taken_before_and_behind_options() -> None:
    assert parse(["train", "recipe.yaml"]).overrides == []
    assert parse(["train", "recipe.yaml", "--dry-run", "seed=1"]).overrides == ["seed=1"]
    assert parse(["train", "recipe.yaml", "seed=1", "--dry-run", "name=a"]).overrides == ["seed=1", "name=a"]
    assert parse(["tools", "call", "recipe.yaml", "search"]).arguments == []
