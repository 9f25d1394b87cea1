"""HTML made of functions: what is `Html` is markup already, every plain string is escaped on its way in."""

import re
from collections.abc import Sequence
from html import escape
from typing import NewType

Html = NewType("Html", str)


def text(value: str) -> Html:
    """Return plain text as markup."""
    return Html(escape(value))


def breakable(value: str) -> Html:
    """Return a name as markup that a line may break inside, behind its separators."""
    return Html(re.sub(r"([/._:]+)(?=[^/._:])", r"\1<wbr>", escape(value, quote=False)))


def element(tag: str, *content: Html, **attributes: str) -> Html:
    """Return an element; `aria_label` is written aria-label, and `class_`, a word of Python's, class."""
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return Html(f"<{tag}{written}>{''.join(content)}</{tag}>")


def paragraph(value: str) -> Html:
    return element("p", text(value))


def code(value: str) -> Html:
    return element("code", breakable(value))


def details(summary: str, *content: Html, is_open: bool = False) -> Html:
    """Return content that a click or the Enter key shows and hides."""
    attributes = {"open": ""} if is_open else {}
    return element("details", element("summary", breakable(summary)), *content, **attributes)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> Html:
    """Return a table whose first column names the row; the first `words` columns are words, the others numbers.

    It lies in a region of its own, which scrolls where the table is wider than the page, and which the Tab key reaches.
    """
    kinds = ["word" if column < words else "number" for column in range(len(head))]
    top = element("tr", *(element("th", text(cell), scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    body = [
        element(
            "tr",
            element("th", breakable(row[0]), scope="row", class_="word"),
            *(
                element("td", breakable(c) if kind == "word" else text(c), class_=kind)
                for c, kind in zip(row[1:], kinds[1:], strict=True)
            ),
        )
        for row in rows
    ]
    whole = element("table", element("thead", top), element("tbody", *body))
    return element("div", whole, class_="scroll", role="region", tabindex="0", aria_label=title)
