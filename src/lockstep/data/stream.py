"""`Stream`: data that are read from the beginning, as the samples of a loader."""

import copy
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import PurePath
from typing import Any, Self, final

from torch.utils.data import Dataset, IterableDataset

from lockstep.errors import counted

BUFFER_SIZE = 1000
"""The usual number of records that are shuffled together."""


@final
class Stream(IterableDataset[Any]):
    """Data that are read from their beginning: give it to a `ShardedLoader`.

        stream = ls.Stream(["a.jsonl", "b.jsonl"], read=read_lines, transform=decode, buffer_size=10_000)
        loader = ls.ShardedLoader(stream, batch_size=256, num_shards=4)

    The order of the samples depends on the stream, the seed and the epoch alone: records are read in the order of the
    stream, and shuffled among `buffer_size` neighbours. Every worker reads all records and runs `transform` for its
    own samples. With `lengths` it reads its own share alone.

    Args:
        source: What can be iterated over again and again, each time with the same records: an `IterableDataset`, one
            of Hugging Face's, a WebDataset. Not a generator. Where it has `set_epoch`, this is called before each
            pass; its records may then be others in each epoch. With `read`, a list of parts: names of files, say.
        read: Returns the records of one part. Shuffled, the parts come in another order in each epoch.
        transform: Makes a sample of a record, in the loading processes and only on the worker that needs it. It may
            draw random numbers. None if the records are samples.
        lengths: How many records each part has. The number of steps is known then. If there are at least as many parts
            as shards, each worker reads its own share of the shuffled stream alone.
        buffer_size: How many records are shuffled together; so many are kept in memory, before `transform`.
        steps_per_epoch: How many steps an epoch has, for a stream without an end or a very long one: the next epoch
            reads on where this one has ended, and when the stream ends it begins again. None for one pass.

    Raises:
        TypeError: The source can be read only once, or is no iterable.
        ValueError: There are no parts, or not one length for each; a number that is less than 1; or a stream of which
            each rank gets a part of its own.
    """

    def __init__(
        self,
        source: Any,
        *,
        read: Callable[[Any], Iterable[Any]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        lengths: Sequence[int] | None = None,
        buffer_size: int = BUFFER_SIZE,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.parts = _check_parts(source) if read is not None else [_check_source(source)]
        self.read = read
        self.transform = transform
        self.lengths = None if lengths is None else _check_lengths(lengths, self.parts, has_read=read is not None)
        self.buffer_size = _check_number("buffer_size", buffer_size)
        self.steps_per_epoch = None if steps_per_epoch is None else _check_number("steps_per_epoch", steps_per_epoch)
        if self.lengths is not None and steps_per_epoch is not None:
            raise ValueError(
                "A stream has lengths or steps_per_epoch, not both: with lengths the number of steps follows from "
                "them and the batch size. Leave one of them out. (LS409)"
            )
        self.limit: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples in the order of the stream."""
        records = chain.from_iterable(self.open(part, 0) for part in range(len(self.parts)))
        for record in islice(records, self.limit):
            yield record if self.transform is None else self.transform(record)

    @property
    def num_records(self) -> int | None:
        """How many records one pass has, if that is known."""
        if self.lengths is None:
            return None
        return sum(self.lengths) if self.limit is None else min(self.limit, sum(self.lengths))

    def first(self, number: int) -> Self:
        """Return a stream of the first records of this one."""
        found = copy.copy(self)
        found.limit = number if self.limit is None else min(number, self.limit)
        found.steps_per_epoch = None
        return found

    @property
    def has_state(self) -> bool:
        """Whether the source can tell its place, and go there."""
        return self.read is None and _has_state(self.parts[0])

    def open(self, part: int, pass_number: int) -> "OpenPart":
        """Begin to read a part."""
        if self.read is not None:
            return OpenPart(self.read(self.parts[part]), None)
        # A copy, where it holds its place: otherwise who looks at it once would change where the next one begins.
        source = copy.deepcopy(self.parts[0]) if self.has_state else self.parts[0]
        set_epoch = getattr(source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(pass_number)
        return OpenPart(source, source if self.has_state else None)

    def name_part(self, part: int) -> str:
        """Return a part in words, for messages."""
        return f"part {self.parts[part]!r} of the stream" if self.read is not None else "the stream"

    def __str__(self) -> str:
        """Return in words what the order of the records depends on: equal for equal streams."""
        name = f"a stream of {type(self.parts[0]).__name__}"
        if self.read is not None:
            names = "\n".join([*map(_describe_part, self.parts), str(self.lengths)])
            name = f"a stream of {counted(len(self.parts), 'part')} ({zlib.crc32(names.encode()):08x})"
        if self.num_records is not None:
            name += f" with {self.num_records} records"
        elif self.limit is not None:
            name += f" with at most {self.limit} records"
        return name if self.steps_per_epoch is None else f"{name}, {self.steps_per_epoch} steps an epoch"


@final
class OpenPart:
    """A part of a stream that is being read; `place` tells where, and goes there before the first record; or None."""

    def __init__(self, records: Iterable[Any], place: Any) -> None:
        self._records = records
        self._place = place
        self._iterator: Iterator[Any] | None = None

    def load(self, state: Any) -> None:
        """Go where `state` was returned."""
        self._place.load_state_dict(state)

    def state(self) -> Any:
        """Return the present place, for `load`; None where it cannot be told, and at the beginning."""
        return None if self._place is None or self._iterator is None else self._place.state_dict()

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._records)
        return self._iterator


def as_stream(dataset: Any) -> Stream | None:
    """Return a data set as a stream; None if it is no stream."""
    if isinstance(dataset, Stream):
        return dataset
    is_stream = isinstance(dataset, IterableDataset) or (
        not isinstance(dataset, Dataset) and hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )
    return Stream(dataset) if is_stream else None


def _check_source(source: Any) -> Any:
    name = type(source).__name__
    if isinstance(source, Iterator):
        raise TypeError(
            f"The stream is a {name}, which can be read only once, so a second epoch or a resumed run could not read "
            "it. Give an object whose __iter__ begins anew each time: a class with __iter__, or ls.Stream(files, "
            "read=function) with the function that makes the generator. (LS409)"
        )
    if not hasattr(source, "__iter__"):
        raise TypeError(f"The stream is a {name}, expected an object with __iter__, as an IterableDataset. (LS409)")
    if getattr(source, "__dict__", {}).get("_distributed") is not None:  # datasets.distributed.split_dataset_by_node
        raise ValueError(
            "The stream gives each rank a part of its own (split_dataset_by_node), so the samples would depend on the "
            "number of workers. Give the whole stream, which the loader divides. (LS409)"
        )
    return source


def _check_parts(source: Any) -> Sequence[Any]:
    if isinstance(source, str | bytes) or not isinstance(source, Sequence):
        raise TypeError(
            f"The parts of the stream are a {type(source).__name__}, expected a list: with `read`, give a list of file "
            "names, or of whatever `read` takes. (LS409)"
        )
    if not source:
        raise ValueError("The stream has no parts: the list is empty. Check the folder, or the pattern. (LS409)")
    return source


def _check_lengths(lengths: Sequence[int], parts: Sequence[Any], *, has_read: bool) -> list[int]:
    given: list[Any] = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if len(given) != len(parts):
        what = counted(len(parts), "part") if has_read else "no parts, as it has no `read`"
        raise ValueError(f"lengths has {len(given)} numbers, and the stream has {what}: give one for each. (LS409)")
    found: list[int] = []
    for each in given:
        length = _whole_number(each)
        if length is None or length < 0:
            raise ValueError(f"lengths holds {each!r}, expected whole numbers of at least 0. (LS409)")
        found.append(length)
    if not sum(found):
        raise ValueError("lengths are all zero: the stream has no records. (LS409)")
    return found


def _check_number(name: str, value: int) -> int:
    found = _whole_number(value)
    if found is None or found < 1:
        raise ValueError(f"{name} of the stream is {value!r}, expected a whole number of at least 1. (LS409)")
    return found


def _whole_number(value: Any) -> int | None:
    """Return a whole number, which may be NumPy's, as one of Python; None for what is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _has_state(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def _describe_part(part: Any) -> str:
    """Return a part's name; of a path the last part, since folders may differ between hosts."""
    if isinstance(part, str | PurePath):
        return PurePath(part).name
    return repr(part) if isinstance(part, int | float | tuple) else type(part).__name__
