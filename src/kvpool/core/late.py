"""Attributes that are written down late: when somebody reads them.

A native batch moves thousands of requests in a step, and few of them are looked at before the next. So it takes these
attributes away, once, and whoever reads one finds it missing: then the batch writes down what has happened since. Like
all that touches the cache, that is for the thread that makes the steps.

Knows nothing of: what the attributes mean.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Keeper(Protocol):
    """Who has the attributes of many objects meanwhile."""

    def settle(self) -> None:
        """Write them all down."""


Class = TypeVar("Class", bound=type)


def written_late(*names: str) -> Callable[[Class], Class]:
    """A class whose attributes of these names may be taken away; its slot `keeper` says who has them then."""

    def get_late(self: object, name: str) -> object:
        keeper: Keeper | None = getattr(self, "keeper", None) if name in names else None
        if keeper is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        keeper.settle()
        value: object = object.__getattribute__(self, name)
        return value

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
        return cls

    return decorate


def late_names(thing: object) -> tuple[str, ...]:
    """The attributes that may be taken away from it; none of most objects."""
    names: tuple[str, ...] = getattr(type(thing), "late_names", ())
    return names
