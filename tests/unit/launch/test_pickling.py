"""What is sent to a worker by name, and the message about what cannot be sent at all."""

import colorsys
import functools
import multiprocessing
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn.attention import SDPBackend

from lockstep.launch.messages import pack_call, pack_result
from lockstep.launch.pickling import pack

STATE = types.SimpleNamespace(name="a", tools=[1, {"lock": threading.Lock()}])

REFERENCES = {
    "aten": torch.ops.aten,
    "packet": torch.ops.aten.add,
    "overload": torch.ops.aten.add.Tensor,
    "default overload": torch.ops.aten.relu.default,
    "classes": torch.classes,
    "namespace of classes": torch.classes.quantized,
    "cudnn": torch.backends.cudnn,
    "module behind cudnn": vars(torch.backends.cudnn)["m"],
    "rnn": torch.backends.cudnn.rnn,
    "config": torch.compiler.config,
    "method of a config": getattr(torch.compiler.config, "patch"),  # noqa: B009 - it is made at run time
    "class of another name": SDPBackend,
    "member of it": SDPBackend.MATH,
    "built-in submodule": torch._C._functions,
    "default generator": torch.default_generator,
    "dtype": torch.float32,
    "function": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_what_belongs_to_torch_is_the_same_object_after_it_was_sent(name: str) -> None:
    assert pickle.loads(pack(REFERENCES[name])) == REFERENCES[name]


def test_a_module_that_no_name_leads_to_is_sent_by_value() -> None:
    made = types.ModuleType("made_at_run_time")
    made.number = 3  # type: ignore[attr-defined]
    assert pickle.loads(pack(made)).number == 3


def test_a_module_that_is_registered_to_go_by_value_does() -> None:
    cloudpickle.register_pickle_by_value(colorsys)
    try:
        assert pickle.loads(pack(colorsys)) is not colorsys
    finally:
        cloudpickle.unregister_pickle_by_value(colorsys)


def test_code_keeps_the_name_of_its_file_within_other_code_too() -> None:
    # cloudpickle 3.1.3 replaces it, so tracebacks of workers had no lines of source and no crash the user's place.
    def sent(x: int) -> Callable[[], int]:
        return lambda: x

    class Sent:
        def method(self) -> None:
            pass

    function, method = pickle.loads(pack((sent, Sent().method)))
    assert function(3)() == 3
    codes = [function.__code__, function(3).__code__, method.__code__]
    assert [code.co_filename for code in codes] == [__file__] * 3
    assert function.__code__ == sent.__code__


def test_a_cached_function_of_a_module_is_sent_by_name() -> None:
    assert pickle.loads(pack(cached)) is cached


@functools.cache
def cached(x: int) -> int:
    return x


def helper() -> object:
    return STATE


def calls_helper(run: object) -> object:
    return local(helper)() if run else None


def local(function: Any) -> Any:
    return function


def as_script(function: Any) -> Any:
    """The function as a script's own, which is sent by value."""
    names = ("STATE", "helper", "calls_helper", "local")
    space: dict[str, Any] = {"__name__": "__main__", "STATE": STATE}
    for name in names[1:]:
        space[name] = types.FunctionType(globals()[name].__code__, space, name)
        space[name].__module__ = "__main__"
    return space[function.__name__]


def message(function: Any, *args: object, **kwargs: object) -> str:
    with pytest.raises(TypeError) as caught:
        pack_call(function, args, kwargs)
    return str(caught.value)


def test_a_message_names_the_global_variable_and_the_function_that_uses_it() -> None:
    said = message(as_script(calls_helper))
    assert said.startswith(
        "`calls_helper` cannot be sent to the workers. The global variable `STATE.tools[1]['lock']` that `helper` uses "
        "is of type _thread.lock: cannot pickle '_thread.lock' object. "
    )
    assert "inside the function" in said


def test_a_message_names_the_argument() -> None:
    assert "The positional argument `args[1]` is of type _thread.lock" in message(calls_helper, 0, threading.Lock())
    assert "The argument `guard` is of type _thread.lock" in message(calls_helper, guard=threading.Lock())


def test_a_message_names_a_variable_around_the_function_a_default_and_an_attribute() -> None:
    lock = threading.Lock()
    queue = multiprocessing.get_context("spawn").Queue()

    def closure(run: object) -> object:
        return lock

    def default(run: object, guard: object = lock) -> object:
        return guard

    class Holder:
        shared = queue

        def __call__(self, run: object) -> None: ...

    assert "The variable `lock` around `closure` that it uses is of type _thread.lock" in message(closure)
    assert "A default value of an argument of `default`" in message(default)
    assert "The attribute `Holder.shared` is of type multiprocessing.queues.Queue" in message(Holder())
    queue.close()


def test_a_message_does_not_go_into_the_variables_of_a_library() -> None:
    compiled = torch.compile(lambda x: x, backend="eager")

    def uses_compiled(run: object) -> object:
        return compiled

    assert "The variable `compiled` around `uses_compiled`" in message(uses_compiled)


def test_a_message_names_the_part_of_a_result() -> None:
    with pytest.raises(TypeError, match=r"a dict that cannot be sent .*\. The `result\['x'\]` is of type _thread.lock"):
        pack_result({"x": threading.Lock()})


SCRIPT = """
import dataclasses
from typing import NamedTuple
VALUE, ITEMS, FACTOR, DEFAULT, KEYWORD, RESULT, OPTION, LIMIT, INNER = 1, [1, 2], 3, 4, 5, int, 6, 7, 8
hidden = 9
class Kind: pass
class Meta(type):
    def __new__(mcs, name, bases, space, **options):
        return super().__new__(mcs, name, bases, {**space, **options})
def decorate(function):
    return function
def main():
    class Outer(metaclass=Meta, option=OPTION):
        value: Kind = VALUE
        listed = [item * FACTOR for item in ITEMS]
        hidden = hidden
        @decorate
        def method(self, first=DEFAULT, *, second: Kind = KEYWORD) -> RESULT:
            return first + second
        class Inner:
            limit = LIMIT
            class Innermost:
                deep = lambda self: INNER
    @dataclasses.dataclass
    class Record:
        kind: Kind = dataclasses.field(default_factory=Kind)
        number: int = VALUE
    class Pair(NamedTuple):
        number: int = VALUE
    inner = Outer.Inner
    return [Outer.value, Outer.listed, Outer.hidden, Outer().method(), inner.limit, inner.Innermost().deep(),
            Outer.option, Record().number, Pair().number]
"""


def test_what_the_body_of_a_class_in_a_function_uses_is_sent_with_the_function() -> None:
    # A name that only the body used was a NameError in the worker.
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SCRIPT, "script.py", "exec"), space)
    assert pickle.loads(pack(space["main"]))() == [1, [3, 6], 9, 9, 7, 8, 6, 1, 1]


def test_a_name_that_the_body_of_a_class_has_itself_is_not_sent() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def main():\n    class Guard:\n        lock = 1\n        both = lock, 2\n    return Guard.both", space)
    assert pickle.loads(pack(space["main"]))() == (1, 2)


def test_a_message_names_what_the_body_of_a_class_uses() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def main():\n    class Guard:\n        held = lock\n    return Guard", space)
    assert "The global variable `lock` that `main` uses is of type _thread.lock" in message(space["main"])
