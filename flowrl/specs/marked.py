"""Functions of the user's own under a mark: what `@fl.map` and `@fl.advantage.own` make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from flowrl.specs.base import Scalar, Spec
from flowrl.specs.function import reference_of
from flowrl.specs.user_options import Options, change_options, declared_options

__all__ = ["MarkedFunction"]

_S = TypeVar("_S", bound=Spec)


class MarkedFunction(Generic[_S]):
    """What stands under the name of a marked function in the user's module.

    It knows the specification; what calling it in a program does is a subclass's business.

    Args:
        function: `(batch, *, option=default, ...)`.
        kind: What it is for, for messages: `map`.
        make: The specification, whose fields are `function`, `options` and what is `declared`.
        declared: What the mark says.

    Raises:
        TraceError: a function that no plan can name, or with parameters that it cannot have.
    """

    reserved: ClassVar[frozenset[str]] = frozenset()
    """Names of arguments of a call in a program, which no option may have."""

    def __init__(
        self, function: Callable[..., Any], *, kind: str, make: Callable[..., _S], **declared: Any
    ) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        fields: dict[str, object] = getattr(make, "__dataclass_fields__", {})
        reserved = {*fields, "kind", *self.reserved}
        self._options = declared_options(function, takes=("batch",), reserved=reserved)
        self._make = make
        self._declared = {"function": reference_of(function, kind=kind), **declared}

    def spec(self, **options: Scalar) -> _S:
        """The specification with these options; the others keep their defaults.

        Raises:
            TraceError: an option that the function does not have.
        """
        changed: Options = change_options(self.__name__, self._options, options)
        return self._make(**self._declared, options=changed)
