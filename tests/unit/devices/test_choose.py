"""Requests for devices on several machines: what is taken, and the reason or error that is shown."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.devices.machines import ALICE, GIB, NOW, gpu, held, instance, machine

from lockstep.devices import (
    DeviceRequest,
    Gpu,
    Inventory,
    Placement,
    choose_devices,
    parse_request,
    place_workers,
    resized,
)
from lockstep.devices.choose import find_occupants
from lockstep.devices.inventory import gpu_number
from lockstep.errors import DeviceError

NONE = machine()
FOUR = machine(*map(gpu, range(4)))
LAB = machine(held(0), gpu(1, free=23), gpu(2, free=23.6), held(3, free=4), gpu(4, free=23.4))


def held_instance(index: int, number: int) -> Gpu:
    return replace(instance(index, number), holders=(ALICE,))


def taken(placement: Placement, inventory: Inventory) -> list[Any]:
    """Return the numbers of the GPUs taken, or "cpu"."""
    texts = {gpu.cuda_name: gpu_number(gpu) for gpu in inventory.gpus}
    numbers = {name: int(text) if text.isdigit() else text for name, text in texts.items()}
    return [numbers[device.visible] if device.visible else device.name for device in placement.devices]


@pytest.mark.parametrize(
    ("request_", "workers", "inventory", "max_workers", "expected"),
    [
        (None, None, NONE, None, ["cpu"] * 2),
        ("auto", None, NONE, 1, ["cpu"]),
        ("auto", 3, NONE, None, ["cpu"] * 3),
        ("auto:3", None, NONE, None, ["cpu"] * 3),
        ("auto", None, FOUR, None, [0, 1, 2, 3]),
        ("auto", None, FOUR, 3, [0, 1, 2]),
        ("auto:2", None, FOUR, None, [0, 1]),
        ("auto", 2, FOUR, None, [0, 1]),
        ("cpu", None, FOUR, None, ["cpu"]),
        ("cpu", 2, FOUR, None, ["cpu"] * 2),
        ("cpu:2", None, FOUR, None, ["cpu"] * 2),
        ("cpu:2", 2, FOUR, None, ["cpu"] * 2),
        ([0, 2], None, FOUR, None, [0, 2]),
        ([3, 0], 2, FOUR, None, [3, 0]),
        ((1,), None, FOUR, None, [1]),
        ("0,2", None, FOUR, None, [0, 2]),
        ("[0, 2]", None, FOUR, None, [0, 2]),
        ('["GPU-3a", 1]', None, FOUR, None, [3, 1]),
        ("[GPU-3a,1]", None, FOUR, None, [3, 1]),
        (" 3 , 1 ", None, FOUR, None, [3, 1]),
        ("GPU-2a2a", None, FOUR, None, [2]),
        ("gpu-1A,GPU-0", None, FOUR, None, [1, 0]),
        (["GPU-3a", 0, "1"], None, FOUR, None, [3, 0, 1]),
        ("auto", None, LAB, None, [1, 2, 4]),
        ("auto:2", None, LAB, None, [2, 4]),
        ("auto:1", None, LAB, None, [2]),
        ("auto>=10GiB", None, LAB, None, [0, 1, 2, 4]),
        ("auto:4>=10GiB", None, LAB, None, [0, 1, 2, 4]),
        ("auto:4@10GiB", None, LAB, None, [0, 1, 2, 4]),
        ("auto : 2 >= 14.5 gib", None, LAB, None, [2, 4]),
        ("auto:3>=2000MiB", None, LAB, 1, [1, 2, 4]),
        ("auto>=25GB", None, LAB, None, [2, 4]),
        ("auto:1>=10GiB", None, machine(held(0, free=60), gpu(1)), None, [1]),  # an idle one first
        ("auto:2", None, machine(held_instance(0, 0), instance(0, 1), instance(1, 0)), None, ["0:1", "1:0"]),
    ],
)
def test_request_becomes_placement(
    request_: DeviceRequest, workers: int | None, inventory: Inventory, max_workers: int | None, expected: list[Any]
) -> None:
    chosen = choose_devices(request_, workers=workers, inventory=inventory, max_workers=max_workers)
    assert taken(chosen, inventory) == expected


@pytest.mark.parametrize(
    ("request_", "workers", "inventory", "said"),
    [
        ("auto", 0, NONE, "1 or more"),
        ("auto", True, NONE, "1 or more"),
        ("cpu:0", None, NONE, "at least one worker"),
        ("auto:-1", None, FOUR, "at least one worker"),
        ("gpu", None, FOUR, "names no devices"),
        ("0,", None, FOUR, "names no devices"),
        ("[]", None, FOUR, "empty list"),
        ("[0,", None, FOUR, "but GPUs are named by"),
        ("auto:3>20GiB", None, FOUR, "names no devices"),
        ("auto:3>=20", None, FOUR, "'20' should be an amount of memory with its unit"),
        ("cpu:2@20GiB", None, FOUR, 'only "auto" asks for free memory'),
        ("cpu:2>=20GiB", None, FOUR, 'only "auto" asks for free memory'),
        (3, None, FOUR, "could be a count or the number of a GPU"),
        ("cpu:2", 3, NONE, "asks for 2 devices, but workers is 3. Leave one of the two out"),
        ("auto:3", None, machine(gpu(0)), "3 workers need 3 GPUs, but of 1 here 1 can be taken"),
        ("auto", 3, machine(gpu(0)), '"cpu:3"'),
        ([0], None, NONE, "GPU 0, but no NVIDIA driver is installed here"),
        ([4], None, FOUR, "the only ones here are 0, 1, 2, 3"),
        (["GPU-9"], None, FOUR, "asks for GPU GPU-9, but the only ones here"),
        ([-1], None, FOUR, "-1, but GPUs are named by whole numbers"),
        ([True], None, FOUR, "True, but GPUs are named by whole numbers"),
        (["a"], None, FOUR, "'a', but GPUs are named by whole numbers"),
        ([], None, FOUR, "empty list"),
        ([[]], None, FOUR, "a worker gets no GPU"),
        ([0, 1], 3, FOUR, "names 2 GPUs, but workers is 3"),
        ([1, 1], None, FOUR, "names GPU 1 twice; each worker"),
        ([1, "GPU-1a"], None, FOUR, "names GPU 1 twice [(]as 1 and as GPU-1a[)]"),
        ([[0, 1], [1, 2]], None, FOUR, "names GPU 1 twice"),
        (
            ["GPU-0a"],
            None,
            machine(gpu(0), gpu(1, uuid="GPU-0ab1")),
            "but GPU-0a.* and GPU-0ab1 begin with it",
        ),
        ("auto>=20GiB", None, NONE, "20.0 GiB of free memory, but no NVIDIA driver"),
        ("auto:4", None, LAB, "4 workers need 4 GPUs, but of 5 here 3 can be taken(.*\n)*.*GPU 1 .* is free"),
        ("auto:1", None, machine(held(0)), "1 worker needs 1 GPU, but of 1 here none can be taken"),
        ([0], 2, FOUR, "device_ids names 1 GPU, but workers is 2"),
        ([0], None, machine(gpu(0, problem="it is lost")), "GPU 0 .*, which cannot be used: it is lost"),
        # A variable that shows nothing by mistake is not obeyed.
        ("auto", None, machine(gpu(0, is_visible=False), cuda_visible_devices="7"), "hidden by CUDA_VISIBLE_DEVICES=7"),
    ],
)
def test_request_that_cannot_be_met_is_explained(
    request_: Any, workers: int | None, inventory: Inventory, said: str
) -> None:
    with pytest.raises(DeviceError, match=said):
        choose_devices(request_, workers=workers, inventory=inventory)


def test_a_worker_sees_its_own_card_alone_as_the_first_or_those_of_all_in_rank_order() -> None:
    first, second = choose_devices([2, 0], inventory=FOUR).devices
    assert (first.name, second.name) == ("cuda:0", "cuda:0")
    assert first.variables() == {"CUDA_VISIBLE_DEVICES": FOUR.gpus[2].uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert second.label == "GPU 0 (NVIDIA GeForce RTX 3090)"
    placement = choose_devices([2, 0], inventory=FOUR)
    assert placement.variables_of_all()["CUDA_VISIBLE_DEVICES"] == f"{FOUR.gpus[2].uuid},{FOUR.gpus[0].uuid}"
    assert taken(placement.first(1), FOUR) == [2]
    on_cpu = choose_devices("cpu:2", inventory=FOUR)
    assert on_cpu.devices[0].variables()["CUDA_VISIBLE_DEVICES"] == ""
    assert on_cpu.variables_of_all()["CUDA_VISIBLE_DEVICES"] == ""


def test_a_worker_may_have_several_cards() -> None:
    first, second = choose_devices([[0, 1], [3, 2]], inventory=FOUR).devices
    assert second.visible == f"{FOUR.gpus[3].uuid},{FOUR.gpus[2].uuid}"
    assert "GPU 0 (" in first.label
    assert "GPU 1 (" in first.label


def test_auto_says_why_it_leaves_cards_out() -> None:
    assert choose_devices("auto:2", inventory=LAB).reason == (
        "GPU 2, GPU 4 (GPU 0 is held by alice, pid 123, python train.py, since 10:32; "
        "GPU 3 is held by alice, pid 123, python train.py, since 10:32; GPU 1 is free too)"
    )
    reason = choose_devices("auto:4>=10GiB", inventory=LAB).reason
    assert "GPU 0 is also held by alice" in reason
    assert "GPU 3 has 4.0 GiB of free memory (held by alice" in reason


def test_auto_says_that_the_shards_are_the_limit() -> None:
    # 4 of 6 free cards were taken, and nothing said why.
    assert choose_devices("auto", inventory=FOUR, max_workers=3).reason.endswith(
        "is free too; at most 3 workers can have a shard, a new run more with more num_shards)"
    )


def test_auto_without_a_free_card_lists_them_all_and_does_not_go_to_the_cpu() -> None:
    with pytest.raises(DeviceError) as refused:
        choose_devices("auto", inventory=machine(held(0), gpu(1, problem="it is lost"), gpu(2, is_visible=False)))
    lines = str(refused.value).splitlines()
    assert lines[0] == "auto needs a GPU, but of 3 here none can be taken:"
    assert "GPU 0 (NVIDIA GeForce RTX 3090) is held by alice, pid 123" in lines[1]
    assert "GPU 1 (NVIDIA GeForce RTX 3090) cannot be used: it is lost" in lines[2]
    assert "is hidden by CUDA_VISIBLE_DEVICES" in lines[3]
    assert lines[4].endswith('or use "cpu:2" to train on the CPU. (LS903)')


@pytest.mark.parametrize(
    ("request_", "inventory", "advice"),
    [
        ("auto:3", machine(gpu(0), gpu(1)), 'Ask for at most 2, or use "cpu:3" to train on the CPU.'),
        ("auto", machine(gpu(0, problem="it is lost")), 'Use "cpu:2" to train on the CPU.'),
        (
            "auto",
            machine(gpu(0, is_visible=False), cuda_visible_devices="GPU-zz"),
            'Unset CUDA_VISIBLE_DEVICES or name other GPUs in it, or use "cpu:2" to train on the CPU.',
        ),
        (
            "auto",
            machine(held(0)),
            (
                "Wait, share one (auto@10GiB asks for free memory alone), take busy ones with --force "
                '(in Python force=True), or use "cpu:2" to train on the CPU.'
            ),
        ),
        ("auto>=20GiB", machine(held(0)), 'Wait, ask for less memory, or use "cpu:2" to train on the CPU.'),
    ],
)
def test_only_what_would_help_is_advised(request_: str, inventory: Inventory, advice: str) -> None:
    # To wait and --force were advised where nobody held a card, and neither would have changed anything.
    with pytest.raises(DeviceError) as refused:
        choose_devices(request_, inventory=inventory)
    assert str(refused.value).splitlines()[-1] == f"{advice} (LS903)"


def test_named_cards_that_are_held_are_refused() -> None:
    with pytest.raises(DeviceError) as refused:
        choose_devices([0, 1, 3], inventory=LAB)
    assert "GPU 0 is held by alice, pid 123, python train.py, since 10:32; GPU 3 is held" in str(refused.value)
    assert "--force (in Python force=True)" in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "expected"), [([0, 3], [0, 3]), ("auto:4", [0, 1, 2, 4]), ("auto", [0, 1, 2, 3, 4])]
)
def test_force_takes_what_others_hold(request_: DeviceRequest, expected: list[int]) -> None:
    placement = choose_devices(request_, inventory=LAB, force=True)
    assert taken(placement, LAB) == expected
    assert "held by alice" in placement.reason


DESKTOP = replace(ALICE, is_graphics=True, memory_bytes=2 * GIB)
OURSELVES = replace(ALICE, is_self=True, memory_bytes=8 * GIB)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (gpu(0), ""),
        (gpu(0, free=23.0), ""),  # the driver's own
        (gpu(0, total=80, free=76.5), ""),
        (gpu(0, free=20), "in use: 4.0 GiB are held by a process that cannot be seen from here"),
        (gpu(0, total=80, free=75), "in use: 5.0 GiB"),
        (held(0, DESKTOP, free=21.5), ""),
        (held(0, DESKTOP, free=10), "in use: 12.0 GiB"),
        (held(0, OURSELVES, free=15.5), ""),
        (held(0, replace(DESKTOP, memory_bytes=None), free=10), ""),
        (held(0, replace(ALICE, memory_bytes=None)), "held by alice"),
        (held(0, DESKTOP, ALICE, replace(ALICE, pid=7)), "pid 123, python train.py, since 10:32 and by alice, pid 7"),
        (gpu(0, memory_free_bytes=None, memory_total_bytes=None), ""),
    ],
)
def test_who_makes_a_card_busy(card: Any, said: str) -> None:
    found = find_occupants(card, machine(card))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        (replace(ALICE, since=NOW.replace(day=7)), "alice, pid 123, python train.py, since 2026-03-07 14:00"),
        (
            replace(ALICE, user=None, command=None, since=None),
            "pid 123, whose user and command cannot be seen from here",
        ),
        (replace(ALICE, command=None, since=None), "held by alice, pid 123"),
        (replace(ALICE, command="python " + "x" * 80), "python " + "x" * 50 + "..., since"),
    ],
)
def test_holders_are_described_as_far_as_they_are_known(holder: Any, said: str) -> None:
    assert said in find_occupants(held(0, holder), LAB)


HIDDEN = machine(gpu(0), gpu(1, is_visible=False), gpu(2), cuda_visible_devices="0,2")


def test_hidden_cards_are_not_taken() -> None:
    assert taken(choose_devices("auto", inventory=HIDDEN), HIDDEN) == [0, 2]
    with pytest.raises(DeviceError, match=r"GPU 1, which CUDA_VISIBLE_DEVICES=0,2 hides .* it shows: GPU 0, GPU 2"):
        choose_devices([1], inventory=HIDDEN)


@pytest.mark.parametrize("variable", ["", "-1"])
def test_auto_obeys_who_hides_every_card(variable: str) -> None:
    placement = choose_devices("auto", inventory=machine(gpu(0, is_visible=False), cuda_visible_devices=variable))
    assert [device.name for device in placement.devices] == ["cpu", "cpu"]
    assert "hides every GPU" in placement.reason


def test_a_faulty_driver_does_not_send_auto_to_the_cpu() -> None:
    faulty = machine(problem="the NVIDIA driver was updated: reboot", is_faulty=True)
    with pytest.raises(DeviceError, match=r"auto looks for GPUs, but the NVIDIA driver .*: reboot[.] Repair that"):
        choose_devices("auto", inventory=faulty)
    assert choose_devices("cpu:2", inventory=faulty).reason == "CPU, 2 workers"


def test_a_torch_without_cuda_is_the_reason() -> None:
    inventory = machine(gpu(0), problem="this torch (2.13.0+cpu) is built without CUDA")
    assert choose_devices("auto", inventory=inventory).reason == (
        "CPU, 2 workers (this torch (2.13.0+cpu) is built without CUDA)"
    )
    with pytest.raises(DeviceError, match="GPU 0, but this torch"):
        choose_devices([0], inventory=inventory)


SPLIT = machine(instance(0, 0), instance(0, 1), gpu(1))


def test_mig_instances_are_cards_of_their_own() -> None:
    assert taken(choose_devices(["0:1", 1], inventory=SPLIT), SPLIT) == ["0:1", 1]
    assert taken(choose_devices("MIG-01", inventory=SPLIT), SPLIT) == ["0:1"]
    with pytest.raises(DeviceError, match=r"split by MIG[.] Name one of its instances: 0:0, 0:1"):
        choose_devices([0], inventory=SPLIT)


NEW_NCCL = replace(SPLIT, nccl_version=(2, 30, 1))


def test_auto_takes_one_instance_of_each_card() -> None:
    # It took two of one card, which NCCL refuses in the first collective.
    assert taken(choose_devices("auto:2", inventory=SPLIT), SPLIT) == ["0:0", 1]
    placement = choose_devices("auto", inventory=SPLIT)
    assert taken(placement, SPLIT) == ["0:0", 1]
    assert "GPU 0:1 is on the card of GPU 0:0, and NCCL before 2.30 does not join" in placement.reason
    assert taken(choose_devices("auto:1", inventory=SPLIT), SPLIT) == [1]
    with pytest.raises(DeviceError, match=r"of 3 here 2 can be taken:\n(.*\n)*  GPU 0:1 .* is on the card of GPU 0:0"):
        choose_devices("auto:3", inventory=SPLIT)
    assert taken(choose_devices("auto:3", inventory=NEW_NCCL), SPLIT) == ["0:0", "0:1", 1]


def test_named_instances_of_one_card_are_refused_for_several_workers() -> None:
    with pytest.raises(DeviceError, match=r"asks for GPU 0:1, which is on the card of GPU 0:0, and NCCL before 2[.]30"):
        choose_devices(["0:0", "0:1"], inventory=SPLIT)
    assert taken(choose_devices(["0:0", "0:1"], inventory=SPLIT, force=True), SPLIT) == ["0:0", "0:1"]
    assert taken(choose_devices(["0:0", "0:1"], inventory=NEW_NCCL), SPLIT) == ["0:0", "0:1"]


@pytest.mark.parametrize(("free", "is_taken"), [(20.5, True), (13, True), (11, False)])
def test_the_desktop_of_windows_does_not_make_the_only_card_busy(free: float, *, is_taken: bool) -> None:
    # Its processes cannot be seen under WSL, and `auto` refused the card.
    card = gpu(0, free=free)
    assert bool(find_occupants(card, machine(card))) is True
    assert bool(find_occupants(card, machine(card, is_wsl=True))) is not is_taken


# The driver keeps a little of each card for itself, not always the same.
@pytest.mark.parametrize(
    ("other", "is_hinted"),
    [(gpu(1, total=23.99), False), (gpu(1, name="Tesla T4"), True), (gpu(1, total=12, free=12), True)],
)
def test_unequal_cards_bring_a_hint(other: Any, is_hinted: bool) -> None:
    assert ('balance="speed"' in choose_devices("auto", inventory=machine(gpu(0), other)).hint) == is_hinted


def test_cards_without_known_memory_are_taken_unless_memory_is_asked_for() -> None:
    bare = machine(gpu(0, uuid=None, cuda_name="0", memory_total_bytes=None, memory_free_bytes=None))
    assert choose_devices("auto", inventory=bare).devices[0].visible == "0"
    with pytest.raises(DeviceError, match="does not report its free memory"):
        choose_devices("auto>=1GiB", inventory=bare)


def test_a_request_is_resized() -> None:
    for text, expected in (("auto:3>=20GiB", "auto:2>=20GiB"), ("cpu", "cpu:2"), ("0,3,1", "0,3")):
        assert resized(parse_request(text), 2) == parse_request(expected)
    with pytest.raises(DeviceError, match=r"names 1 device, too few for 2 workers[.]"):
        resized(parse_request([0]), 2)


def test_a_placement_is_taken_as_it_is() -> None:
    placement = choose_devices([3, 1], inventory=FOUR)
    assert place_workers(placement, workers=2) is placement
    with pytest.raises(DeviceError, match="a placement of 2 workers, but workers is 3"):
        place_workers(placement, workers=3)
