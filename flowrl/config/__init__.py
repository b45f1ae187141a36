"""Configuration: a typed tree, read from YAML and `key=value` overrides, checked before any work.

- `flowrl.config.schema`: the tree and its defaults.
- `flowrl.config.load`: files and overrides in, a validated tree out; remembers where values stand.
- `flowrl.config.check`: what one key alone cannot tell: numbers that must divide, names that must
  exist, files that must be there.
- `flowrl.config.nearest`: the nearest name to a misspelt one.

The package itself imports nothing, so that `import flowrl` pays for pydantic only when a
configuration is read.
"""
