"""Runs a command line, and prints every error in one form, also of what the parser refuses.

Errors go to standard error in one to four lines. Exit codes: 0 for success, 2 for a mistake of the
user, 1 for a fault of flowrl, 130 after Ctrl-C.

The parser says what is wrong in its own words and shows how a command is used. People need to know
what to write instead: an option may be a key of the configuration, or belong to another command.
"""

from __future__ import annotations

import codecs
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from flowrl.cli.app import app
from flowrl.errors import ConfigError, FlowError
from flowrl.wording import Warnings, listing, nearest, suggestion

_MACHINE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ESTALE),
)
"""Errors that are no fault of flowrl: a full disk, a read-only folder, files that were removed."""

# The parser's errors have no public base; the one that is public leads to it.
_PARSER_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `flowrl` script; ends the process with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_outputs()
    with _warnings_shown():
        code = _run(arguments, debug="--debug" in arguments)
    sys.exit(code)


def _open_outputs() -> None:
    """Makes standard output and standard error accept any text, also where both are closed.

    A locale without Unicode would end a command at the first box-drawing line or name of a file.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            ascii_only = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="backslashreplace")


def _run(arguments: list[str], *, debug: bool) -> int:
    """Returns the exit code of a command line; prints every error on standard error."""
    try:
        try:
            ended = app(args=arguments, prog_name="flowrl", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return _without_reader()
    except BrokenPipeError:
        return _without_reader()
    except _PARSER_ERRORS as error:
        return _misused(error, arguments)
    except FlowError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            return _fault(error, debug)
        if debug:
            traceback.print_exc()
        hint = "give another path that may be read and written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space; a run goes on with flowrl run --resume RUN"
        shown = FlowError(str(error.strerror), where=str(error.filename or "a file"), hint=hint)
        print(f"error: {shown}", file=sys.stderr)
        return FlowError.exit_code
    except Exception as error:  # the last resort: a fault of flowrl, reported in a line
        return _fault(error, debug)
    return ended if isinstance(ended, int) else 0  # an exit code that a command ended with


def _misused(error: Exception, arguments: list[str]) -> int:
    """Prints the error for a command line that the parser refused."""
    if not arguments:
        print(error, file=sys.stderr)  # the help, which is what an empty command line asks for
        return FlowError.exit_code
    commands = getattr(typer.main.get_command(app), "commands", {})
    print(f"error: {_usage_error(error, commands, arguments)}", file=sys.stderr)
    return FlowError.exit_code


def _fault(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
    print("  to fix: run again with --debug and report the traceback", file=sys.stderr)
    return 1


def _without_reader() -> int:
    """Returns success where the reader of the output (head, less) has closed it."""
    # The interpreter flushes once more at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextmanager
def _warnings_shown() -> Iterator[None]:
    log = logging.getLogger("flowrl")
    handler = Warnings()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _usage_error(
    error: Exception, commands: Mapping[str, Any], words: Sequence[str]
) -> ConfigError:
    """Returns the error for a command line that the parser refused.

    Args:
        error: A usage error of the parser. Only attributes that all its releases have are read:
            `message`, and `option_name` or `param` for an option.
        commands: The parser's commands, by name.
        words: The command line.
    """
    given = [word for word in words if not word.startswith("-")]
    name, command = "flowrl", None
    while given and given[0] in commands:
        command = commands[given[0]]
        name, commands = f"{name} {given.pop(0)}", getattr(command, "commands", {})
    if command is None or commands:
        unknown = given[0] if given else ""
        return ConfigError(
            f"there is no command `{name} {unknown}`" if unknown else f"`{name}` needs a command",
            where="command line",
            expected=f"one of {listing(commands)}",
            hint=suggestion(unknown, commands)
            or "write the command first: `flowrl plan CONFIG`; `flowrl --help` describes each",
        )
    if type(error).__name__ == "NoSuchOption":
        return _no_option(str(getattr(error, "option_name", "")), name, command, words)
    param = getattr(error, "param", None)
    option = None if param is None else max(param.opts, key=len)
    text = (str(getattr(error, "message", "")) or str(error)).rstrip(".")
    arguments = [str(p.metavar or p.name.upper()) for p in _arguments(command)]
    return ConfigError(
        f"{option}: {text}" if option in _options(command) else text,
        where=f"command line (flowrl {' '.join(words)})",
        found=None if param is None else _value_of(words, param.opts),
        expected=" ".join([name, *arguments, "[OPTIONS]"]),
        hint=f"`{name} --help` describes its arguments and options",
    )


def _no_option(option: str, name: str, command: Any, words: Sequence[str]) -> ConfigError:
    own = _options(command)
    commands = getattr(typer.main.get_command(app), "commands", {})
    others = [each for each, other in commands.items() if option in _options(other)]
    value = _value_of(words, [option])
    hint = None
    # A correct key that is only written as an option is likelier than a similar option.
    if any(param.name == "overrides" for param in command.params):
        hint = _as_override(option, value)
    if hint is None and others:
        hint = f"it belongs to `flowrl {others[0]}`; leave it out here"
    if hint is None and (match := nearest(option, own)) is not None:
        hint = f"did you mean {match}?"
    return ConfigError(
        f"`{name}` has no option {option}",
        where=f"command line ({option if value is None else f'{option} {value}'})",
        expected=f"one of {listing(own)}",
        hint=hint or f"leave it out; `{name} --help` lists what there is",
    )


def _as_override(option: str, value: str | None) -> str | None:
    """Returns how to write a key of the configuration that was given as an option."""
    from flowrl.config.problems import homes_of
    from flowrl.config.schema import RunConfig
    from flowrl.config.section import takes_value

    key = option.lstrip("-").replace("-", "_")
    said = value or "VALUE"
    if key == "pin" and value is not None:
        return f"write it without dashes, as a key of the configuration: plan.pins.{value}"
    if "." in key:
        return f"overrides have no dashes: {option.lstrip('-')}={said}"
    homes = [home for home in homes_of(key, RunConfig) if home != "cluster" or key == "cluster"]
    # A section takes no value.
    homes = [home for home in homes if takes_value(tuple(home.split(".")), RunConfig)]
    if not homes or len(option) < len("--x"):
        return None
    written = " or ".join(f"{home}={said}" for home in homes[:2])
    return f"write it without dashes, as a key of the configuration: {written}"


def _arguments(command: Any) -> list[Any]:
    return [param for param in command.params if not param.opts[0].startswith("-")]


def _options(command: Any) -> list[str]:
    """Returns the long names of a command's options."""
    return [
        option
        for param in command.params
        for option in param.opts
        if option.startswith("--") and option != "--debug"
    ]


def _value_of(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Returns the value that follows an option on the command line."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            if equals:
                return value
            following = words[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("--") else None
    return None
