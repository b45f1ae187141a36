"""Calls of the user's own functions, with errors that name the line of the user's code. numpy only.

`flowrl.algo.losses_supervised.own_loss` calls losses, which are functions of torch tensors.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, check_scores
from flowrl.algo.maps import MapBatch, MapResult
from flowrl.errors import FlowError, TraceError
from flowrl.specs.advantage import OwnAdvantage
from flowrl.specs.maps import OwnMap
from flowrl.specs.user_functions import NO_DEBUGGER, Options
from flowrl.user_files import load_function
from flowrl.user_lines import definition_of, user_line_of
from flowrl.wording import suggestion

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's own with its options, ready to be called.

    Attributes:
        kind: The purpose of the function: `loss`, `advantage`, `map`.
        function: The function itself.
        options: The options, passed by keyword.
        declared: The fields that the function declares to read, for messages.
        where: `file:line` of its `def`.
    """

    kind: str
    function: Callable[..., Any]
    options: Options
    declared: tuple[str, ...]
    where: str

    @classmethod
    def load(
        cls, kind: str, reference: str, options: Options, declared: tuple[str, ...]
    ) -> UserFunction:
        """Loads the function of a reference.

        Raises:
            TraceError: The function does not exist.
        """
        function = load_function(reference)
        return cls(kind, function, options, declared, str(definition_of(function)))

    @property
    def title(self) -> str:
        """The name of the function in messages."""
        return f"{self.kind} {self.function.__name__}"

    def __call__(self, *arguments: object) -> Any:
        """Calls the function and returns its result.

        Raises:
            TraceError: The function raised an error, which is the cause.
        """
        try:
            return self.function(*arguments, **dict(self.options))
        except FlowError as error:
            if error.where is None:  # raised by an argument: a field that is not declared
                error.where = user_line_of(error, self.where)
            raise
        except Exception as error:
            raise self._raised(error, arguments) from error

    def _raised(self, error: Exception, arguments: Sequence[object]) -> TraceError:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
        report = TraceError(
            f"{self.title} raised {NO_DEBUGGER if isinstance(error, BdbQuit) else reason}",
            where=user_line_of(error, self.where),
        )
        declared = f"it declares {', '.join(self.declared) or 'nothing'}"
        if isinstance(error, AttributeError) and any(error.obj is each for each in arguments):
            attribute = str(error.name)
            names = [name for name in dir(error.obj) if not name.startswith("_")]
            report.what = f"{self.title} reads batch.{attribute}, which does not exist"
            report.found = declared
            report.expected = f"one of {', '.join(names)}"
            report.hint = suggestion(attribute, names)
            if attribute in getattr(error.obj, "fields", ()):
                report.hint = f'write batch["{attribute}"]'
            if attribute in getattr(error.obj, "extra", ()):
                report.hint = f'write batch.extra["{attribute}"]'
        elif isinstance(error, KeyError):
            report.found = declared
            report.hint = suggestion(str(error.args[0] if error.args else ""), self.declared)
        elif isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
            # A field that was not declared is None, and causes such an error.
            report.found = declared
            report.hint = "a field that is not declared is None; declare it"
        return report

    def refuse(
        self, what: str, *, found: str, expected: str, hint: str | None = None
    ) -> TraceError:
        """Returns the error for an invalid result of the function."""
        return TraceError(
            f"{self.title} {what}", where=self.where, found=found, expected=expected, hint=hint
        )

    def check_array(
        self, name: str, result: object, dtype: str, shape: tuple[int, ...], unit: str
    ) -> Array:
        """Returns a result as an array of this type and shape.

        Raises:
            TraceError: The result has another type or shape.
        """
        expected = f"{dtype} {shape_of(shape)}, one a {unit}"
        try:
            values = np.asarray(result)
            # Numbers keep their kind: a float does not become a bool, nor 0.5 an int64.
            values = values.astype(dtype, casting="same_kind")
        except (TypeError, ValueError):
            dtype_given = str(getattr(result, "dtype", type(result).__name__))
            raise self.refuse(
                f"gives '{name}' of another type", found=dtype_given, expected=expected
            ) from None
        if values.shape != shape:
            raise self.refuse(
                f"gives '{name}' of the wrong shape",
                found=shape_of(values.shape),
                expected=expected,
            )
        return values

    def check_finite(self, name: str, values: Array) -> None:
        """Raises a TraceError with the first value that is not finite."""
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            raise self.refuse(
                f"gives '{name}' that is not finite",
                found=f"{values[tuple(wrong[0])]} at {shape_of(wrong[0])}",
                expected="finite numbers",
            )


