"""The table of config keys in the config guide has every key, with its default, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowrl.config.roles import FreshModel, RoleConfig
from flowrl.config.schema import RunConfig, StopConfig

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "config-guide.md"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, _default(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or value == () or value == {}:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_table_of_keys_is_that_of_the_schema():
    section = GUIDE.read_text().split("## Every key")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (\S+) \| ", section, flags=re.M)
    assert {key: default.strip("`") for key, default in rows} == _schema()


def _schema() -> dict[str, str]:
    return {
        **dict(_keys(RunConfig)),
        **dict(_keys(StopConfig, "stop.")),
        **dict(_keys(RoleConfig, "roles.NAME.")),
        **dict(_keys(FreshModel, "roles.NAME.model.")),
    }
