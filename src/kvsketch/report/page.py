"""The HTML page: one file with its style, its script and its data inside."""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template

from kvsketch.report.contents import Contents, as_data

TITLE = "What a smaller KV cache costs"


def page(contents: Contents) -> str:
    """The whole page as text."""
    parts = resources.files("kvsketch.report") / "web"
    scripts = sorted((part for part in parts.iterdir() if part.name.endswith(".js")), key=lambda part: part.name)
    return Template((parts / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(TITLE),
        lead=html.escape(lead(contents)),
        style=(parts / "page.css").read_text(encoding="utf-8").strip(),
        script="\n".join(script.read_text(encoding="utf-8").strip() for script in scripts),
        data=embedded(contents),
    )


def lead(contents: Contents) -> str:
    """What the report covers, in a sentence."""
    models = ", ".join(dict.fromkeys(contents.models))
    return f"{contents.records:,} records of {len(contents.methods)} methods on {models or 'no model'}."


def embedded(contents: Contents) -> str:
    """The data as JSON that cannot end the script element around it."""
    text = json.dumps(as_data(contents), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
