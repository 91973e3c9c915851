"""What a watch says of real backwards, in one process and without a group."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.reduce.backward_watch import BackwardWatch, Phase


class Recorder:
    """Writes down what a watch says, and ends backwards as a reducer does."""

    def __init__(self, *, has_group: bool = True) -> None:
        self.watch = BackwardWatch(lambda: has_group)
        self.said: list[str] = []

    def begin(self, phase: Phase) -> None:
        self.said.append(f"begin {phase.name}")

    def begin_synchronizing_late(self) -> None:
        self.said.append("synchronize late")

    def complete(self) -> None:
        self.said.append(f"complete {self.watch.num_samples}")
        self.watch.end()

    def complete_failed(self) -> None:
        self.said.append("complete failed")
        self.watch.end()

    def forget(self) -> None:
        self.said.append("forget")
        self.watch.end()


def watched(layer: nn.Module, recorder: Recorder) -> None:
    def hook(_parameter: Tensor) -> None:
        recorder.said.append(
            f"gradient, waits {recorder.watch.waits_for_end}" if recorder.watch.arrive(recorder) else ""
        )

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def layer_of(recorder: Recorder) -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False)
    watched(layer, recorder)
    return layer


def forward(layer: nn.Module, recorder: Recorder, num_samples: int = 0) -> Tensor:
    output: Tensor = layer(torch.ones(1, 2))
    recorder.watch.mark([output], num_samples, recorder)
    return output.sum()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_backward_begins_at_its_marked_output_and_ends_once(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    (forward(layer, recorder, 3) + forward(layer, recorder, 4)).backward()
    assert recorder.said == ["begin SYNCHRONIZING", "", "complete 7"]
    assert recorder.watch.phase is Phase.IDLE
    (forward(layer, recorder, 3) + forward(layer, recorder, 0)).backward()
    assert recorder.said[-1] == "complete 0", "of one forward they are not known"


def test_an_unmarked_backward_begins_with_its_first_gradient(recorder: Recorder) -> None:
    layer_of(recorder)(torch.ones(1, 2)).sum().backward()
    assert recorder.said == ["begin SYNCHRONIZING", "gradient, waits True", "complete 0"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_synchronising_a_backward_only_accumulates(where: str, recorder: Recorder) -> None:
    layer = layer_of(recorder)
    recorder.watch.synchronizes = where != "forward"
    loss = forward(layer, recorder)
    recorder.watch.synchronizes = where != "backward"
    loss.backward()
    assert recorder.said == ["begin ACCUMULATING", "", "forget"]
    alone = Recorder(has_group=False)
    forward(layer_of(alone), alone).backward()
    assert alone.said[0] == "begin ACCUMULATING"


def test_a_backward_through_both_kinds_of_forwards_synchronises(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    outside = forward(layer, recorder)
    recorder.watch.synchronizes = False
    inside = forward(layer, recorder)
    recorder.watch.synchronizes = True
    (inside * 2 + outside).backward()
    begun = [said for said in recorder.said if said]
    assert begun in (
        ["begin SYNCHRONIZING", "complete 0"],
        ["begin ACCUMULATING", "synchronize late", "complete 0"],
    )


def test_a_forced_backward_synchronises_once(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    recorder.watch.synchronizes = False
    recorder.watch.force_next()
    for _ in range(2):
        forward(layer, recorder).backward()
    assert [said for said in recorder.said if said.startswith("begin")] == ["begin SYNCHRONIZING", "begin ACCUMULATING"]


def test_synchronising_once_ends_when_the_listener_says_so(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    recorder.watch.synchronizes = False
    recorder.watch.stop_synchronizing()
    recorder.watch.synchronize_once()
    forward(layer, recorder).backward()
    recorder.watch.stop_synchronizing()
    forward(layer, recorder).backward()
    assert [said for said in recorder.said if said.startswith("begin")] == ["begin SYNCHRONIZING", "begin ACCUMULATING"]


class Checkpointed(nn.Module):
    """A layer inside a reentrant checkpoint, which runs a backward of its own inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.second, self.first(inputs), use_reentrant=True)
        return output


def test_an_inner_graph_task_ends_no_backward(recorder: Recorder) -> None:
    model = Checkpointed()
    watched(model, recorder)
    for _ in range(2):
        forward(model, recorder).backward()
    once = ["begin SYNCHRONIZING", "gradient, waits True", "", "complete 0"]
    assert recorder.said == once * 2  # in the second backward too: the first has shown that it must wait


def test_a_model_without_inner_tasks_waits_in_its_first_backward_only(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    waited = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: waited.append(recorder.watch.waits_for_end))
    for number in range(4):
        if number == 2:
            recorder.watch.learn_anew()
        forward(layer, recorder).backward()
    recorder.watch.wait_for_ends()
    for _ in range(2):
        forward(layer, recorder).backward()
    assert waited == [True, False, True, False, True, True]


