"""Errors of a program that name what a role or a module of flowrl does not have."""

from __future__ import annotations

from types import ModuleType

from flowrl.errors import TraceError
from flowrl.program.parameters import ROLE_KINDS
from flowrl.program.roles import Role
from flowrl.specs.names import missing_name
from flowrl.synonyms import meanings
from flowrl.user_lines import explained
from flowrl.wording import listing, suggestion


def program_error(subject: str, error: BaseException, *, otherwise: str) -> TraceError:
    """Returns the message for an error of the user's own lines.

    Args:
        subject: What raised it: `workflow 'mine'`.
        error: The error.
        otherwise: The place where none of the user's lines raised it.
    """
    message = explained(subject, error, otherwise=otherwise)
    if not isinstance(error, AttributeError):
        return message
    owner, asked = error.obj, str(error.name)
    if isinstance(owner, Role):
        names = owner.operations()
        message.what = f"{owner.described} is {owner.kind}, which has no '{asked}'"
        message.expected = f"one of {listing(names)}" if names else "fl.interact(actor, game, ...)"
        having = [f"fl.{kind.__name__}" for kind in ROLE_KINDS if asked in kind.operations()]
        annotate = f"annotate it {owner.name}: {' or '.join(having)}" if having else None
        meant = next(iter(meanings("role", asked)), asked)
        message.hint = suggestion(meant, names) or annotate or message.hint
    elif isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "flowrl":
        missing = missing_name(owner.__name__, asked, getattr(owner, "__all__", dir(owner)))
        message.what = missing.what
        message.expected = f"one of {listing(missing.names)}"
        message.hint = missing.hint or "write one of them"
    return message
