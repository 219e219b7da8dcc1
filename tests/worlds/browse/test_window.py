"""Windows over a long text: no text is lost, cuts are at word ends, `find` gives the window of each match."""

import random

from agentfactory.worlds.browse.window import Page


def body(page: Page, number: int) -> str:
    return page.window(number).split("\n\n", 1)[1]


def test_windows_end_at_paragraphs_then_lines_then_words() -> None:
    assert [body(Page("", "aaaa bbbb\n\ncccc dddd", size=12), n) for n in (1, 2)] == ["aaaa bbbb", "cccc dddd"]
    assert [body(Page("", "aaaa bbbb\ncccc dddd", size=12), n) for n in (1, 2)] == ["aaaa bbbb", "cccc dddd"]
    assert [body(Page("", "aaaa bbbb cccc", size=12), n) for n in (1, 2)] == ["aaaa bbbb ", "cccc"]
    assert [body(Page("", "abcdefgh", size=5), n) for n in (1, 2)] == ["abcde", "fgh"]


def test_windows_together_are_the_text() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab \n界") for _ in range(draw.randrange(200)))
        page = Page("", text, size=draw.randrange(1, 40))
        windows = ["" if (got := body(page, number)) == "(no text)" else got for number in range(1, page.count + 1)]
        assert "".join(windows).replace("\n", "") == text.replace("\n", "")
        assert page.count == 1 or all(len(window) <= 40 for window in windows)


def test_find_names_the_window_of_each_place() -> None:
    text = "\n".join(["Bergen lies in the west.", *["nothing"] * 100, "The population of  BERGEN\nis 290,000."])
    page = Page("Norway", text, size=200)
    found = page.find("bergen")
    assert found.splitlines()[0] == '"bergen" occurs 2 times:'
    assert found.splitlines()[1].startswith("page 1: Bergen lies in the west.")
    assert found.splitlines()[2].startswith(f"page {page.count}: ... ")
    assert "Bergen lies" in page.window(1)
    assert "BERGEN" in page.window(page.count)
    assert "occurs once" in page.find("of Bergen is")  # across a line break
    assert page.find("Oslo") == '"Oslo" does not occur in this document.'
    assert "empty" in page.find(" \n")


def test_find_is_literal_and_bounded() -> None:
    page = Page("", "a.b (c) " * 10_000 + "İstanbul straße")
    found = page.find("a.b (C)")
    assert found.startswith('"a.b (C)" occurs 10000 times; the first 8 places:')
    assert len(found) < 4000
    assert "does not occur" in page.find("a+b")
    assert "occurs once" in page.find("STRAßE")
    assert len(page.find("x" * 10_000)) < 200


def test_a_long_line_takes_linear_time() -> None:
    page = Page("", "a" * 5_000_000 + " " * 1_000_000 + "b")
    assert page.count > 1000
    assert "occurs once" in page.find("a b")
