"""What we rely on of the engine that runs a backward; each assertion says what breaks without it."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as distributed_autograd
from torch.distributed import rpc
from torch.utils.checkpoint import checkpoint

from lockstep.torch_private.autograd import (
    NO_GRAPH_TASK,
    BackwardCount,
    current_graph_task_id,
    is_in_distributed_autograd,
    is_inside_func_grad,
    is_inside_transform,
    post_accumulate_grad_hooks,
    queue_callback,
    run_backward_of_leaf,
    tensor_hooks,
)

END = "the reducer: the end of a backward would be missed, or come too early"
TASKS = "the reducer: gradients of another backward would count as those of this one"
INNER = "the trainer's partials: a backward inside another would not be seen, and gradients added in another order"


RPC = "DistributedDataParallel: gradients in a context of torch.distributed.autograd would silently not be averaged"


class RunsAnother(torch.autograd.Function):
    """Runs a backward of its own within the backward, and calls something after it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inside: Callable[[Tensor], Tensor], after: Callable[[], None]) -> Tensor:
        ctx.inside, ctx.after = inside, after
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.inside(torch.ones(1, requires_grad=True)).backward()
        ctx.after()
        return gradients[0], None, None


_run_another: Any = RunsAnother.apply


def test_a_callback_runs_once_at_the_end_of_the_backward() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    happened: list[str] = []
    first.register_post_accumulate_grad_hook(lambda _: happened.append("first"))
    # Its gradient comes first: it was used last.
    second.register_post_accumulate_grad_hook(lambda _: queue_callback(lambda: happened.append("end")))
    second.register_post_accumulate_grad_hook(lambda _: happened.append("second"))
    ((first * 2) * second).backward()
    assert happened[-1] == "end", END
    assert sorted(happened) == ["end", "first", "second"], END
    happened.clear()
    (first * 2).backward()
    assert happened == ["first"], "a callback is for one backward: " + END


def test_a_callback_runs_before_backward_returns_in_the_thread_that_called_it() -> None:
    parameter = nn.Parameter(torch.ones(1))
    threads: list[int] = []
    parameter.register_post_accumulate_grad_hook(
        lambda _: queue_callback(lambda: threads.append(threading.get_ident()))
    )
    (parameter * 2).backward()
    assert threads == [threading.get_ident()], END


def test_a_callback_belongs_to_the_innermost_backward() -> None:
    happened: list[str] = []
    inner, outer = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    inner.register_post_accumulate_grad_hook(lambda _: queue_callback(lambda: happened.append("end of inner")))
    outer.register_hook(lambda _: happened.append("outer"))
    output = _run_another(outer * 2, lambda value: value * inner, lambda: happened.append("after inner"))
    output.register_hook(lambda _: queue_callback(lambda: happened.append("end of outer")))
    output.backward()
    assert happened == ["end of inner", "after inner", "outer", "end of outer"], END


def test_what_a_callback_raises_is_raised_by_backward() -> None:
    def fail() -> None:
        raise ValueError("mine")

    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: queue_callback(fail))
    with pytest.raises(ValueError, match="mine"):
        (parameter * 2).backward()


def test_a_callback_is_dropped_uncalled_when_the_backward_fails() -> None:
    class Callback:
        def __call__(self) -> None:
            called.append(self)

    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    called: list[Any] = []
    dropped: list[bool] = []
    early, late = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def queue(_: Tensor) -> None:
        callback = Callback()
        weakref.finalize(callback, dropped.append, True)
        queue_callback(callback)

    early.register_post_accumulate_grad_hook(queue)
    late.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        ((late * 2) * early).backward()
    assert not called, "the reducer: a failed backward would be reduced as if it were whole"
    assert dropped == [True], "the reducer: it would not see that a backward was interrupted"


def test_a_callback_needs_a_backward() -> None:
    with pytest.raises(RuntimeError):
        queue_callback(lambda: None)


def test_a_backward_of_a_leaf_takes_one_number_and_accumulates_nothing() -> None:
    found: list[int] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda _: found.append(current_graph_task_id()))
    run_backward_of_leaf(leaf, torch.zeros(()))
    with torch.no_grad():
        run_backward_of_leaf(leaf, torch.zeros(()))
    torch.autograd.grad(leaf * 2, leaf)
    assert found == [found[0], found[0] + 1, found[0] + 2], INNER
    assert leaf.grad is None


def test_graph_tasks_are_numbered_one_by_one() -> None:
    found: list[int] = []
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda _: found.append(current_graph_task_id()))
    (parameter * 2).backward()
    torch.autograd.grad(parameter * 2, parameter)
    (parameter * 2).backward()
    assert current_graph_task_id() == NO_GRAPH_TASK, TASKS
    assert found == [found[0], found[0] + 1, found[0] + 2], INNER
    assert found[0] > NO_GRAPH_TASK, TASKS


def test_all_hooks_of_a_backward_see_one_task() -> None:
    found: list[int] = []
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in net.parameters():
        parameter.register_hook(lambda _: found.append(current_graph_task_id()))
        parameter.register_post_accumulate_grad_hook(lambda _: found.append(current_graph_task_id()))
    loss = net(torch.ones(1, 2)).sum()
    loss.register_hook(lambda _: found.append(current_graph_task_id()))
    loss.backward()
    assert len(found) == 9
    assert len(set(found)) == 1, TASKS


