"""Sums of CPU tensors over several hosts: in shared memory within each host, and once per host over Gloo between them.

    host 0: ranks 0, 1, 4                              host 1: ranks 2, 3
    1 the ranks compare their calls                    the ranks compare their calls
    2 rank 0 has a digest of the call   <- lane 0 ->   rank 2 has one: the hosts compare them
    3 the sum of ranks 0, 1, 4                         the sum of ranks 2, 3        in shared memory, on every rank
    4 rank 0: first half                <- lane 0 ->   rank 2: first half           the sum of both hosts
      rank 1: second half               <- lane 1 ->   rank 3: second half
    5 both halves, on every rank                       both halves, on every rank   in shared memory

A lane has one rank of each host, and there are as many lanes as the host with the fewest ranks has. Of a short tensor
steps 1 and 3 are one, and so are 2 and 4: the sums travel on the page of the digest.

An ordered sum has the order of the tree over all shards: a host adds the maximal subtrees of which it has every shard,
and where the tree joins shards of two hosts first, these are several, all of which are sent. A plain sum is in the
order of the tree over the ranks of a host, then over hosts as Gloo adds.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lockstep.comm.calls import LONGEST_CALL, pack_text, require_equal_texts
from lockstep.comm.hosts import GroupHosts
from lockstep.comm.messages import gather_single, wait_all
from lockstep.comm.ordered import OrderedReductions
from lockstep.comm.shm import collectives, programs
from lockstep.comm.shm.arithmetic import reduction
from lockstep.comm.shm.collectives import copy_into
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.world import World
from lockstep.errors import CollectiveMismatchError
from lockstep.shards.assignment import split_evenly
from lockstep.shards.tree import Node, add_in_tree_order, merged_nodes

_TEXTS: Final = b"comparing calls"
_OTHER_HOST: Final = b"a call that another host makes"
_DIGEST_BYTES: Final = 32
_PAGE_BYTES: Final = 4096
"""What hosts exchange of each call, and of a short one all: of one length, whatever calls they make."""
_ONE_LANE_BYTES: Final = 64 << 10
"""Up to here one lane carries everything."""
_PART_BYTES: Final = 4 << 20
Layout = tuple[tuple[Node, ...], ...]
SumInside = Callable[[slice, Sequence[Tensor]], Mapping[Node, Tensor]]
"""Adds a slice of what this host has into its targets, one for each sum (collective over the ranks of the host)."""


@final
@dataclass(frozen=True, slots=True)
class HostSums:
    """What a host adds up by itself. Pure."""

    of_hosts: Layout
    """The subtrees of every host."""
    of_ranks: tuple[tuple[Node, Layout], ...]
    """Each subtree of this host, with what its ranks hold of it, as shards counted from its first."""


@lru_cache(maxsize=64)
def plan_host_sums(hosts: tuple[tuple[int, ...], ...], host: int, layout: Layout, num_shards: int) -> HostSums:
    of_hosts = [merged_nodes([node for rank in ranks for node in layout[rank]], num_shards) for ranks in hosts]

    def held(rank: int, first: int, last: int) -> tuple[Node, ...]:
        return tuple((lo - first, hi - first) for lo, hi in layout[rank] if first <= lo and hi <= last)

    of_ranks = [
        ((first, last), tuple(held(rank, first, last) for rank in hosts[host])) for first, last in of_hosts[host]
    ]
    return HostSums(of_hosts=tuple(map(tuple, of_hosts)), of_ranks=tuple(of_ranks))


@final
class HostsCarrier:
    """Carries the sums of one group; its methods are collective over that group, and called one at a time."""

    @torch.inference_mode(False)  # or the pages could not be written outside of it
    def __init__(
        self,
        hosts: GroupHosts,
        rank: int,
        global_ranks: Sequence[int],
        exchange: PhaseExchange,
        lane: ProcessGroup | None,
    ) -> None:
        """`exchange` is that of the ranks of this host, `lane` the group of the lane of this rank, if it has one."""
        self._hosts = hosts.hosts
        self._global_ranks = global_ranks
        self._exchange = exchange
        self._host = next(number for number, ranks in enumerate(self._hosts) if rank in ranks)
        self._place = self._hosts[self._host].index(rank)
        self._num_lanes = min(map(len, self._hosts))
        self._lane = World(rank=self._host, world_size=len(self._hosts), group=lane, is_torchs=False)
        self._one_each: Layout = tuple(((host, host + 1),) for host in range(len(self._hosts)))
        self._reductions: dict[int, OrderedReductions] = {}
        self._pages = torch.zeros(len(self._hosts), _PAGE_BYTES, dtype=torch.uint8, device="cpu")

    # -- Comparing calls -----------------------------------------------------------------------------------------

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call, or raise on all alike if they differ."""
        with self._explained(call):
            self._compare_after(partial(self._exchange.compare_calls, call), call)
            self._exchange.compare_calls(call)  # which fails where the first rank has found another call elsewhere

    def _compare_after(self, first: Callable[[], object], call: bytes) -> None:
        """Run `first`, in which the ranks of this host compare their calls, then let the first one ask other hosts.

        If these differ, it raises, and the next phase of the other ranks does.
        """
        try:
            first()
        except CollectiveMismatchError:
            self._is_same_on_hosts(bytes(_DIGEST_BYTES))
            raise
        if not self._is_same_on_hosts(hashlib.blake2b(call, digest_size=_DIGEST_BYTES).digest()):
            self._exchange.compare_calls(_OTHER_HOST)
            raise CollectiveMismatchError(f"Another host does not make {call.decode()}. (LS201)")

    def _is_same_on_hosts(self, digest: bytes) -> bool:
        """Exchange the first page of a call between the first ranks of the hosts; the others do not wait for that."""
        if self._place != 0:
            return True
        own = self._pages[self._host]
        own[:_DIGEST_BYTES] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        wait_all(gather_single(self._pages.view(-1), own, self._lane))
        return bool((self._pages[:, :_DIGEST_BYTES] == own[:_DIGEST_BYTES]).all())

    @contextmanager
    def _explained(self, call: bytes) -> Iterator[None]:
        """Let a mismatch name the calls and lines of all ranks (collective if there is one)."""
        try:
            yield
        except CollectiveMismatchError:
            require_equal_texts(call, self._exchange_texts, self._exchange.find_line, self._global_ranks)
            raise

    def _exchange_texts(self, text: bytes) -> list[bytes]:
        """Return the text of every rank, in rank order."""
        exchange, most = self._exchange, max(map(len, self._hosts))
        texts = torch.zeros(len(self._hosts), most, LONGEST_CALL, dtype=torch.uint8, device="cpu")
        page = pack_text(text)
        rows = [texts[self._host, place].data_ptr() for place in range(exchange.size)]
        exchange.run(programs.gather(exchange.ranks, LONGEST_CALL, takes=True), [page.data_ptr(), *rows], _TEXTS)
        if self._place == 0:
            wait_all(gather_single(texts.view(-1), texts[self._host].view(-1), self._lane))
        exchange.run(programs.broadcast(exchange.ranks, texts.nbytes, 0), [texts.data_ptr()], _TEXTS)
        places = {rank: (host, place) for host, ranks in enumerate(self._hosts) for place, rank in enumerate(ranks)}
        return [texts[places[rank]].numpy().tobytes().rstrip(b"\0") for rank in range(len(places))]

    # -- Sums ----------------------------------------------------------------------------------------------------

    def sum_ranks(self, flat: Tensor, call: bytes) -> None:
        """Replace a tensor, which lies in one row, by the sum over all ranks."""
        how, exchange = reduction(ReduceOp.SUM, flat.dtype), self._exchange
        parts = programs.one_part_each(exchange.size, how.kind, flat.element_size() // how.width)

        def sum_inside(piece: slice, targets: Sequence[Tensor]) -> Mapping[Node, Tensor]:
            (target,), own = targets, flat[piece]
            own = target if target.data_ptr() == own.data_ptr() else own  # the same object, where it is in place
            collectives.reduce_everywhere(exchange, parts, target, [own], how, call)
            return {self._one_each[self._host][0]: target}

        self._sum(sum_inside, flat, self._one_each, len(self._hosts), call)

    def sum_in_order(
        self,
        partials: Mapping[Node, Tensor],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
    ) -> None:
        """Sum subtrees of shards in the order of the tree into `out`; all lie in one row and are alike."""
        plan = plan_host_sums(self._hosts, self._host, tuple(map(tuple, layout)), num_shards)
        how = reduction(ReduceOp.SUM, out.dtype)

        def sum_inside(piece: slice, targets: Sequence[Tensor]) -> Mapping[Node, Tensor]:
            for (node, of_ranks), target in zip(plan.of_ranks, targets, strict=True):
                own = [partials[lo + node[0], hi + node[0]][piece] for lo, hi in of_ranks[self._place]]
                collectives.ordered_all_reduce(self._exchange, own, target, of_ranks, node[1] - node[0], how, call)
            return dict(zip(plan.of_hosts[self._host], targets, strict=True))

        self._sum(sum_inside, out, plan.of_hosts, num_shards, call)

    @torch.inference_mode(False)  # or memory that is kept could not be written outside of it
    def _sum(
        self, sum_inside: SumInside, out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int, call: bytes
    ) -> None:
        """Compare a call and make it: sum into `out`, of which `layout` says what each host has added up."""
        if out.is_inference():
            total = torch.empty_like(out)
            self._sum(sum_inside, total, layout, num_shards, call)
            copy_into(out, total)
            return
        if not out.numel():
            self.compare_calls(call)
            return
        with self._explained(call):
            most = max(map(len, layout))
            if most * out.nbytes + _DIGEST_BYTES <= _PAGE_BYTES and all(layout):
                self._sum_short(sum_inside, out, layout, num_shards, call)
            else:
                self._compare_after(partial(self._exchange.compare_calls, call), call)
                if not layout[self._host]:  # else the first addition is the phase after the comparison
                    self._exchange.compare_calls(call)
                self._sum_long(sum_inside, out, layout, num_shards, call)

    def _sum_short(
        self, sum_inside: SumInside, out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int, call: bytes
    ) -> None:
        def sums_of(host: int) -> list[Tensor]:
            starts = range(_DIGEST_BYTES, _DIGEST_BYTES + len(layout[host]) * out.nbytes, out.nbytes)
            return [self._pages[host, start : start + out.nbytes].view(out.dtype) for start in starts]

        self._compare_after(partial(sum_inside, slice(None), sums_of(self._host)), call)
        if self._place == 0:
            hosts = enumerate(layout)
            held = {node: each for host, nodes in hosts for node, each in zip(nodes, sums_of(host), strict=True)}
            out.copy_(add_in_tree_order(held, num_shards, torch.add))
        program = programs.broadcast(self._exchange.ranks, out.nbytes, 0)
        self._exchange.run(program, [out.data_ptr()], call)

    def _sum_long(
        self, sum_inside: SumInside, out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int, call: bytes
    ) -> None:
        """Sum a part after the other: while one is between the hosts, the next is added inside them."""
        share: Callable[[], object] = _do_nothing
        wait: Callable[[], object] = _do_nothing
        length = _PART_BYTES // out.element_size()
        for start in range(0, out.numel(), length):
            piece = slice(start, start + length)
            part = out[piece]
            # Of several sums, the next one may need what lies in `out`.
            targets = [part] if len(layout[self._host]) == 1 else [torch.empty_like(part) for _ in layout[self._host]]
            sums = sum_inside(piece, targets)
            wait()
            wait = self._start_between(sums, part, layout, num_shards)
            share()
            share = partial(self._share, part, call)
        wait()
        share()

    def _start_between(
        self, sums: Mapping[Node, Tensor], out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int
    ) -> Callable[[], object]:
        """Begin to sum the piece of this rank's lane over the hosts; return what waits for that."""
        pieces = self._pieces(out)
        if self._place >= len(pieces):
            return _do_nothing
        own = out[pieces[self._place]]
        held = {node: own if each is out else each[pieces[self._place]] for node, each in sums.items()}
        if layout is self._one_each and own.dtype in {torch.float32, torch.float64}:
            work = dist.all_reduce(own, group=self._lane.group, async_op=True)
            return _do_nothing if work is None else work.wait
        if num_shards not in self._reductions:
            self._reductions[num_shards] = OrderedReductions(self._lane, num_shards)
        return self._reductions[num_shards].start(held, own, layout, waits=False)

    def _share(self, out: Tensor, call: bytes) -> None:
        """Give every rank of this host the piece of each lane."""
        for place, piece in enumerate(self._pieces(out)):
            program = programs.broadcast(self._exchange.ranks, out[piece].nbytes, place)
            self._exchange.run(program, [out[piece].data_ptr()], call)

    def _pieces(self, out: Tensor) -> list[slice]:
        num_lanes = self._num_lanes if out.nbytes > _ONE_LANE_BYTES else 1
        return [slice(*bounds) for bounds in split_evenly(out.numel(), num_lanes)]


def _do_nothing() -> None:
    """Wait for nothing."""
