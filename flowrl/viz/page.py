"""Pages that hold everything they show: text, styles, scripts and data, in one file.

A page loads nothing: its content security policy allows no address, and no script but those that
were put in here, by their hash. The templates escape every value.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent / "pages"


def render_page(
    template: str,
    values: Mapping[str, object],
    *,
    data: object = None,
    scripts: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> str:
    """Returns a page.

    Args:
        template: The name of a Jinja template in `pages`, as all other names.
        values: What the template shows.
        data: What its scripts read, of JSON types without NaN.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in scripts)
    style = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # In a script element, < alone could end it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        values,
        policy="default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(text.replace("<", "\\u003c")),
    )
