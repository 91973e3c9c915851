"""The additions of shm.c have the bits of torch.add, with the processor's wide instructions and without."""

import ctypes
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.comm.shm import native
from lockstep.comm.shm.arithmetic import _SUMS, Step, count_scratch, schedule
from lockstep.comm.shm.phases import DONE, NOWHERE, Exchange, PreparedCall
from lockstep.comm.shm.programs import END, PLACE_BITS, REDUCE, Program

KINDS = {dtype: kind for dtype, (kind, width) in _SUMS.items() if width == 1}
BLOCK_BYTES = 16 << 10
GUARD = 64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module", params=["as built", "plain"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "as built":
        return native.load()
    hatch_build = pytest.importorskip("hatch_build")
    if not hatch_build.find_compiler():
        pytest.skip("there is no C compiler here")
    path = tmp_path_factory.mktemp("plain") / "plain.so"
    options = ["-DLOCKSTEP_SHM_SOURCE=0", "-D__builtin_cpu_supports(feature)=0", "-lgcc"]
    source = Path(native.__file__).with_name("shm.c")
    subprocess.run([*hatch_build.find_compiler(), *hatch_build.FLAGS, "-o", path, source, *options], check=True)
    plain = ctypes.CDLL(str(path))
    for name, (result, arguments) in native._SIGNATURES.items():
        getattr(plain, name).restype, getattr(plain, name).argtypes = result, arguments
    return plain


def reduce_natively(
    library: ctypes.CDLL, kind: int, count: int, out: int, parts: Sequence[int], steps: Sequence[Step]
) -> None:
    """Run one reduction of a group of one rank: its bases are two send buffers and then the table."""
    numbers = [number for step in steps for number in (step.left, step.right, step.target)]
    places = [(2 + number) << PLACE_BITS for number in range(1 + len(parts))]
    row = [kind, count, len(parts), len(steps), 0, *places, *numbers]
    rows = array("q", [REDUCE, 2 + len(row), *row, END])
    program = Program(rows, rows.buffer_info()[0], count_scratch(steps, len(parts)))
    scratch = ctypes.create_string_buffer(max(program.num_scratch, 1) * BLOCK_BYTES)
    exchange = Exchange(size=1, scratch=ctypes.addressof(scratch))
    call = PreparedCall(ctypes.addressof(exchange), program, [out, *parts], b"", NOWHERE)
    assert library.lockstep_run(call.address) == DONE


