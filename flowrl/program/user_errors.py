"""Errors that the user's own program raises, as messages with its line and what to write."""

from __future__ import annotations

import dis
import re
import traceback
from types import CodeType, ModuleType

from flowrl.errors import TraceError
from flowrl.graph.ir import SourceRef
from flowrl.program.operation import bad_call
from flowrl.program.parameters import ROLE_KINDS
from flowrl.program.roles import Environment, Role
from flowrl.program.source import is_flowrl, is_installed, is_ours
from flowrl.specs import Sampling, grammar, kl, loss
from flowrl.specs.names import arguments_of, missing_name
from flowrl.wording import listing, suggestion

__all__ = ["explained", "user_line_of"]

_MOST_CALLS = 3
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


def explained(subject: str, error: BaseException, *, otherwise: str) -> TraceError:
    """Returns the message for an error of the user's own lines.

    Args:
        subject: What raised it: `workflow 'mine'`.
        error: The error.
        otherwise: The place where none of the user's lines raised it.
    """
    text = str(error).strip().splitlines()
    what = f"{subject} raised {type(error).__name__}: {text[0] if text else ''}"
    message = TraceError(
        what.rstrip(": "),
        where=user_line_of(error) or otherwise,
        found=_calls(error),
        hint="correct this line; with --debug the command shows the whole traceback",
    )
    message.user_frames = _traceback(error)
    if isinstance(error, AttributeError):
        _name_what_there_is(error, message)
    elif isinstance(error, NameError):
        _say_where_it_is_assigned(error, message)
    elif isinstance(error, TypeError):
        _say_how_it_is_called(error, message)
    return message


# Lines of the traceback.


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]


def user_line_of(error: BaseException) -> str | None:
    """Returns `file:line` of the deepest line of an error's traceback in the user's own files."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return str(SourceRef(file=error.filename, line=error.lineno))
    own = [f for f in _frames(error) if not is_installed(f.filename)]
    return str(SourceRef(file=own[-1].filename, line=own[-1].lineno or 0)) if own else None


def _traceback(error: BaseException) -> str:
    """Returns the traceback as Python prints it, from the user's first frame on, without ours."""
    frames = _frames(error)
    start = next((i for i, f in enumerate(frames) if not is_flowrl(f.filename)), 0)
    head = ["Traceback (most recent call last):\n"] if frames else []
    shown = traceback.format_list(frames[start:])
    return "".join([*head, *shown, *traceback.format_exception_only(error)]).rstrip()


def _calls(error: BaseException) -> str | None:
    """Returns the line that raised as it is written, and the user's own lines that led there."""
    frames = [f for f in _frames(error) if not is_installed(f.filename)]
    if not frames:
        return None
    *outer, last = frames
    calls = [
        f"{SourceRef(file=f.filename, line=f.lineno or 0)} (in {f.name})"
        for f in reversed(outer[-_MOST_CALLS:])
    ]
    return ", called from ".join([f"`{last.line}`", *calls])


# What to write, by the kind of error.


def _say_where_it_is_assigned(error: NameError, message: TraceError) -> None:
    """Names the later line on which a name gets its value."""
    quoted = re.search(r"'([^']+)'", str(error))
    name = error.name or (quoted.group(1) if quoted else "")
    later = _assigned_below(error, name) if name else None
    if later is not None:
        message.what = f"{message.what.split(': ')[0]}: '{name}' has no value yet on this line"
        message.expected = f"a value from a line before; {name} is assigned at {later}"
        message.hint = f"move line {later.line} above this one, or this one below it"


