"""Data classes whose methods are written late are those of the standard library."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import data_classes

Decorator = Callable[..., Callable[[type], Any]]

OPTIONS = (
    {"frozen": True, "slots": True, "kw_only": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "kw_only": True},
    {"slots": True},
    {"slots": True, "kw_only": True, "eq": False},
    {"kw_only": True, "repr": False},
    {"frozen": True, "eq": False},
    {"frozen": True, "kw_only": True, "order": True},
    {},
)


def made(dataclass: Decorator, options: dict[str, bool]) -> Any:
    @dataclass(**options)
    class Sized:
        """Has fields of every sort."""

        devices: int
        name: str = "h100"
        links: list[int] = field(default_factory=list)
        note: str = field(default="", compare=False, repr=False)
        twice: int = field(init=False)
        cost: float = field(default=1.5, kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.devices)

    return Sized


def both(options: dict[str, bool]) -> tuple[Any, Any]:
    return made(dataclasses.dataclass, options), made(data_classes.dataclass, options)


def outcome(call: Callable[[], object]) -> object:
    """What a call gives, or how it fails."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_everything_that_objects_do_is_as_in_the_standard_library(options):
    seen = []
    for cls in both(options):
        one = cls(devices=2, links=[1], note="a")
        same, other = cls(devices=2, links=[1], note="b"), cls(devices=3)
        plain = dataclasses.make_dataclass("Plain", ["devices"])(devices=2)
        seen.append(
            (
                "0x" in repr(one) or repr(one),
                [(f.name, f.type, f.default, f.kw_only, f.init) for f in fields(one)],
                (one == one, one == same, one == other, one != other, one == plain),
                asdict(replace(one, devices=5, cost=2.0)),
                outcome(lambda other=other: hash(replace(other, links=())))
                if cls.__hash__
                else None,
                isinstance(getattr(one, "__dict__", None), dict),
                getattr(cls, "__slots__", None),
                cls.__match_args__,
                str(inspect.signature(cls)),
                cls.__init__.__annotations__,
                cls.__init__.__qualname__.rpartition(".")[2],
                {
                    name: getattr(cls.__dataclass_params__, name)
                    for name in ("frozen", "eq", "repr")
                },
            )
        )
    if not options.get("eq", True):
        seen = [(*one[:4], None, *one[5:]) for one in seen]  # hashes of objects
    assert seen[0] == seen[1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mistakes_are_told_as_by_the_standard_library(options):
    def assigned(one: Any, name: str) -> None:
        setattr(one, name, 1)

    def deleted(one: Any) -> None:
        del one.name

    seen = []
    for cls in both(options):
        one = cls(devices=2)
        calls = [
            cls,
            lambda cls=cls: cls(devices=1, size=2),
            lambda cls=cls: cls(1, "a100", [], "", 2),
            lambda one=one: assigned(one, "devices"),
            # Of frozen classes with slots, that of Python 3.11 fails in another way than it means.
            lambda one=one: (
                options.get("frozen") or assigned(one, "other") or hasattr(one, "other")
            ),
            lambda one=one: deleted(one) or hasattr(one, "name"),
            lambda one=one: one < one,
        ]
        seen.append([outcome(call) for call in calls])
    assert seen[0] == seen[1]


def test_a_class_that_says_a_method_itself_keeps_it():
    def own(dataclass: Decorator) -> Any:
        @dataclass(frozen=True, slots=True, kw_only=True)
        class Named:
            name: str
            rest: int = 0

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Named) and other.name == self.name

            def __repr__(self) -> str:
                return f"<{self.name}>"

        return Named

    for dataclass in (dataclasses.dataclass, data_classes.dataclass):
        cls = own(dataclass)
        one, same = cls(name="a", rest=1), cls(name="a", rest=2)
        assert (one == same, repr(one)) == (True, "<a>")
        assert hash(one) == hash(("a", 1))

    @data_classes.dataclass(frozen=True)
    class Hashed:
        name: str

        def __hash__(self) -> int:
            return 7

    assert hash(Hashed("a")) == 7


def test_fields_and_methods_are_inherited():
    @data_classes.dataclass(frozen=True, slots=True, kw_only=True)
    class Base:
        a: int
        b: int = 2

    @data_classes.dataclass(frozen=True, slots=True, kw_only=True)
    class Derived(Base):
        b: int = 3
        c: int = 4

    class Plain(Derived):
        pass

    one = Derived(a=1)
    assert (one.a, one.b, one.c) == (1, 3, 4)
    assert repr(Plain(a=1)).endswith("Plain(a=1, b=3, c=4)")
    assert (one == Derived(a=1), one == Base(a=1), hash(one)) == (True, False, hash((1, 3, 4)))
    for name in ("a", "c", "d"):
        with pytest.raises(FrozenInstanceError, match=f"field '{name}'"):
            setattr(one, name, 1)
    with pytest.raises(FrozenInstanceError):
        Plain(a=1).a = 2
    with pytest.raises(TypeError, match="frozen"):

        @data_classes.dataclass(slots=True)
        class _Open(Base):
            d: int = 0


def test_what_the_standard_library_refuses_is_refused():
    with pytest.raises(ValueError, match="mutable default"):

        @data_classes.dataclass(slots=True)
        class _Shared:
            names: list[str] = []  # noqa: RUF012

    with pytest.raises(TypeError, match="__setattr__"):

        @data_classes.dataclass(frozen=True)
        class _Assigned:
            a: int

            def __setattr__(self, name: str, value: object) -> None: ...


@data_classes.dataclass(frozen=True, slots=True, kw_only=True)
class Travels:
    """Of a module, so that it can be pickled."""

    a: int
    inner: Travels | None = None


def test_objects_travel_between_processes_and_show_themselves_inside_themselves():
    one = Travels(a=1, inner=Travels(a=2))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301
    object.__setattr__(one, "inner", one)
    assert repr(one) == "Travels(a=1, inner=...)"


def test_no_method_is_compiled_before_it_is_used(monkeypatch):
    names: list[str] = []
    plain = data_classes._compiled
    monkeypatch.setattr(
        data_classes,
        "_compiled",
        lambda cls, name, *rest: names.append(name) or plain(cls, name, *rest),
    )

    @data_classes.dataclass(frozen=True, slots=True, kw_only=True)
    class Late:
        a: int

    assert names == []
    for _ in range(2):
        assert Late(a=1) == Late(a=1)
    assert {Late(a=1)} == {Late(a=1)}
    assert names == ["__init__", "__eq__", "__hash__"]


def test_all_of_flowrl_makes_its_data_classes_so():
    root = Path(flowrl.__file__).parent
    taken = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imports = isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
            if imports and "dataclass" in {name.name for name in node.names}:
                taken.add(path.relative_to(root).as_posix())
    assert taken == {"data_classes.py"}
