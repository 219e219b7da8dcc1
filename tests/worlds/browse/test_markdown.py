"""Documents as text: structure, links, charsets, PDF, and hostile HTML in bounded time."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from agentfactory.worlds.browse.documents import Document, PageError, Text
from agentfactory.worlds.browse.markdown import decode, read_document
from agentfactory.worlds.browse.web_pages import Reader
from tests.worlds.browse.site import PAGES

SITE = "http://atlas.test/"


def read(path: str, kind: str = "text/html") -> Text:
    return read_document(Document(SITE + path, kind, None, (PAGES / path).read_bytes()))


def html(text: str) -> Text:
    return read_document(Document(f"{SITE}folder/page", "text/html", "utf-8", text.encode("utf-8", "surrogatepass")))


def test_a_page_is_its_content_with_numbered_links() -> None:
    page = read("index.html")
    assert page.title == "Atlas of the Sund"
    assert page.text.split("\n\n")[0] == "# Atlas of the Sund"
    assert " ".join(page.text.split()) == (
        "# Atlas of the Sund Towns: [Karsund][1], [Veidnes][2]. People: [Halvard Øye][3]. "
        "Notes: [plain text][4], [elsewhere][5], by mail, up."
    )
    assert page.links == (
        *(f"{SITE}karsund.html", f"{SITE}veidnes.html", f"{SITE}people/halvard.html", f"{SITE}notes.txt"),
        "https://example.org/",
    )


def test_structure_becomes_markdown() -> None:
    page = read("karsund.html")
    for part in (
        *("# Karsund", "the *Sund*", "| Year | Inhabitants |", "| 1950 | 3,877 |", "1. the harbour", "old quay"),
        *("2. the church", "```\nferry 07:15\nferry 19:40\n```", "The lighthouse in 1931"),
        "[Back to the **atlas**][2]",
    ):
        assert part in page.text
    assert read("veidnes.html").text.startswith("# Veidnes")  # an article's header is kept, unlike a site's header


@pytest.mark.parametrize(
    ("content", "charset", "text"),
    [
        ("Øye".encode(), None, "Øye"),
        ("Øye–".encode("cp1252"), "iso-8859-1", "Øye–"),
        ("Øye".encode("utf-8-sig"), "iso-8859-1", "Øye"),
        ('<meta charset="koi8-r">Привет'.encode("koi8-r"), None, '<meta charset="koi8-r">Привет'),
        ("東京".encode("shift_jis"), "Shift_JIS", "東京"),
        ("Øye".encode(), "no-such-charset", "Øye"),
        (b"+ADw-b+AD4-", "utf-7", "+ADw-b+AD4-"),  # a charset that no browser supports
        (b"x" * 100, "zlib", "x" * 100),
    ],
)
def test_charsets(content: bytes, charset: str | None, text: str) -> None:
    assert decode(content, charset) == text


def pdf(text: str) -> bytes:
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Title(The report)>>",
    ]
    content, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj%s endobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(content)
    content += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    return content + b"trailer<</Size %d/Root 1 0 R/Info 6 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start)


def test_pdf() -> None:
    page = read_document(Document(SITE, "application/pdf", None, pdf("The ferry costs 12 crowns")))
    assert page == Text("The report", "The ferry costs 12 crowns")


@pytest.mark.parametrize("content", [b"", b"%PDF-1.4\nnothing", pdf("x")[:200], pdf("x").replace(b"Kids[3", b"Kids[2")])
def test_a_broken_pdf_is_told(content: bytes) -> None:
    with pytest.raises(PageError, match="is not a PDF that can be read"):
        read_document(Document(SITE, "application/pdf", None, content))


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader(seconds=3.0)
    yield reader
    reader.close()


HOSTILE = {
    "nested": "<div>" * 100_000 + "x" + "</div>" * 100_000,
    "links in links": "<a href=x>" * 50_000 + "x",
    "unclosed": "<b>x" * 1_000_000,
    "one line": "word " * 1_000_000,
    "entities": "<!DOCTYPE x [" + "".join(f'<!ENTITY a{n} "&a{n - 1};&a{n - 1};">' for n in range(1, 64)) + "]>&a63;",
    "tags without end": "<" * 5_000_000,
    "NUL": "\0" * 1_000_000 + "<p>x",
    "attributes": "<a " + "x=y " * 500_000 + ">x</a>",
    "cells": "<table><tr>" + "<td>x" * 1_000_000,
    "surrogates": "\ud800<p>x",
}


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_html_is_read_or_refused_in_bounded_time(reader: Reader, name: str) -> None:
    content = HOSTILE[name].encode("utf-8", "surrogatepass")
    with suppress(PageError):
        found = await reader.read(Document(SITE, "text/html", "utf-8", content))
        assert len(found.text) <= 5_000_000
    # the next document is read, by the same process or another one
    assert (await reader.read(Document(SITE, "text/html", None, b"<p>fine"))).text == "fine"


@pytest.mark.processes
async def test_what_takes_too_long_is_told() -> None:
    hasty = Reader(seconds=0.2)
    with pytest.raises(PageError, match="too much time or memory"):
        await hasty.read(Document(SITE, "text/html", "utf-8", HOSTILE["unclosed"].encode()))
    hasty.close()
