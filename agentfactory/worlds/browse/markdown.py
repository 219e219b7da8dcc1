"""Web documents as markdown with numbered links."""

import codecs
import re
from contextlib import suppress
from io import BytesIO
from typing import Any, cast

from html_to_markdown import ConversionOptions, PreprocessingOptions, convert
from html_to_markdown.exceptions import ConversionError
from pypdf import PdfReader
from pypdf.errors import PyPdfError
from yarl import URL

from agentfactory.worlds.browse.documents import Document, PageError, Text

_MOST_LINKS = 5000
_HEAD_BYTES = 1024
"""Bytes at the start in which HTML declares its charset (WHATWG, "prescan")."""
_HEAD_CHARACTERS = 64 << 10
"""Characters at the start in which the title is looked for."""
_META = re.compile(rb"""<(?:meta[^>]*\bcharset|\?xml[^>]*\bencoding)\s*=\s*["']?\s*([A-Za-z0-9_:.-]+)""", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_SUPERSETS: dict[str, str] = {
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
"""Charset labels -> the encodings that browsers use for them (WHATWG Encoding)."""
_CHARSETS = re.compile(
    r"utf-(8|16(-[lb]e)?)|cp\d+|iso8859-\d+|koi8-[ru]|gb18030|euc_jp|iso2022_jp|big5hkscs|mac-.*|tis-620"
)
_OPTIONS = ConversionOptions(
    autolinks=False,
    compact_tables=True,
    extract_metadata=False,
    preprocessing=PreprocessingOptions(enabled=False),
    exclude_selectors=[
        *("nav", "footer", "aside", "[role=navigation]", "[role=banner]", "[role=contentinfo]", "[role=search]"),
        *("button", "select", "textarea", "input", "iframe", "video", "audio", "object", "svg", "canvas", "noscript"),
    ],
)
_TITLE_CHARACTERS = 200


def read_document(document: Document) -> Text:
    """Convert a document to text, which may take minutes (see `Reader`). Raises PageError if it cannot be read."""
    if document.type == "application/pdf":
        return _read_pdf(document)
    text = decode(document.content, document.charset)
    if document.type in ("text/html", "application/xhtml+xml"):
        return _read_html(text, document.url)
    return Text("", text.replace("\r\n", "\n"))


def decode(content: bytes, charset: str | None) -> str:
    """Decode text by its byte order mark, else the server's charset, the page's own, UTF-8, or Windows-1252."""
    for mark, marked in _MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(marked, "replace")
    own = _META.search(content[:_HEAD_BYTES])
    for name in (charset, own.group(1).decode("ascii") if own else None):
        if name and (known := _known_charset(name)):
            return content.decode(known, "replace")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252", "replace")


def _known_charset(name: str) -> str | None:
    # only web charsets: Python also has text encodings such as `punycode` and `unicode_escape`
    try:
        known: str = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    known = _SUPERSETS.get(known, known)
    return known if _CHARSETS.fullmatch(known) else None


class _Numbers:
    """The links of a page, numbered in order of first occurrence; links to the same address share a number."""

    def __init__(self, base: URL) -> None:
        self._page = self._base = base.with_fragment(None)
        self.numbers: dict[str, int] = {}

    def relate(self, base: str | None) -> None:
        with suppress(ValueError):
            self._base = self._base.join(URL(base or ""))

    def visit_link(self, _context: Any, href: str, text: str, _title: str) -> Any:
        label = " ".join(text.split())
        target = self._target(href)
        if target is None or not label:
            return {"custom": label}
        number = self.numbers.get(target)
        if number is None:
            if len(self.numbers) == _MOST_LINKS:
                return {"custom": label}
            number = self.numbers[target] = len(self.numbers) + 1
        return {"custom": f"[{label}][{number}]"}

    def visit_image(self, _context: Any, _source: str, description: str, _title: str) -> Any:
        return {"custom": " ".join(description.split())}

    def _target(self, href: str) -> str | None:
        """Return the address of a link to another page; None for a link within this page, or to anything else."""
        href = href.strip()
        if not href or href.startswith("#"):
            return None
        try:
            target = self._base.join(URL(href)).with_fragment(None)
        except ValueError:
            return None
        if target.scheme not in ("http", "https") or target == self._page:
            return None
        return str(target)


def _read_html(html: str, url: str) -> Text:
    html = html.replace("\0", "")
    numbers = _Numbers(URL(url))
    try:
        head = convert(html[:_HEAD_CHARACTERS], ConversionOptions(extract_metadata=True)).metadata.document
        numbers.relate(head.base_href)
        found = convert(html, _OPTIONS, visitor=cast(Any, numbers))
    except ConversionError as error:
        raise PageError(f"{url} is not HTML that can be read: {error}.") from None
    title = " ".join((head.title or "").split())
    return Text(title[:_TITLE_CHARACTERS], (found.content or "").strip(), tuple(numbers.numbers))


def _read_pdf(document: Document) -> Text:
    try:
        pdf = PdfReader(BytesIO(document.content))
        title = (pdf.metadata.title if pdf.metadata else None) or ""
        pages = [page.extract_text() for page in pdf.pages]
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # boundary: a malformed file raises any of these
        raise PageError(f"{document.url} is not a PDF that can be read: {error}.") from None
    return Text(" ".join(str(title).split())[:_TITLE_CHARACTERS], "\n\n".join(pages).strip())