def failing(_gradient: Tensor) -> None:
    raise ValueError("in backward")


@pytest.mark.parametrize(("synchronizes", "last"), [(True, "complete failed"), (False, "forget")])
def test_an_interrupted_backward_is_ended_by_the_next_forward(
    synchronizes: bool, last: str, recorder: Recorder
) -> None:
    recorder.watch.synchronizes = synchronizes
    layer = layer_of(recorder)
    handle = layer.weight.register_hook(failing)
    with pytest.raises(ValueError, match="in backward"):
        forward(layer, recorder).backward()
    assert recorder.said[0].startswith("begin")
    assert len(recorder.said) == 1
    recorder.watch.finish_interrupted(recorder)
    assert recorder.said[-1] == last
    assert recorder.watch.phase is Phase.IDLE
    handle.remove()
    recorder.said.clear()
    forward(layer, recorder).backward()
    assert [said for said in recorder.said if said][1] == ("complete 0" if synchronizes else "forget")


def test_an_interrupted_backward_is_ended_by_the_next_backward(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    first, second = forward(layer, recorder), forward(layer, recorder)
    handle = layer.weight.register_hook(failing)
    with pytest.raises(ValueError, match="in backward"):
        first.backward()
    handle.remove()
    second.backward()
    assert recorder.said == ["begin SYNCHRONIZING", "complete failed", "begin SYNCHRONIZING", "", "complete 0"]


def test_a_backward_under_way_is_not_interrupted(recorder: Recorder) -> None:
    layer = layer_of(recorder)
    layer.weight.register_hook(lambda _: recorder.watch.finish_interrupted(recorder))
    forward(layer, recorder).backward()
    assert recorder.said == ["begin SYNCHRONIZING", "", "complete 0"]


def test_gradients_that_are_only_computed_are_noted(recorder: Recorder) -> None:
    layer = layer_of(recorder)

    def ask(_gradient: Tensor) -> None:
        recorder.watch.was_asked = True

    layer.weight.register_hook(ask)
    torch.autograd.grad(forward(layer, recorder), layer.weight)
    assert recorder.said == ["begin SYNCHRONIZING", "forget"]
    assert recorder.watch.has_local_gradients
    recorder.watch.forget_local()
    assert not recorder.watch.has_local_gradients


def test_a_reduction_may_begin_without_a_backward(recorder: Recorder) -> None:
    recorder.watch.begin_without_backward(recorder)
    assert recorder.watch.phase is Phase.SYNCHRONIZING
    recorder.watch.end()
    assert recorder.said == ["begin SYNCHRONIZING"]


def test_a_phase_has_no_other_transitions_than_those_of_its_table(recorder: Recorder) -> None:
    recorder.watch.begin_without_backward(recorder)
    with pytest.raises(AssertionError, match="SYNCHRONIZING -> "):
        recorder.watch._change_phase(Phase.SYNCHRONIZING)


def test_two_threads_begin_one_graph_task_once(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    # The engine has a thread per device, and gradients of one backward may arrive in both at once.
    both_are_in = threading.Barrier(2)
    begin: Callable[[Phase], None] = recorder.begin

    def slow_begin(phase: Phase) -> None:
        with pytest.raises(threading.BrokenBarrierError):
            both_are_in.wait(0.2)  # nobody else comes here
        begin(phase)

    recorder.begin = slow_begin  # type: ignore[method-assign]
    held: list[Any] = []
    monkeypatch.setattr("lockstep.reduce.backward_watch.current_graph_task_id", lambda: 7)
    monkeypatch.setattr("lockstep.reduce.backward_watch.queue_callback", held.append)
    with ThreadPoolExecutor() as pool:
        list(pool.map(recorder.watch.arrive, [recorder, recorder]))
    assert recorder.said == ["begin SYNCHRONIZING"]


def test_a_graph_keeps_its_listener_and_a_watch_does_not() -> None:
    recorder = Recorder()
    gone = weakref.ref(recorder)
    layer = nn.Linear(2, 1, bias=False)
    loss = forward(layer, recorder)
    del recorder
    assert gone() is not None
    del loss
    assert gone() is None


def test_a_backward_that_failed_is_forgotten_when_there_is_no_group_any_more() -> None:
    has_group = [True]
    recorder = Recorder()
    recorder.watch = BackwardWatch(lambda: has_group[0])
    layer = layer_of(recorder)
    handle = layer.weight.register_hook(failing)
    with pytest.raises(ValueError, match="in backward"):
        forward(layer, recorder).backward()
    handle.remove()
    has_group[0] = False
    recorder.watch.finish_interrupted(recorder)
    assert recorder.said == ["begin SYNCHRONIZING", "forget"]
    assert recorder.watch.phase is Phase.IDLE
