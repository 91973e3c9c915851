"""The one walk over what user code holds: closures, defaults, global names, attributes, slots, classes, containers.

Networks that a loss uses, random generators, and state that a shard leaves behind are all found by it. It visits what
functions mention first, then the rest of what their objects hold; each object once, the nearest ones first. It does not
go into libraries: neither into the global names of their functions nor into their classes and modules, nor into what
Python's own library makes (loggers, locks), but for containers and their kin.

It imports no torch, so that the launcher can use it; torch's classes are known where torch is imported.
"""

import dis
import functools
import gc
import itertools
import operator
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import islice
from typing import Any, Final, NamedTuple, final

from lockstep.processes.user_line import LIBRARIES

NUM_OBJECTS: Final = 512
"""The most objects that are visited from one root."""
NUM_ITEMS: Final = 64
"""The most items visited of an object or a container: a longer one holds data."""
CONTAINERS: Final = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
"""Not their other subclasses, which may refuse to be written."""
_CALLED = ("__call__", "forward", "backward", "__getitem__", "__getitems__")
"""Methods that are called without being mentioned."""
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), slice, types.CodeType})
_MADE_BY_PYTHON = frozenset(
    {"argparse", "builtins", "collections", "functools", "itertools", "queue", "types", "weakref", "_thread"}
)
"""The modules of Python's library whose objects are visited."""
_OURS = ("lockstep.engine.", "lockstep.comm.", "lockstep.reduce.", "lockstep.recording.", "torch.distributed.")
"""Where classes are of which nothing is visited, as a loss function may hold its trainer or a group."""
_ITERATORS: Final[tuple[type, ...]] = (
    *(enumerate, filter, map, reversed, zip),
    *(each for each in vars(itertools).values() if isinstance(each, type)),
    *(type(iter(())), type(iter([])), type(iter({})), type(iter({}.values())), type(iter({}.items()))),
    type(iter(range(0))),
)
CACHED_FUNCTION: Final = type(functools.cache(len))
_KINDS_OF_PYTHON = frozenset({ContextVar, types.GeneratorType, CACHED_FUNCTION, *_ITERATORS})
_IN_CLASS_BODY = frozenset({"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
"""How the body of a class, and annotations there, read a name that may be global."""
_UNNAMED = frozenset({"", "self", "func"})
"""Steps that lead to the same thing: from a method to its object, from an object to its class."""


class Held(NamedTuple):
    path: str
    """The root's own, and the names from there on, each with a dot before it."""
    value: Any
    holder: Any
    """Where it can be set again: a dictionary, a list, a cell, a class, an object with slots; None for a tuple's."""
    key: Any
    depth: int
    """How many names lead to it from its root."""
    is_used: bool
    """Whether code mentions it. Otherwise it is only held by an object that is used."""


def set_again(held: Held, value: Any) -> None:
    if isinstance(held.holder, types.CellType):
        held.holder.cell_contents = value
    elif isinstance(held.holder, ContextVar):
        held.holder.set(value)
    elif isinstance(held.holder, dict | list | deque):
        held.holder[held.key] = value
    elif held.holder is not None:
        setattr(held.holder, held.key, value)


class _Part(NamedTuple):
    name: object
    value: Any
    holder: Any = None
    key: Any = None
    names: Sequence[str] | None = None
    """What code mentions of it; None for all."""
    is_used: bool = True


class _Mentioned(NamedTuple):
    """Of an object only what code mentions, and the function that is called on it."""

    owner: Any
    names: Sequence[str]
    function: types.FunctionType | None = None


@final
class Walk:
    """A walk from some roots, each with the path that theirs begin with. It may be made several times.

    What is of a class in `stops_at` is yielded and not entered; with `only_users` neither is what a class of a library
    has made, networks apart. With `only_used` the walk ends with what code mentions.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        *,
        stops_at: tuple[type, ...] = (),
        only_used: bool = False,
        only_users: bool = False,
    ) -> None:
        self._roots = list(roots)
        self._stops_at = stops_at
        self._only_used = only_used
        self._only_users = only_users
        self._is_library: dict[str, bool] = {}
        self._places: list[tuple[Callable[[], Iterable[Any]], list[Any]]] = []
        self.dictionaries: set[int] = set()
        """Of those that the last walk has entered, attributes of objects included, the identities."""
        torch = sys.modules.get("torch")
        self._module_class: type = getattr(getattr(torch, "nn", None), "Module", Walk)
        self._leaves = _ATOMS | ({torch.Tensor, torch.nn.Parameter} if torch is not None else set())

    def __iter__(self) -> Iterator[Held]:
        self._places, self.dictionaries = [], set()
        seen: set[object] = {_identify(root) for _, root in self._roots}
        for path, root in self._roots:
            yield (first := Held(path, root, None, None, 0, True))
            waiting, later = deque([] if self._is_end(root) else [first]), deque[Held]()
            for _ in range(NUM_OBJECTS):
                if not waiting and not later:
                    break
                for held, entered in self._within(waiting.popleft() if waiting else later.popleft()):
                    if not isinstance(held.value, _Mentioned):
                        yield held
                    for each in entered:
                        key = _identify(each.value)
                        if key not in seen:
                            seen.add(key)
                            (waiting if each.is_used else later).append(each)

    def _within(self, within: Held) -> Iterator[tuple[Held, Sequence[Held]]]:
        """Return what a value holds, and as what each is to be entered: what is mentioned of it, and all the rest."""
        for part in self.parts(within.value):
            is_used = within.is_used and part.is_used
            if self._only_used and not is_used:
                continue
            path = f"{within.path}.{part.name}" if part.name != "" else within.path
            depth = within.depth + (part.name not in _UNNAMED)
            held = Held(path, part.value, part.holder, part.key, depth, is_used)
            if self._is_end(part.value):
                yield held, ()
            elif part.names is None or self._is_used_whole(part.value):
                yield held, (held,)
            else:
                mentioned = held._replace(value=_Mentioned(part.value, part.names))
                yield held, (mentioned,) if self._only_used else (mentioned, held._replace(is_used=False))

    def has_new_objects(self) -> bool:
        """Whether any object, but for numbers, texts and tensors, is where the walk or this has seen another.

        It takes a part of the time of a walk, for it only looks at what was visited, and enters nothing.
        """
        found = False
        for number, (read, objects) in enumerate(self._places):
            now = self._objects(read)
            if len(now) != len(objects) or not all(map(operator.is_, now, objects)):
                self._places[number] = read, now
                found = True
        return found

    def _objects(self, read: Callable[[], Iterable[Any]]) -> list[Any]:
        return [value for value in read() if type(value) not in self._leaves]

    def _note_place(self, read: Callable[[], Iterable[Any]]) -> None:
        self._places.append((read, self._objects(read)))

    def _is_end(self, value: Any) -> bool:
        return type(value) in self._leaves or isinstance(value, self._stops_at)

    def _is_used_whole(self, value: Any) -> bool:
        """Whether all of a value is used where it is mentioned, not only some of its attributes."""
        kinds = (dict, list, tuple, deque, partial, types.FunctionType, types.MethodType, self._module_class)
        return isinstance(value, kinds)

    def _is_of_library(self, module: str) -> bool:
        """Whether a module, by its name, is installed, or Python's own."""
        known = self._is_library.get(module)
        if known is None:
            file = getattr(sys.modules.get(module), "__file__", None) or ""
            top = module.partition(".")[0]
            known = top in sys.stdlib_module_names or file.startswith(LIBRARIES)
            self._is_library[module] = known
        return known

    # -- The parts of a value ------------------------------------------------------------------------------------------

    def parts(self, value: Any) -> Iterator[_Part]:
        kind = type(value)
        if kind is _Mentioned:
            yield from self._mentioned(*value)
        elif kind is types.FunctionType:
            yield from self._parts_of_function(value)
        elif kind is types.MethodType:
            yield _Part("self", value.__self__, names=names_in_code(getattr(value.__func__, "__code__", None)))
            yield _Part("func", value.__func__)
        elif isinstance(value, partial):
            yield from (_Part(name, getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, type):
            yield from self._parts_of_class(value)
        elif isinstance(value, dict):
            yield from self._parts_of_dictionary(value)
        elif isinstance(value, list | tuple | deque):
            yield from self._parts_of_sequence(value)
        elif kind in _KINDS_OF_PYTHON or isinstance(value, weakref.ref):
            yield from _parts_inside(value)
        elif not isinstance(value, types.ModuleType):
            yield from self._parts_of_object(value)

    def _parts_of_dictionary(self, value: dict[Any, Any]) -> Iterator[_Part]:
        holder = value if type(value) in CONTAINERS else None
        self._note_place(lambda: list(islice(value.values(), NUM_ITEMS)))
        for number, (key, part) in enumerate(list(islice(value.items(), NUM_ITEMS))):
            # Not the text of any key: an object's has its address, which is another one in each process, and that of a
            # parameter, as an optimizer's state has for keys, its values.
            yield _Part(str(key) if isinstance(key, str | int) else str(number), part, holder, key)
        if holder is None:
            yield from self._attributes(value)

    def _parts_of_sequence(self, value: Sequence[Any]) -> Iterator[_Part]:
        holder = value if type(value) in CONTAINERS else None
        if type(value) is not tuple:
            self._note_place(lambda: list(islice(value, NUM_ITEMS)))
        items = list(islice(value, NUM_ITEMS))  # at once: another thread may change it
        yield from (_Part(number, part, holder, number) for number, part in enumerate(items))

    def _parts_of_function(self, function: types.FunctionType) -> Iterator[_Part]:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._note_place(partial(contents_of, cell))
            yield from (_Part(name, value, cell) for value in contents_of(cell))
        if vars(function):
            yield from self._attributes(function)
        if code.co_filename.startswith(LIBRARIES):
            return
        yield from (_Part(f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
        yield from (_Part(name, value) for name, value in (function.__kwdefaults__ or {}).items())
        found, names = function.__globals__, global_names(code)
        self._note_place(lambda: map(found.get, names))
        for name in names:
            if name in found and not self._is_libraries_own(found[name]):
                yield _Part(name, found[name], found, name, names_in_code(code))

    def _is_libraries_own(self, value: Any) -> bool:
        """Whether a global name is a library's module, class or function."""
        if isinstance(value, types.ModuleType):
            return self._is_of_library(value.__name__)
        if isinstance(value, type):
            return self._is_of_library(_module_of(value))
        is_function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        return is_function and self._is_of_library(_module_of(value))

    def _parts_of_object(self, value: Any) -> Iterator[_Part]:
        kind = type(value)
        home, is_module = _module_of(kind), isinstance(value, self._module_class)
        top, is_library = home.partition(".")[0], self._is_of_library(home)
        is_pythons = top in sys.stdlib_module_names
        if is_pythons and top not in _MADE_BY_PYTHON:
            return
        if is_library and not is_pythons and not is_module and (self._only_users or home.startswith(_OURS)):
            return
        calls = [] if is_library or is_module else self._calls(value, "__call__")
        yield from calls
        parts = self._parts_of_module(value) if is_module else self._attributes(value)
        yield from (part._replace(is_used=part.is_used and not calls) for part in parts)
        if not is_library:
            yield _Part("", kind, is_used=False)

    def _attributes(self, value: Any) -> Iterator[_Part]:
        """Return what an object has in its `__dict__` and in its slots."""
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.dictionaries.add(id(held))
            self._note_place(lambda: list(islice(held.values(), NUM_ITEMS)))
            yield from (_Part(name, part, held, name) for name, part in list(islice(held.items(), NUM_ITEMS)))
        if self._is_of_library(_module_of(type(value))):
            return
        slots = [
            name
            for each in type(value).__mro__
            for name, member in vars(each).items()
            if isinstance(member, types.MemberDescriptorType)
        ]
        if slots:
            self._note_place(lambda: [getattr(value, name, None) for name in slots])
            yield from (_Part(name, getattr(value, name), value, name) for name in slots if hasattr(value, name))

    @cached_property
    def _registries(self) -> dict[str, Any]:
        found: dict[str, Any] = vars(self._module_class())
        return found

    def _parts_of_module(self, module: Any) -> Iterator[_Part]:
        """Return a network's attributes, children and hooks, but not its parameters and buffers."""
        held, registries = vars(module), self._registries
        is_users = not self._is_of_library(_module_of(type(module)))  # others write no attributes
        self.dictionaries.add(id(held))
        if is_users:
            self._note_place(lambda: list(held.values())[len(registries) :])  # the registries come first
        for name, part in list(held.items()):
            if name not in registries:
                yield _Part(name, part, held, name)
            elif isinstance(part, dict) and part:
                if is_users:
                    self._note_place(partial(list, part.values()))
                yield from self._parts_of_registry(name, part)

    def _parts_of_registry(self, name: str, registry: dict[Any, Any]) -> Iterator[_Part]:
        for number, (key, part) in enumerate(list(registry.items())):
            if isinstance(part, self._module_class):
                yield _Part(f"{name}.{key}", part, registry, key)
            elif type(part) not in self._leaves:  # hooks, by numbers that may be others on each worker
                yield _Part(f"{name}.{number}", part)
            elif part is not None and vars(part):  # what somebody has set on a parameter; of most there is nothing
                yield _Part(key, vars(part))

    def _parts_of_class(self, kind: type) -> Iterator[_Part]:
        for each in kind.__mro__:
            if self._is_of_library(_module_of(each)):
                continue
            held = vars(each)
            names = [name for name in held if not name.startswith("__") or name in _CALLED or name == "__init__"]
            self._note_place(partial(list, held.values()))
            for name in names:
                part = held[name]
                functions = _functions_of(part)
                yield from (_Part("", function, is_used=name in _CALLED) for function in functions)
                if not functions and not isinstance(part, types.MemberDescriptorType):
                    yield _Part(name, part, each, name)

    def _mentioned(
        self, owner: Any, names: Sequence[str], function: types.FunctionType | None = None
    ) -> Iterator[_Part]:
        """Return of an object the attributes that code mentions, and the methods, which are called on it."""
        if function is not None:
            yield from self._parts_of_function(function)
        held = getattr(owner, "__dict__", {})
        for name in names:
            if name in held and not isinstance(owner, type):
                if not self._is_libraries_own(held[name]):
                    yield _Part(name, held[name], held, name, names)
            elif not isinstance(owner, types.ModuleType):
                yield from self._calls(owner, name, names)

    def _calls(self, owner: Any, name: str, names: Sequence[str] = ()) -> list[_Part]:
        """Return what the user's classes have of a name: methods with the object they are called on, or values."""
        found: list[_Part] = []
        for each in (owner if isinstance(owner, type) else type(owner)).__mro__:
            if name in vars(each) and not self._is_of_library(_module_of(each)):
                member = vars(each)[name]
                functions = _functions_of(member)
                found += [_Part("", _Mentioned(owner, names_in_code(one.__code__), one)) for one in functions]
                if isinstance(member, types.MemberDescriptorType):
                    found += [_Part(name, getattr(owner, name), owner, name)] if hasattr(owner, name) else []
                elif not functions:
                    found.append(_Part(name, member, each, name, names))
        return found


def _module_of(value: Any) -> str:
    return str(getattr(value, "__module__", ""))  # a class that was made without globals has none


def _identify(value: Any) -> object:
    if isinstance(value, types.MethodType):  # it is made anew each time that it is looked up
        return id(value.__self__), id(value.__func__)
    if isinstance(value, _Mentioned):
        return id(value.owner), value.function or value.names
    return id(value)


def _parts_inside(value: Any) -> Iterator[_Part]:
    """Return what an object of Python's own holds without an attribute for it."""
    if isinstance(value, weakref.ref):
        yield _Part("", value())
    elif isinstance(value, ContextVar):
        yield from (_Part("", part, value) for part in contents_of(value))
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield from (_Part(name, part) for name, part in (frame.f_locals if frame is not None else {}).items())
    else:
        for number, part in enumerate(gc.get_referents(value)):
            # Not the lists and dictionaries of an iterator or a cache themselves: nobody else may write them.
            if type(part) in {list, dict}:
                items = list(part.values() if isinstance(part, dict) else part)[:NUM_ITEMS]
                yield from (_Part(f"{number}.{index}", item) for index, item in enumerate(items))
            elif not isinstance(part, type):
                yield _Part(number, part)


def contents_of(cell: types.CellType | ContextVar[Any]) -> tuple[Any, ...]:
    """Return what a variable of a closure, or of a context, holds; nothing if it has no value yet."""
    try:
        return (cell.cell_contents if isinstance(cell, types.CellType) else cell.get(),)
    except (ValueError, LookupError):
        return ()


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function, and the functions and classes inside of it, use, in that order."""
    names: dict[str, None] = {}
    own: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            own.add(step.argval)  # an attribute of the class whose body this is
        elif step.opname.endswith("_GLOBAL") or (step.opname in _IN_CLASS_BODY and step.argval not in own):
            names[step.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(global_names(constant))
    return tuple(name for name in names if name != "__name__")


def names_in_code(code: types.CodeType | None) -> tuple[str, ...]:
    """Return the names that a function mentions, in the functions within it too."""
    found: dict[str, None] = {}
    waiting = [code] if code is not None else []
    while waiting:
        each = waiting.pop(0)
        found |= dict.fromkeys(each.co_names)
        waiting += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    return tuple(found)


def _functions_of(member: Any) -> list[types.FunctionType]:
    """Return the functions of a method, however it is decorated, or of a property."""
    found = [member]
    if isinstance(member, staticmethod | classmethod):
        found = [member.__func__]
    elif isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, cached_property):
        found = [member.func]
    return [each for each in found if isinstance(each, types.FunctionType)]
