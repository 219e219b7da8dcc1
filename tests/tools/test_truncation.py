"""Tests of texts that are cut to a number of bytes."""

import pytest

from agentfactory.tools.calls.truncation import Middle, cut_bytes, left_out_of, truncated

pytestmark = pytest.mark.unit


def test_the_middle_is_left_out_and_counted() -> None:
    assert cut_bytes("0123456789", 10) is None
    assert cut_bytes("0123456789", 5) == "01\n[... 5 of 10 bytes left out ...]\n789"
    assert cut_bytes("0123456789", 1) == "\n[... 9 of 10 bytes left out ...]\n9"


@pytest.mark.parametrize("text", ["ü" * 50, "世界" * 30, "a\udcff" * 40, "😀" * 20, "plain text " * 9])
@pytest.mark.parametrize("most", [1, 7, 30, 33])
def test_no_letter_is_cut_through_and_nothing_is_miscounted(text: str, most: int) -> None:
    whole = text.encode("utf-8", "replace")
    cut = cut_bytes(text, most)
    assert cut is not None
    found = left_out_of(cut, most)
    head, tail = cut.split(f"\n[... {found.size} of {len(whole)} bytes left out ...]\n")
    assert whole.startswith(head.encode("utf-8", "replace"))
    assert whole.endswith(tail.encode("utf-8", "replace"))
    assert most - 6 <= len((head + tail).encode("utf-8", "replace")) == len(whole) - found.size <= most
    assert len(whole) - found.missing == len(cut.encode("utf-8", "replace"))


@pytest.mark.parametrize("size", [1, 3, 64])
def test_pieces_are_cut_as_the_whole(size: int) -> None:
    text = "Grüße, 世界! " * 20
    whole = text.encode()
    for most in (1, 10, 99, 1000):
        middle = Middle(most)
        for start in range(0, len(whole), size):
            middle.add(whole[start : start + size])
        assert middle.text() == (cut_bytes(text, most) or text)


def test_a_text_that_only_quotes_a_marker_was_not_cut() -> None:
    text = "01\n[... 5 of 10 bytes left out ...]\n789"
    assert left_out_of(text, 5) == (5, 10, 5 - 34)
    assert left_out_of(text, 1000) is None
    assert left_out_of(text + "more than five", 5) is None


def test_texts_of_a_result_are_cut_together() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    one, two = ({"type": "text", "text": text} for text in ("01234", "56789"))
    cut = {"type": "text", "text": "01\n[... 7 of 11 bytes left out ...]\n89"}
    assert truncated([image, one, image, two], 4, cut_bytes) == [image, cut, image]