def _assigned_below(error: NameError, name: str) -> SourceRef | None:
    """Returns the first line that assigns the name below the one that raised the error.

    It is one of the function that raised it, or of the file's own lines.
    """
    last: tuple[CodeType, int] | None = None
    tb = error.__traceback__
    while tb is not None:
        if not is_ours(tb.tb_frame.f_code.co_filename):
            last = tb.tb_frame.f_code, tb.tb_lineno
        tb = tb.tb_next
    if last is None:
        return None
    code, raised_at = last
    line, lines = code.co_firstlineno, []
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname in _STORES and instruction.argval == name and line > raised_at:
            lines.append(line)
    return SourceRef(file=code.co_filename, line=min(lines)) if lines else None


_MISUSED = re.compile(r"(\w+)(?:\.__init__)?\(\) (.+)")


def _say_how_it_is_called(error: TypeError, message: TraceError) -> None:
    """Explains a specification with wrong arguments, or a role called like a function."""
    for kind in ROLE_KINDS:
        if str(error) == f"'{kind.__name__}' object is not callable":
            message.what = f"{kind.kind} is a role, and no function to call"
            message.hint = f"call an operation of it: {listing(_operations(kind))}"
        elif (
            kind.learns
            and str(error).startswith("unsupported operand")
            and (f"'{kind.__name__}'" in str(error))
        ):
            message.hint = "weights are averaged by reference.sync(actor, decay=0.99)"
    refused = _MISUSED.match(str(error))
    families = {"fl.loss": loss, "fl.kl": kl, "fl.grammar": grammar}
    functions = {
        f"{family}.{name}": getattr(module, name)
        for family, module in families.items()
        for name in module.__all__
    } | {"fl.Sampling": Sampling}
    for name, function in functions.items():
        if refused is not None and name.rpartition(".")[2] == refused[1]:
            call = (message.found or "").partition(f"{refused[1]}(")[2]
            given = re.findall(r"(\w+)\s*=(?!=)", call)
            unknown = re.findall(r"keyword argument '(\w+)'", refused[2])
            unknown = unknown or [each for each in given if each not in arguments_of(function)]
            wrong = bad_call(name, function, refused[2], unknown)
            message.what, message.expected, message.hint = wrong.what, wrong.expected, wrong.hint
            return


def _name_what_there_is(error: AttributeError, message: TraceError) -> None:
    """Lists what a role or a module of flowrl has, and suggests what was probably meant."""
    owner, asked = error.obj, str(error.name)
    if isinstance(owner, Role):
        message.what = f"{owner.described} is {owner.kind}, which has no '{asked}'"
        names = _operations(type(owner))
        having = [f"fl.{kind.__name__}" for kind in ROLE_KINDS if asked in _operations(kind)]
        message.expected = f"one of {listing(names)}" if names else "no operations of its own"
        message.hint = suggestion(_OPERATIONS.get(asked, asked), names) or (
            f"annotate it {owner.name}: {' or '.join(having)}" if having else "call one of them"
        )
        if isinstance(owner, Environment):
            message.hint = "an environment answers turns: fl.interact(actor, game, prompts)"
    elif isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "flowrl":
        missing = missing_name(owner.__name__, asked, getattr(owner, "__all__", dir(owner)))
        message.what = missing.what
        message.expected = f"one of {listing(missing.names)}"
        message.hint = missing.hint or "write one of them"


_OPERATIONS = {
    **dict.fromkeys(("act", "draw", "rollout", "sample", "complete"), "generate"),
    **dict.fromkeys(("forward", "log_prob", "log_probs", "logits"), "logprobs"),
    **dict.fromkeys(("backward", "fit", "learn", "optimize", "step", "train"), "update"),
    **dict.fromkeys(("compute", "evaluate", "grade", "judge", "rate", "reward", "verify"), "score"),
    **dict.fromkeys(("baseline", "predict"), "values"),
    **dict.fromkeys(("copy", "copy_from", "load", "refresh", "set_weights"), "sync"),
}
"""The names of roles' operations in other libraries."""


def _operations(kind: type[Role]) -> list[str]:
    return [n for n in dir(kind) if not n.startswith("_") and callable(getattr(kind, n, None))]
