"""Configuration: a typed tree, read from YAML and `key=value` overrides, checked before any work.

- `flowrl.config.schema`: the tree and its defaults, with the sections of `flowrl.config.roles`,
  `flowrl.config.data` and `flowrl.config.rewards`.
- `flowrl.config.load`: reads files and overrides into a validated tree, which remembers where each
  value was written; `flowrl.config.tree` says how files and overrides merge.
- `flowrl.config.check`: checks across keys: numbers that must divide, names and files that must
  exist.

The package itself imports nothing, so that `import flowrl` pays for pydantic only when a
configuration is read.
"""