def shape_of(shape: Collection[int]) -> str:
    """Formats a shape as `[8, 5]`."""
    return "[" + ", ".join(map(str, shape)) + "]"


def own_advantage(batch: AdvantageBatch, spec: OwnAdvantage) -> AdvantageResult:
    """Calls the user's function and checks its result.

    The function gets a batch with scores, groups and the fields that it declares; all other fields
    are None. It returns an array, `[N]`, or `[N, T]` for one number a token, or an
    `AdvantageResult` (required if it declares returns). Both are then set to 0 off the mask.

    Raises:
        ValueError: The batch does not have a declared field.
        TraceError: The function raises an error or returns something else; the message names its
            line.
    """
    check_scores(batch.scores, batch.groups)
    declared: dict[str, Any] = {name: getattr(batch, name) for name in spec.needs}
    if missing := [name for name, value in declared.items() if value is None]:
        raise ValueError(f"the advantage {spec.function} needs {' and '.join(missing)}")
    function = UserFunction.load("advantage", spec.function, spec.options, spec.needs)
    given = function(AdvantageBatch(scores=batch.scores, groups=batch.groups, **declared))
    result = given if isinstance(given, AdvantageResult) else AdvantageResult(advantages=given)
    mask = None if "mask" not in declared else np.asarray(declared["mask"]) > 0

    def checked(name: str, values: object, per_token: bool) -> npt.NDArray[np.float32]:
        if mask is None or not per_token:
            array = function.check_array(name, values, "float32", np.shape(batch.scores), "sample")
        else:
            array = function.check_array(name, values, "float32", mask.shape, "token")
            array = np.where(mask, array, np.float32(0))  # values off the mask are arbitrary
        function.check_finite(name, array)
        return array

    advantages = checked("advantages", result.advantages, spec.per_token)
    if not spec.returns:
        return AdvantageResult(advantages=advantages)
    if result.returns is None:
        raise function.refuse(
            "gives no returns, which it declares",
            found=type(given).__name__,
            expected="AdvantageResult(advantages=..., returns=...)",
        )
    returns = checked("returns", result.returns, per_token=True)
    return AdvantageResult(advantages=advantages, returns=returns)


def own_map(batch: MapBatch, spec: OwnMap) -> MapResult:
    """Calls the user's function and checks its result.

    The function gets a batch with the fields that it declares. It returns an array if it gives one
    field, or a mapping from names to arrays.

    Raises:
        TraceError: The function raises an error, or does not give the declared fields; the message
            names its line.
    """
    function = UserFunction.load("map", spec.function, spec.options, spec.reads)
    result = function(batch)
    if not isinstance(result, Mapping):
        result = {spec.gives[0][0]: result}
    names = [name for name, _, _ in spec.gives]
    if set(result) != set(names):
        raise function.refuse(
            "does not give the fields that it declares",
            found=", ".join(map(str, result)) or "nothing",
            expected=", ".join(names),
            hint="return a mapping from each name to its array" if len(names) > 1 else None,
        )
    fields = {}
    for name, dtype, unit in spec.gives:
        count = len(batch.groups) if unit == "samples" else int(batch.offsets[-1])
        fields[name] = function.check_array(name, result[name], dtype, (count,), unit[:-1])
        if dtype == "float32":
            function.check_finite(name, fields[name])
    return fields


def check_per_sample(batch: MapBatch, spec: OwnMap, given: MapResult) -> None:
    """Compares a map's result with its result for the first half of the samples alone.

    Raises:
        TraceError: The numbers differ, although the map declares `per_sample`; with the line of
            the function.
    """
    half = np.arange((len(batch.groups) + 1) // 2)
    alone = own_map(batch.part(half), spec)
    for name, _, unit in spec.gives:
        end = len(half) if unit == "samples" else int(batch.offsets[len(half)])
        whole, part = given[name][:end], alone[name]
        same = np.isclose(whole.astype(np.float64), part.astype(np.float64), rtol=1e-4, atol=1e-6)
        if not same.all():
            place = int(np.flatnonzero(~same)[0])
            function = UserFunction.load("map", spec.function, spec.options, spec.reads)
            raise function.refuse(
                "says per_sample=True, but what it gives for a sample depends on other samples of "
                "the batch, or on chance",
                found=f"'{name}' of {unit[:-1]} {place} is {whole[place]:.6g} among "
                f"{len(batch.groups)} samples, {part[place]:.6g} among {len(half)}",
                expected="numbers of a sample that depend on that sample alone",
                hint="omit per_sample; flowrl.testing.check_map checks it without a run",
            )
