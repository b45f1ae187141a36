"""Configurations of other frameworks, turned into flowrl's.

`read` finds the framework of a file and reads its keys, `translate` applies the framework's table
with the rules of `rules`, and `importing` lists every key once: as mapped, changed in meaning,
without a counterpart, or unknown. docs/import-config.md is the guide.
"""

from flowrl.foreign_configs.importing import config_text, import_config, report, to_json

__all__ = ["config_text", "import_config", "report", "to_json"]