def patterns(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    """Any bits: of half precision all 65,536; else every tenth number is 0, the smallest, the largest or infinite."""
    generator = torch.Generator().manual_seed(seed)
    words = WORDS[dtype.itemsize]
    if dtype.is_floating_point and dtype.itemsize == 2 and length == 1 << 16:
        return torch.randperm(length, generator=generator).to(words).view(dtype)
    drawn = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        some = [0.0, limits.smallest_normal, limits.smallest_normal / 2, limits.max, torch.inf, 1.0, limits.eps / 2]
        special = torch.tensor([*some, *(-number for number in some)], dtype=dtype)
        chosen = torch.randint(0, 10 * len(special), (length,), generator=generator)
        drawn = torch.where(chosen < len(special), special[chosen % len(special)], drawn)
    return drawn


def place(tensor: Tensor, shift: int) -> tuple["ctypes.Array[ctypes.c_char]", int]:
    """Copy a tensor into memory where it begins at any byte, between guards."""
    memory = ctypes.create_string_buffer(b"\x5a" * (2 * GUARD + 16 + tensor.nbytes))
    address = -(-ctypes.addressof(memory) // GUARD) * GUARD + shift
    ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
    return memory, address


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    differs = found.view(WORDS[found.itemsize]) != expected.view(WORDS[found.itemsize])
    if found.is_floating_point():
        differs &= ~(found.isnan() & expected.isnan())  # whose sign and payload torch does not promise
    assert not differs.any(), (found[differs][:3], expected[differs][:3])


def check(library: ctypes.CDLL, parts: Sequence[Tensor], shifts: Sequence[int], aliased: int | None) -> None:
    """Reduce into a tensor of its own or into a part, and compare; nothing beside it is written."""
    dtype, length, steps = parts[0].dtype, parts[0].numel(), schedule(len(parts))
    registers = dict(enumerate(parts))
    expected = parts[0]
    for step in steps:
        expected = registers[step.target] = torch.add(registers[step.left], registers[step.right])
    placed = [place(part, shift) for part, shift in zip(parts, shifts, strict=False)]
    memory, out = place(torch.zeros_like(parts[0]), shifts[-1]) if aliased is None else placed[aliased]
    before = memory.raw
    reduce_natively(library, KINDS[dtype], length, out, [address for _, address in placed], steps)
    start = out - ctypes.addressof(memory)
    found = torch.empty_like(parts[0])
    ctypes.memmove(found.data_ptr(), out, found.nbytes)
    assert_same_bits(found, expected)
    assert memory.raw[:start] == before[:start]
    assert memory.raw[start + found.nbytes :] == before[start + found.nbytes :]
    for number, (part, (kept, address)) in enumerate(zip(parts, placed, strict=True)):
        offset = address - ctypes.addressof(kept)
        if number != aliased:
            assert kept.raw[offset : offset + part.nbytes] == ctypes.string_at(part.data_ptr(), part.nbytes)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_additions_have_the_bits_of_torch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    if not library.lockstep_adds(KINDS[dtype]):
        assert dtype is torch.float16, "only this one may be left to torch"
        return
    block = BLOCK_BYTES // dtype.itemsize
    lengths = [*range(71), block - 1, block, block + 1, 2 * block + 3, 1 << 16]
    for seed, length in enumerate(lengths):
        parts = [patterns(dtype, length, 2 * seed + number) for number in range(2)]
        for aliased in (None, 0, 1):
            check(library, parts, [0, 0, 0], aliased)
        check(library, parts, [seed % 16, seed % 7, seed % 5], None)
        check(library, parts, [seed % 11, seed % 3], seed % 2)
    for num_parts in range(1, 34):
        parts = [patterns(dtype, block + 5, 100 * num_parts + number) for number in range(num_parts)]
        check(library, parts, [0] * (num_parts + 1), None)
        check(library, parts, [number % 9 for number in range(num_parts)], num_parts - 1)


def test_a_reduction_may_have_any_number_of_parts(library: ctypes.CDLL) -> None:
    # A fixed number of places on the stack would be written beyond, by a group of many shards.
    parts = [torch.full((3,), 1.0) for _ in range(5000)]
    check(library, parts, [0] * 5001, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_multiplications_have_the_bits_of_torch_and_see_what_is_not_finite(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    for length in (*range(41), 1 << 14):
        drawn = patterns(dtype, length, length)
        for factor, numbers in ((1 / 3, drawn), (1 / 2, drawn.nan_to_num(1.0)), (2.0, drawn.nan_to_num(1.0))):
            expected = numbers * factor
            for shift, is_aliased in ((0, False), (length % 7, False), (length % 5, True)):
                memory, source = place(numbers, shift)
                kept, out = (memory, source) if is_aliased else place(torch.zeros_like(numbers), shift)
                before = kept.raw
                rows = array("q", (out, source, length, out, source, 0))
                is_finite = library.lockstep_multiply(rows.buffer_info()[0], 2, factor, KINDS[dtype])
                found = torch.empty_like(numbers)
                ctypes.memmove(found.data_ptr(), out, found.nbytes)
                assert_same_bits(found, expected)
                assert bool(is_finite) == bool(expected.isfinite().all())
                start = out - ctypes.addressof(kept)
                assert kept.raw[:start] == before[:start]
                assert kept.raw[start + found.nbytes :] == before[start + found.nbytes :]
