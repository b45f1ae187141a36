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
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from flowrl.cli.app import app
from flowrl.errors import ConfigError, FlowError
from flowrl.wording import Warnings, listing, nearest, suggestion

__all__ = ["main"]

_MACHINE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ESTALE),
)
"""Errors that are no fault of flowrl: a full disk, a read-only folder, files that were removed."""

_HINTS = {
    errno.ENOSPC: "free some space; a run goes on with flowrl run --resume RUN",
    errno.EDQUOT: "free some space; a run goes on with flowrl run --resume RUN",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EACCES: "give a path that may be read and written (`ls -l` shows whose it is)",
    errno.EPERM: "give a path that may be read and written (`ls -l` shows whose it is)",
    errno.EROFS: "give a path that may be written",
}

# The parser's errors have no public base; the one that is public leads to it.
_PARSER_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

_EXTRA = re.compile(r"unexpected extra argument(?:\(s\)|s)? \((.*)\)")
_BOUND = re.compile(r"(greater|less) than or equal to (\S+)")


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
        hint = _HINTS.get(error.errno, "give another path, or correct this one")
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
    name = next((word for word in words if not word.startswith("-")), "")
    if name not in commands:
        return _no_command(name, words, commands)
    if inner := getattr(commands[name], "commands", None):
        given = [word for word in words if not word.startswith("-")][1:2]
        if given and given[0] in inner:
            name, commands = (
                f"{name} {given[0]}",
                {**commands, f"{name} {given[0]}": inner[given[0]]},
            )
        else:
            shown = "".join(f" {word}" for word in given)
            return ConfigError(
                f"there is no command `flowrl {name}{shown}`",
                where="command line",
                expected=f"one of {listing(inner)}",
                hint=(suggestion(given[0], inner) if given else None)
                or f"`flowrl {name} --help` describes each",
            )
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    text = str(getattr(error, "message", "")).strip()
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _no_option(str(option), name, commands, words)
    if kind == "MissingParameter":
        return _missing(param, name, commands)
    if kind == "BadOptionUsage":
        return _bad_use(str(option), name, commands, text)
    if param is not None:
        return _bad_value(param, name, words, text)
    extra = _EXTRA.search(text)
    return ConfigError(
        f"`flowrl {name}` takes no {extra[1]!r}" if extra else text[:1].lower() + text[1:],
        where=f"command line (flowrl {' '.join(words)})",
        expected=_usage(name, commands),
        hint=f"leave it out; `flowrl {name} --help` lists what there is",
    )


def _no_command(name: str, words: Sequence[str], commands: Mapping[str, Any]) -> ConfigError:
    if not name:
        return ConfigError(
            f"flowrl alone has no option {words[0]}",
            where=f"command line ({words[0]})",
            expected=f"a command: {listing(commands)}",
            hint="write the command first: `flowrl plan CONFIG`; `flowrl --help` lists all",
        )
    hint = suggestion(name, commands)
    if hint is None and name.endswith((".yaml", ".yml", ".json")):
        hint = f"write what to do with it first: `flowrl plan {name}` or `flowrl run {name}`"
    elif hint is None and ".py" in name:
        hint = f"write what to do with it first: `flowrl graph {name}`"
    return ConfigError(
        f"there is no command {name!r}",
        where="command line",
        expected=f"one of {listing(commands)}",
        hint=hint or "`flowrl --help` describes each",
    )


def _no_option(
    option: str, name: str, commands: Mapping[str, Any], words: Sequence[str]
) -> ConfigError:
    own = _options(commands[name])
    others = [command for command in commands if option in _options(commands[command])]
    value = _value_of(words, [option])
    hint = None
    # A correct key that is only written as an option is likelier than a similar option.
    if any(param.name == "overrides" for param in commands[name].params):
        hint = _as_override(option, value)
    if hint is None and others:
        hint = f"it belongs to `flowrl {others[0]}`; leave it out here"
    if hint is None and (match := nearest(option, own)) is not None:
        hint = f"did you mean {match}?"
    return ConfigError(
        f"`flowrl {name}` has no option {option}",
        where=f"command line ({option if value is None else f'{option} {value}'})",
        expected=f"one of {listing(own)}",
        hint=hint or f"leave it out; `flowrl {name} --help` lists what there is",
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


def _missing(param: Any, name: str, commands: Mapping[str, Any]) -> ConfigError:
    metavar = str(getattr(param, "metavar", None) or getattr(param, "name", "")).upper()
    example = {
        "why": "flowrl why runs/quickstart 0/3/1",
        "graph": "flowrl graph grpo",
        "diff": "flowrl diff grpo ppo",
    }
    return ConfigError(
        f"`flowrl {name}` needs {metavar}",
        where="command line",
        expected=_usage(name, commands),
        hint=f"for example `{example.get(name, f'flowrl {name} configs/quickstart.yaml')}`",
    )


def _bad_use(option: str, name: str, commands: Mapping[str, Any], text: str) -> ConfigError:
    """Returns the error for an option without its value, or with one that it does not take."""
    if "not take" in text:
        return ConfigError(
            f"{option} takes no value", where=f"command line ({option})", hint=f"write {option}"
        )
    metavar = next(
        (str(p.metavar) for p in commands[name].params if option in p.opts and p.metavar), "VALUE"
    )
    return ConfigError(
        f"{option} needs a value, and none follows it",
        where=f"command line ({option})",
        hint=f"write {option} {metavar}",
    )


def _bad_value(param: Any, name: str, words: Sequence[str], text: str) -> ConfigError:
    option = max(param.opts, key=len)
    value = _value_of(words, param.opts)
    expected = "a whole number" if "integer" in text else "a number" if "float" in text else None
    if (bound := _BOUND.search(text)) is not None:
        side = "least" if bound[1] == "greater" else "most"
        expected = f"a number of at {side} {bound[2].rstrip('.')}"
    default = getattr(param, "default", None)
    example = default if isinstance(default, int) and not isinstance(default, bool) else 8
    return ConfigError(
        f"this is no value of {option}",
        where=f"command line ({option})",
        found=None if value is None else repr(value),
        expected=expected or text,
        hint=f"write for example {option} {example}, or leave it out",
    )


def _options(command: Any) -> list[str]:
    """Returns the long names of a command's options."""
    return [
        option
        for param in command.params
        for option in param.opts
        if option.startswith("--") and option != "--debug"
    ]


def _usage(name: str, commands: Mapping[str, Any]) -> str:
    arguments = [
        str(p.metavar or p.name.upper())
        for p in commands[name].params
        if not any(option.startswith("-") for option in p.opts)
    ]
    return " ".join(["flowrl", name, *arguments, "[OPTIONS]"])


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
