"""Attributes that are written down late: when somebody reads them.

A native batch moves thousands of requests in a step, and few of them are looked at before the next. So it takes these
attributes away, once, and whoever reads one finds it missing: then the batch writes down what has happened since.
Taking away belongs to the step, writing down to the reading, and neither lets another thread in between: so any thread
may read at any time.

Knows nothing of: what the attributes mean.
"""

from collections.abc import Callable
from functools import lru_cache
from inspect import getattr_static
from types import MemberDescriptorType
from typing import Any, Protocol, TypeVar


class Keeper(Protocol):
    """Who has the attributes of many objects meanwhile."""

    def read(self, thing: object, name: str, /) -> Any:
        """Write them all down, and read one of them before it can be taken away again."""


Class = TypeVar("Class", bound=type)
_ABSENT = object()


def written_late(*names: str) -> Callable[[Class], Class]:
    """A class whose attributes of these names may be taken away; its attribute `keeper` says who has them then."""

    def get_late(self: object, name: str) -> object:
        keeper: Keeper | None = getattr(self, "keeper", None) if name in names else None
        return object.__getattribute__(self, name) if keeper is None else keeper.read(self, name)

    def get_state(self: object) -> object:
        """For copies, which nobody moves."""
        state: Any = object.__getstate__(self)
        match state:
            case (attributes, slots):
                return attributes, {**slots, "keeper": None}
            case attributes:
                return {**attributes, "keeper": None}

    def decorate(cls: Class) -> Class:
        setattr(cls, "__getattr__", get_late)  # noqa: B010  (so that type checkers still know a wrong name)
        setattr(cls, "__getstate__", get_state)  # noqa: B010
        setattr(cls, "late_names", names)  # noqa: B010
        setattr(cls, "late_getter", get_late)  # noqa: B010
        return cls

    return decorate


def late_name(request: object) -> str | None:
    """The attribute that may be taken away from a request; None where it cannot, and must always be up to date."""
    cls: Any = type(request)
    return _late_name(cls)


@lru_cache(maxsize=256)
def _late_name(cls: Any) -> str | None:
    """None too where a subclass has changed how its attributes are read or written: then it might not be missed."""
    names: tuple[str, ...] = getattr(cls, "late_names", ())
    if len(names) != 1 or getattr_static(cls, "__getattr__", None) is not getattr_static(cls, "late_getter"):
        return None
    own = ("__getattribute__", "__setattr__", "__delattr__")
    is_plain = all(getattr_static(cls, name) is getattr_static(object, name) for name in own)
    return names[0] if is_plain and all(_is_plain(cls, name) for name in (names[0], "keeper")) else None


def _is_plain(cls: type, name: str) -> bool:
    """Whether objects have such an attribute in a slot or in their dictionary, and nothing takes its place."""
    found = getattr_static(cls, name, _ABSENT)
    if found is _ABSENT:
        return any("__dict__" in base.__dict__ for base in cls.__mro__)
    return isinstance(found, MemberDescriptorType)
