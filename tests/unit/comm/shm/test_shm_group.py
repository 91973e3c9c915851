"""A group of one rank, in this process: the same answers as from many, and what is refused."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import lockstep as ls
from lockstep.comm.shm.collectives import describe_message, write_back
from lockstep.comm.shm.messages import PendingReceive
from lockstep.errors import GroupError

ONE = torch.tensor([1.0, -2.0, 3.0])


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    ls.destroy_process_group()


@pytest.mark.parametrize("length", [3, 300_000])
@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_one_rank_reduces_to_itself(group: Any, operation: Any, length: int) -> None:
    tensor = ONE.repeat(length // 3)
    dist.all_reduce(tensor, operation)
    dist.reduce(tensor, 0, operation)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, ONE.repeat(length // 3))
    allocated = group.allocate_tensor(length, dtype=torch.float32).copy_(tensor)
    dist.all_reduce(allocated, operation)
    assert torch.equal(allocated, tensor)


def test_one_rank_gathers_and_scatters(group: Any) -> None:
    for function in (dist.all_gather, dist.gather):
        outputs = [torch.zeros(3)]
        function(*((outputs, ONE) if function is dist.all_gather else (ONE, outputs)))
        assert torch.equal(outputs[0], ONE)
    output = torch.zeros(3)
    dist.scatter(output, [ONE], 0)
    assert torch.equal(output, ONE)
    dist.reduce_scatter(output.zero_(), [ONE])
    assert torch.equal(output, ONE)
    dist.all_to_all_single(output.zero_(), ONE)
    assert torch.equal(output, ONE)
    dist.barrier()
    objects: list[Any] = [None]
    dist.all_gather_object(objects, "text")
    assert objects == ["text"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda group: group.allgather([[ONE, ONE.clone()]], [ONE]),
            "all_gather: 2 output tensors, expected one per rank of 1",
        ),
        (
            lambda group: group.allgather([[torch.zeros(2)]], [ONE]),
            r"torch.float32 \[2\], expected torch.float32 \[3\]",
        ),
        (lambda group: group.all_gather_single(torch.zeros(5), ONE), "all_gather_into_tensor: one tensor is"),
        (lambda group: group.reduce_scatter([ONE], [[ONE, ONE]]), "reduce_scatter: 2 input tensors"),
        (
            lambda group: group.all_to_all_single(ONE, ONE, [2], [3]),
            r"output splits \[2\] must be 1 numbers that add up",
        ),
        (lambda group: group.allreduce([ONE, ONE]), "Expected one tensor, got 2"),
        # That was found out when the message was there, by whoever brought it, and broke the group.
        (lambda group: group.recv([torch.zeros(1).expand(3)], 0), "is expanded"),
        # Found out within the call, these once broke the group.
        (lambda group: group.allgather_coalesced([[ONE]], [ONE, ONE]), "a row of 1 output tensors, expected one per"),
        (lambda group: group.allgather_coalesced([], [ONE]), "0 rows of output tensors, expected one per rank of 1"),
        (lambda group: group.allgather_coalesced([[ONE[:2]]], [ONE]), r"torch.float32 \[2\], expected torch.float32"),
        (
            lambda group: group.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta")),
            "allocates on the CPU",
        ),
        (lambda group: group.send([ONE, ONE], 0, 1), "Expected one tensor, got 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(group: Any, call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(group)
    tensor = ONE.clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, ONE)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"size": -1}, ValueError, "size is -1, expected no negative number"),
        ({"size": (2, -1)}, ValueError, r"size is \(2, -1\), expected no negative number"),
        ({"size": 2.5}, TypeError, "size is 2.5, expected a number of elements, or a shape"),
        ({"size": ("2",)}, TypeError, r"size is \('2',\), expected a number of elements, or a shape"),
        ({"dtype": "float32"}, TypeError, "dtype is 'float32', expected a torch.dtype such as torch.float32"),
        ({"device": "meta"}, ValueError, "allocates on the CPU, not on meta"),
    ],
)
def test_no_tensor_is_made_of_nonsense(group: Any, arguments: Any, error: Any, said: str) -> None:
    # Most of it was an AttributeError from within; a negative size gave an empty tensor.
    with pytest.raises(error, match=said):
        group.allocate_tensor(**{"size": 3, "dtype": torch.float32, **arguments})


def test_a_tensor_of_a_shape_is_made(group: Any) -> None:
    for size in ((5, 2), [5, 2], torch.Size([5, 2]), (), (0, 3)):
        tensor = group.allocate_tensor(size, dtype=torch.int64, device="cpu")
        assert torch.equal(tensor, torch.zeros(*size, dtype=torch.int64) if size else torch.tensor(0))
        dist.all_reduce(tensor)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: dist.broadcast(ONE.clone(), group_src=-1),
        lambda group: dist.broadcast(ONE.clone(), group_src=1),
        lambda group: dist.broadcast(ONE.to_sparse(), group_src=1),
        lambda group: dist.reduce(ONE.clone(), group_dst=5),
        lambda group: dist.gather(ONE, None, group_dst=5),
        lambda group: dist.scatter(ONE.clone(), None, group_src=5),
        lambda group: dist.send(ONE, group_dst=5),
        lambda group: dist.recv(ONE.clone(), group_src=5),
        lambda group: group.recv([ONE.clone()], -1),
    ],
)
def test_a_rank_outside_the_group_is_refused(group: Any, call: Any) -> None:
    # Two of them were once done in silence; the others broke the group, and a send posted where no semaphore is.
    with pytest.raises(ValueError, match=r"is rank -?\d of the group, expected 0 to 0"):
        call(group)
    dist.all_reduce(ONE.clone())


def test_a_message_from_this_rank_itself_may_be_waited_for(group: Any) -> None:
    # Its process was once looked for among the others', after 50 ms.
    place = torch.zeros(3)
    receiving = group.recv([place], 0)
    time.sleep(0.1)
    group.send([ONE], 0).wait()
    receiving.wait()
    assert torch.equal(place, ONE)


def test_a_message_is_not_kept_aside_on_the_default_device(group: Any) -> None:
    # Kept on a device without values, as one may set to build a large model, it was lost; and the group was broken.
    works = [group.send([ONE * tag], 0, tag) for tag in (1, 2)]
    place = torch.zeros(3)
    pending = PendingReceive(
        place=place.view(torch.uint8), tag=2, kind=describe_message(ONE), call=b"recv()", complete=lambda **_: None
    )
    group._point_to_point._open(0)
    _, receiver = group._point_to_point._receivers[0]
    receiver.expect(pending)
    with torch.device("meta"):
        receiver.take_until(pending)
    assert torch.equal(place, ONE * 2)
    group.recv([place], 0, 1).wait()
    assert torch.equal(place, ONE)
    for work in works:
        work.wait()


def test_a_receive_that_fails_at_its_end_is_the_only_one(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A message that another receive brings may find a tensor that cannot take it: not that other one's fault.
    def fail(tensor: torch.Tensor, flat: torch.Tensor) -> None:
        if tensor is bad:
            raise RuntimeError("no way in")
        write_back(tensor, flat)

    monkeypatch.setattr("lockstep.comm.shm.group.write_back", fail)
    good, bad = torch.zeros(3), torch.zeros(3)
    works = [group.recv([place], 0, tag) for tag, place in ((1, good), (2, bad))]
    sends = [group.send([ONE], 0, tag) for tag in (2, 1)]
    assert works[0].wait()
    assert torch.equal(good, ONE)
    with pytest.raises(RuntimeError, match="no way in"):
        works[1].wait()
    for work in sends:
        work.wait()
    dist.all_reduce(ONE.clone())


def test_the_error_that_broke_a_group_is_told_by_later_calls(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # They once told its type alone.
    def fail(*_: Any) -> None:
        raise ArithmeticError("one too many.")

    monkeypatch.setattr("lockstep.comm.shm.phases.PhaseExchange.run_at", fail)
    with pytest.raises(ArithmeticError):
        dist.all_reduce(ONE.clone())
    with pytest.raises(GroupError, match=r"ended on this rank with ArithmeticError: one too many\.") as caught:
        dist.all_reduce(ONE.clone())
    assert "in fail" in caught.value.__notes__[0]


def test_a_wait_spins_only_where_this_process_may_use_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    # The cores of the machine were counted, and not those that taskset leaves.
    for cores in ({0}, set()):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
        group: Any = dist.group.WORLD
        assert group._peers.has_core == bool(cores)
        ls.destroy_process_group()


def test_a_tensor_elsewhere_is_refused(group: Any) -> None:
    with pytest.raises(GroupError, match="The shm backend carries CPU tensors"):
        dist.all_reduce(torch.empty(3, device="meta"))


def test_a_group_says_what_it_is(group: Any) -> None:
    assert group.getBackendName() == "shm"
    assert dist.get_backend() == "shm"
    assert (group.rank(), group.size()) == (0, 1)
    assert group.supports_tensor_alloc(torch.device("cpu"))
    assert not group.supports_tensor_alloc(torch.device("cuda"))
    group.get_group_store().set("key", "value")
    assert group.get_group_store().get("key") == b"value"


def test_a_group_that_was_destroyed_says_so(group: Any) -> None:
    tensor = group.allocate_tensor(3, dtype=torch.float32).copy_(ONE)
    ls.destroy_process_group()
    with pytest.raises(GroupError, match="was destroyed"):
        group.allreduce([ONE.clone()])
    with pytest.raises(GroupError, match="was destroyed"):
        group.recv([ONE.clone()], 0)
    with pytest.raises(GroupError, match="was destroyed"):
        group.allocate_tensor(3, dtype=torch.float32)
    assert torch.equal(tensor, ONE)


def test_an_aborted_group_says_so(group: Any) -> None:
    group.abort()
    with pytest.raises(GroupError, match="has aborted this group"):
        group.allreduce([ONE.clone()])
