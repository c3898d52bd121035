"""Text of SVG elements. All values are escaped: names of nodes come from strangers."""

from __future__ import annotations

from html import escape

from onnx_sparseconv.text import shown


def element(tag: str, *children: str, **attributes: object) -> str:
    """An element.

    Args:
        tag: its name.
        children: markup, which is taken as it is; `text` makes some of a text.
        attributes: None leaves one out; ``class_`` is ``class``, other underscores stand for hyphens.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def text(words: str) -> str:
    """A text as markup."""
    return escape(shown(words))


def label(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> str:
    """A text at a place; ``anchor`` is ``start``, ``middle`` or ``end``."""
    return element("text", text(words), x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def picture(name: str, title: str, description: str, size: tuple[float, float], *children: str) -> str:
    """A whole picture, with a title and a description for those who cannot see it.

    Args:
        name: unique on the page.
        title: what it is.
        description: what it shows.
        size: width and height.
        children: markup.
    """
    return element(
        "svg",
        element("title", text(title), id=f"{name}-title"),
        element("desc", text(description), id=f"{name}-desc"),
        *children,
        viewBox=f"0 0 {_value(size[0])} {_value(size[1])}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(shown(str(value)))
