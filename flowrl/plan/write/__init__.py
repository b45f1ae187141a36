"""A plan over many devices as data: devices, memory by parts, servers."""
