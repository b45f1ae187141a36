"""The pure functions of the specifications in `flowrl.specs`.

Advantages, filters, selections and maps work on numpy arrays, because the driver calls them and
does not import torch; losses work on torch tensors. `flowrl.algo.resolve` finds the function of a
specification and imports only the module that contains it.
"""
