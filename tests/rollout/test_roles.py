"""Roles of a turn's tokens, as determined by the renderer."""

from agentfactory.rollout.text.token_roles import turn_roles


def by_character(text: str, words: list[str], arguments: list[dict], malformed: bool = False, end: int = 1) -> str:
    """Roles for one token per character, and a token of 3 bytes that ends the turn."""
    lengths = [len(character.encode()) for character in text] + [3] * end
    return turn_roles(lengths, text, words, arguments, malformed)


def test_a_call_with_words() -> None:
    text = 'Look.\n<c>{"name": "go", "arguments": {"to": "east", "steps": 12}}</c>'
    roles = by_character(text, ["Look."], [{"to": "east", "steps": 12}])
    assert len(roles) == len(text) + 1
    assert "".join(c for c, role in zip(text, roles, strict=False) if role == "t") == "Look."
    assert "".join(c for c, role in zip(text, roles, strict=False) if role == "a") == "east12"
    assert roles[-1] == "f"


def test_the_same_words_in_an_argument_are_an_argument() -> None:
    text = 'rain\n<c>{"query": "rain"}</c>'
    roles = by_character(text, ["rain"], [{"query": "rain"}])
    assert roles == "tttt" + "f" * 15 + "aaaa" + "f" * 7


def test_nested_values_escapes_and_other_scripts() -> None:
    text = '<c>{"a": [1, {"b": "Straße \\"x\\" 東京"}], "c": null}</c>'
    roles = by_character(text, [], [{"a": [1, {"b": 'Straße "x" 東京'}], "c": None}])
    found = "".join(c for c, role in zip(text, roles, strict=False) if role == "a")
    assert found == '1Straße \\"x\\" 東京null'


def test_a_token_that_has_a_part_of_a_value_is_an_argument() -> None:
    text = '<c>{"to": "east"}</c>'
    # tokens of 4 bytes: <c>{ "to" : "e ast" }</c >
    lengths = [4, 4, 4, 4, 4, len(text) - 20]
    assert turn_roles(lengths, text, [], [{"to": "east"}], False) == "ffaaff"