def test_a_backward_inside_another_takes_a_number() -> None:
    def note_inner(value: Tensor) -> Tensor:
        value.register_hook(lambda _: inner.append(current_graph_task_id()))
        return value * 3

    outer: list[int] = []
    inner: list[int] = []
    after: list[int] = []
    following: list[int] = []
    parameter = nn.Parameter(torch.ones(1))
    output = _run_another(
        parameter * 2,
        note_inner,
        lambda: after.append(current_graph_task_id()),
    )
    output.register_hook(lambda _: outer.append(current_graph_task_id()))
    output.backward()
    loss = parameter * 2
    loss.register_hook(lambda _: following.append(current_graph_task_id()))
    loss.backward()
    assert inner == [outer[0] + 1], INNER
    assert after == outer, TASKS
    assert following == [outer[0] + 2], INNER


def test_a_reentrant_checkpoint_is_such_a_backward() -> None:
    found: list[int] = []
    net = nn.Linear(2, 2)
    net.weight.register_post_accumulate_grad_hook(lambda _: found.append(current_graph_task_id()))
    loss = checkpoint(net, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum()
    loss.register_hook(lambda _: found.append(current_graph_task_id()))
    loss.backward()
    assert found == [found[0], found[0] + 1], INNER


def test_hooks_are_listed_in_the_order_in_which_they_run() -> None:
    parameter = nn.Parameter(torch.ones(1))
    assert not post_accumulate_grad_hooks(parameter)
    ran: list[str] = []
    first = parameter.register_post_accumulate_grad_hook(lambda _: ran.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda _: ran.append("second"))
    parameter.register_hook(lambda _: ran.append("before"))
    for hook in (post_accumulate_grad_hooks(parameter) or {}).values():
        hook(parameter)
    assert ran == ["first", "second"], "the trainer: hooks of others on gradients would not be seen"
    ran.clear()
    (parameter * 2).backward()
    assert ran == ["before", "first", "second"], "the reducer: it would not run after the hooks of others"
    first.remove()
    assert len(post_accumulate_grad_hooks(parameter) or ()) == 1


@pytest.mark.filterwarnings("ignore:You are using a Backend")  # RPC's own group
def test_a_context_of_distributed_autograd_is_seen_in_its_thread_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not is_in_distributed_autograd(), RPC
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert not is_in_distributed_autograd(), "training beside RPC would be refused"
        with distributed_autograd.context():
            assert is_in_distributed_autograd(), RPC
            with ThreadPoolExecutor() as pool:
                assert not pool.submit(is_in_distributed_autograd).result(), (
                    "a forward in another thread would be refused"
                )
        assert not is_in_distributed_autograd(), "a forward after the context would be refused"
    finally:
        rpc.shutdown()
    assert not is_in_distributed_autograd(), RPC


def test_a_tensor_of_func_grad_is_told_from_others() -> None:
    found = []

    def loss(value: Tensor) -> Tensor:
        found.append(is_inside_func_grad(value * 2))
        assert is_inside_transform(), "the wrapper's checks: a tensor of a transform would be kept, and used after it"
        return value.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert not is_inside_transform()
    found += [is_inside_func_grad(torch.ones(2)), is_inside_func_grad(torch.ones(2, requires_grad=True) * 2)]
    assert found == [True, False, False], "DistributedDataParallel: local gradients of torch.func would not be seen"


def test_a_hook_that_is_taken_out_of_its_dictionary_is_not_called_until_it_is_put_back() -> None:
    breaks = "the trainer: the user's hooks would be given the gradients of shards"
    parameter = nn.Parameter(torch.ones(1))
    called: list[str] = []
    parameter.register_hook(lambda _: called.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda _: called.append("after"))
    registries = [tensor_hooks(parameter), post_accumulate_grad_hooks(parameter)]
    taken = [dict(each) for each in registries if each is not None]
    assert all(taken), breaks
    for each in registries:
        if each is not None:
            each.clear()
    (parameter * 2).backward()
    assert not called, breaks
    for each, hooks in zip(registries, taken, strict=True):
        if each is not None:
            each.update(hooks)
    (parameter * 2).backward()
    assert called == ["before", "after"], breaks


def test_backwards_are_counted_and_those_that_count_are_not() -> None:
    reader = BackwardCount()
    before = reader.read()
    assert reader.read() == before, "LS316: an epoch without training would be one"
    weight = torch.ones(1, requires_grad=True)
    (weight * 2).sum().backward()
    thread = threading.Thread(target=lambda: torch.autograd.grad((weight * 2).sum(), weight))
    thread.start()
    thread.join()
    with torch.inference_mode():
        assert reader.read() == before + 2, "LS316: a forgotten set_epoch would not be told"


def test_a_process_that_can_have_no_backward_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # A forked one, where its parent has had a backward on a GPU: torch raises an error.
    reader = BackwardCount()
    before = reader.read()

    def refuse(*_: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr("lockstep.torch_private.autograd.run_backward_of_leaf", refuse)
    assert reader.read() == before
