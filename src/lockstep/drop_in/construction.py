"""Torch's classes construct ours, for code that holds a reference to torch's class in a place other than a module.

That may be an attribute of a class, a default argument, a dictionary, or a subclass that was defined before.
"""

import functools
import gc
from abc import ABCMeta
from collections.abc import Iterable
from typing import Any, final

from lockstep.drop_in.replacements import ReplacedClass


@final
class Redirection:
    """Makes torch's class construct objects of ours, and gives its subclasses ours as a base."""

    def __init__(self, replaced: ReplacedClass) -> None:
        self._replaced = replaced
        self._init: Any = None
        self._moved: list[tuple[type[Any], tuple[type[Any], ...]]] = []

    def apply(self, existing: frozenset[type[Any]]) -> list[type[Any]]:
        """Redirect; return the subclasses that keep torch's class as a base.

        Those in `existing`, of which there are objects, do.
        """
        torchs, ours = self._replaced.torchs, self._replaced.ours
        original = self._init = torchs.__init__

        @functools.wraps(original)
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            if type(instance) is not torchs:  # super().__init__() of a subclass
                original(instance, *args, **kwargs)
                return
            object.__setattr__(instance, "__class__", ours)
            ours.__init__(instance, *args, **kwargs)

        torchs.__init__ = construct
        kept = [each for each in _foreign_subclasses(torchs) if not self._move(each, existing)]
        _forget_instance_checks(ours)
        return kept

    def _move(self, subclass: type[Any], existing: frozenset[type[Any]]) -> bool:
        torchs, ours = self._replaced.torchs, self._replaced.ours
        bases = subclass.__bases__
        if any(issubclass(each, subclass) for each in existing):
            return False
        try:
            subclass.__bases__ = tuple(ours if base is torchs else base for base in bases)
        except TypeError:  # its other bases do not go together with ours
            return False
        self._moved.append((subclass, bases))
        return True

    def undo(self) -> None:
        """Give torch's class, and its subclasses, back what they had."""
        self._replaced.torchs.__init__ = self._init
        for subclass, bases in self._moved:
            subclass.__bases__ = bases
        self._moved.clear()
        _forget_instance_checks(self._replaced.ours)


def find_existing(classes: Iterable[ReplacedClass]) -> frozenset[type[Any]]:
    """Return those of torch's classes, and of their subclasses that are not ours, of which there are objects."""
    pairs = [(each.torchs, each.ours) for each in classes]
    # Not isinstance, which would run the code of proxies.
    types = {type(each) for each in gc.get_objects()}
    return frozenset(
        each for each in types if any(issubclass(each, torchs) and not issubclass(each, ours) for torchs, ours in pairs)
    )


def _foreign_subclasses(torchs: type[Any]) -> list[type[Any]]:
    return [each for each in type.__subclasses__(torchs) if not each.__module__.startswith("lockstep.")]


def _forget_instance_checks(ours: type[Any]) -> None:
    """Clear the cache of isinstance, which torch's wrapper has because it is an abstract class."""
    for each in ours.__mro__:
        if isinstance(each, ABCMeta):
            abstract: Any = each
            abstract._abc_caches_clear()  # noqa: SLF001 - Python's name for it
