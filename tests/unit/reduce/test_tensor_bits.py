"""Numbers for the bits of tensors: what they must tell apart."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.asynchronous_device import asynchronous_device
from torch import Tensor

from lockstep.reduce.tensor_bits import (
    glance_at_bits,
    is_finite,
    multiply,
    numbers_of_bits,
    sum_for_finite_check,
    sum_of_bits,
)

ALL_DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def number_of(*tensors: Tensor) -> int:
    return int(sum_of_bits(tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.complex64])
def test_signs_and_powers_of_two_change_the_number(dtype: torch.dtype) -> None:
    values = torch.randn(6, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    numbers = [int(sum_of_bits([each])) for each in (values, -values, values * 2, values / 4, values + 1)]
    assert len(set(numbers)) == 5


def test_the_number_does_not_depend_on_how_a_tensor_is_laid_out() -> None:
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    laid_out = [values, values.to(memory_format=torch.channels_last), values[0, 0, 0, 0], values[0, 0, 0, 0].clone()]
    first, second, third, fourth = (int(sum_of_bits([each])) for each in laid_out)
    assert first == second
    assert third == fourth


def swap(values: Tensor, here: int, there: int) -> Tensor:
    other = values.clone()
    other[[here, there]] = values[[there, here]]
    return other


def flip_signs(values: Tensor, *places: int) -> Tensor:
    other = values.clone()
    other[[*places]] *= -1
    return other


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "the rows of a matrix in another order": lambda values: values.view(-1, 512).flip(0).reshape(-1),
    "the columns": lambda values: values.view(-1, 512).flip(1).reshape(-1),
    "two rows swapped": lambda values: torch.cat([values[512:1024], values[:512], values[1024:]]),
    "blocks of the hash swapped": lambda values: torch.cat(
        [values[1 << 15 : 1 << 16], values[: 1 << 15], values[65536:]]
    ),
    "moved by one": lambda values: values.roll(1),
    "two neighbours swapped": lambda values: swap(values, 6, 7),
    "two far ones swapped": lambda values: swap(values, 3, 3 + (1 << 16)),
    "two signs": lambda values: flip_signs(values, 4, 5),
    "two signs that are far apart": lambda values: flip_signs(values, 0, 1 << 15),
    "signs at the corners of a square": lambda values: flip_signs(values, 0, 512, 1024, 1536),
    "all signs": lambda values: -values,
    "two that add up to the same": lambda values: values + torch.eye(2, 90_112)[0] - torch.eye(2, 90_112)[1],
}


@pytest.mark.parametrize("what", MOVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_number_depends_on_the_place_of_each_element(what: str, dtype: torch.dtype) -> None:
    values = (1.0 + torch.arange(90_112) % 7).to(dtype)  # exact in each dtype, with the same bits in many places
    assert number_of(values) == number_of(values.clone()) != number_of(MOVED[what](values).to(dtype))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("size", [2, 5, 1 << 15, (1 << 15) + 3])
def test_a_flip_of_any_one_bit_changes_the_number(dtype: torch.dtype, size: int) -> None:
    values = torch.ones(size, dtype=dtype)
    found = {number_of(values)}
    for byte in (0, values.nbytes - 1):
        for bit in range(1 if dtype is torch.bool else 8):
            other = values.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            found.add(number_of(other))
    assert len(found) == (3 if dtype is torch.bool else 17)


def test_the_number_depends_on_dtype_and_shape_and_order() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32), torch.zeros(5)]
    zeros += [torch.zeros(()), torch.zeros(0), torch.zeros(0, 3), torch.zeros(2, dtype=torch.complex64)]
    assert len({number_of(each) for each in zeros}) == len({glance_at_bits(each) for each in zeros}) == len(zeros)
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert len({number_of(first, second), number_of(second, first), number_of(torch.cat([first, second]))}) == 3


def test_not_a_number_has_a_number_of_its_own() -> None:
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert number_of(quiet) != number_of(other)
    assert number_of(quiet) == number_of(quiet.clone())
    assert number_of(torch.tensor([0.0])) != number_of(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_the_number_is_the_same_on_any_number_of_threads_and_at_any_place_in_memory(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (70_001,), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = number_of(values)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert number_of(values) == expected
    finally:
        torch.set_num_threads(before)
    room = torch.zeros(70_002, dtype=dtype)
    room[1:] = values
    assert number_of(room[1:]) == number_of(torch.stack([values, values], 1)[:, 1]) == expected


def test_the_number_is_the_same_on_every_device() -> None:
    """Ranks of one job, and runs that are compared, may be on other devices."""
    tensors = [torch.arange(100_000, dtype=torch.float32), torch.ones(3, dtype=torch.float64), torch.ones(3).bfloat16()]
    assert number_of(*tensors) == 3998567208355632
    with asynchronous_device() as device:
        moved = [each.to(device.name) for each in tensors]
        assert number_of(*moved) == 3998567208355632
        assert number_of(moved[1]) == number_of(tensors[1])
        assert number_of(moved[1][:0]) == number_of(tensors[1][:0])


@pytest.mark.parametrize("size", [1, 7, 5000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_glance_tells_tensors_apart_by_one_element(size: int, dtype: torch.dtype) -> None:
    values = torch.ones(size, dtype=dtype)
    other = values.clone()
    other[0] = -1
    assert glance_at_bits(values) == glance_at_bits(values.clone()) != glance_at_bits(other)


def test_a_glance_sees_what_lies_apart_or_nowhere() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    columns = wide[:, 1:3]
    before = glance_at_bits(columns)
    wide[2, 2] = 50
    assert glance_at_bits(columns) != before
    assert glance_at_bits(wide[:, :0]) != glance_at_bits(wide[:0])


def test_a_sparse_tensor_has_the_number_of_its_entries() -> None:
    first, second = (torch.eye(3).roll(turn, 0).to_sparse() for turn in (0, 1))
    assert number_of(first) == number_of(first.clone()) != number_of(second)
    assert glance_at_bits(first) != glance_at_bits(second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((1000,), 100.0, dtype=dtype)
    assert is_finite(values)
    assert is_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))  # their sum is not
    values[-1] = bad
    assert not is_finite(values)
    assert not is_finite(values.to_sparse())


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (300_001,)])
def test_multiplying_has_the_bits_of_torch_and_sees_what_is_not_finite(
    dtype: torch.dtype, shape: tuple[int, ...], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    transposed = values.mT if len(shape) > 1 else values
    negative = torch.complex(values, -values).conj().imag if dtype is torch.float32 else values  # the sign is a flag
    for source in (values, transposed, negative):
        for out in (torch.empty_like(source), torch.empty(source.shape, dtype=dtype)):
            assert multiply(source, 1 / 3, out)
            assert torch.equal(out, source * (1 / 3))
            if source.numel():
                out.as_strided((1,), (1,)).fill_(math.nan)
                assert not multiply(out, 0.5, out)
    assert multiply(torch._efficientzerotensor(shape, dtype=dtype), 0.5, torch.ones(shape, dtype=dtype))


# -- The sum by which numbers that are not finite are found ------------------------------------------------------------


CPU = torch.device("cpu")


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Small and large ones, of 100 everywhere: 65,504 is the largest number of half precision."""
    return [torch.full((size,), 100.0, dtype=dtype) for size in (3, 1 << 15, 0, 1000)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_finite_numbers_have_a_finite_sum(dtype: torch.dtype) -> None:
    total = sum_for_finite_check(tensors(dtype), CPU)
    assert total == 100.0 * (3 + (1 << 15) + 1000)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_one_bad_number_makes_the_sum_not_finite(bad: float, dtype: torch.dtype, number: int) -> None:
    found = tensors(dtype)
    found[number][-1] = torch.tensor(complex(0.0, bad) if dtype.is_complex else bad)
    assert not math.isfinite(sum_for_finite_check(found, CPU))


def test_infinities_of_both_signs_are_seen() -> None:
    assert not math.isfinite(sum_for_finite_check([torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf])], CPU))
    assert sum_for_finite_check([], CPU) == 0


@pytest.mark.parametrize("has_library", [True, False])
def test_numbers_of_many_tensors_are_those_of_each(has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (0, 1, 3, (1 << 14) - 1, 1 << 15, (1 << 15) + 1, 90_112, (1 << 14) + 2)
    many = [torch.randn(size).to(dtype) for size in sizes for dtype in ALL_DTYPES]
    many += [many[-1].view(2, -1).T, torch.randn(200, 400).T, torch.randn(3, 3).conj(), torch.eye(3).to_sparse()]
    expected = [int(sum_of_bits([each])) for each in many]
    if not has_library:
        monkeypatch.setattr("lockstep.reduce.tensor_bits._library", lambda: None)
    assert numbers_of_bits(many) == [int(sum_of_bits([each])) for each in many] == expected
    assert numbers_of_bits([]) == []
