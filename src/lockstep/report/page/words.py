"""Texts in both languages, of which the page shows one."""

from html import escape

from lockstep.report.page.texts import TEXTS


def both(name: str) -> str:
    """Return a text in both languages, as HTML; what has no text is its own."""
    english, chinese = TEXTS.get(name, (name, name))
    if english == chinese:
        return escape(english)
    return f'<span class="en">{escape(english)}</span><span class="zh">{escape(chinese)}</span>'


def heading(name: str) -> str:
    return f"<h3>{both(name) if name in TEXTS else escape(name.replace('_', ' '))}</h3>"
