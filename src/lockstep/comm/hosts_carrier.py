"""Sums of CPU tensors over several hosts: in shared memory within each host, and once per host over Gloo between them.

    host 0: ranks 0, 1, 4                              host 1: ranks 2, 3
    1 rank 0 has the calls of its host  <- lane 0 ->   rank 2 those of its own      all ranks compare all calls
    2 the sum of ranks 0, 1, 4                         the sum of ranks 2, 3        in shared memory, on every rank
    3 rank 0: first half                <- lane 0 ->   rank 2: first half           the sum of both hosts
      rank 1: second half               <- lane 1 ->   rank 3: second half
    4 both halves, on every rank                       both halves, on every rank   in shared memory

A lane has one rank of each host, and there are as many lanes as the host with the fewest ranks has. An ordered sum has
the order of the tree over all shards: a host adds the maximal subtrees of which it has every shard, and where the tree
joins shards of two hosts first, these are several, all of which are sent. A plain sum is in the order of the tree over
the ranks of a host, then over hosts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lockstep.comm.calls import LONGEST_CALL, require_equal_texts
from lockstep.comm.hosts import GroupHosts
from lockstep.comm.messages import gather_single, wait_all
from lockstep.comm.ordered import OrderedReductions
from lockstep.comm.shm import collectives, programs
from lockstep.comm.shm.arithmetic import reduction
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.world import World
from lockstep.shards.assignment import split_evenly
from lockstep.shards.tree import Node, merged_nodes

_TEXTS: Final = b"comparing calls"
_SHORT_BYTES: Final = 64 << 10
"""Up to here one lane carries everything."""
_PART_BYTES: Final = 4 << 20
Layout = tuple[tuple[Node, ...], ...]


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
        self._reductions: dict[int, OrderedReductions] = {}
        most = max(map(len, self._hosts))
        self._texts = torch.zeros(len(self._hosts), most, LONGEST_CALL, dtype=torch.uint8)
        places = [(r, (host, place)) for host, ranks in enumerate(self._hosts) for place, r in enumerate(ranks)]
        self._text_places = [place for _, place in sorted(places)]
        """Where the text of each rank is: its host, and its place there."""

    def compare_calls(self, call: bytes) -> None:
        """Return when every rank has made the same call, or raise on all alike if they differ."""
        require_equal_texts(call, self._exchange_texts, self._exchange.find_line, self._global_ranks)

    def _exchange_texts(self, text: bytes) -> list[bytes]:
        """Return the text of every rank, in rank order."""
        exchange, texts = self._exchange, self._texts
        own = text[:LONGEST_CALL].ljust(LONGEST_CALL, b"\0")
        page = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = [texts[self._host, place].data_ptr() for place in range(exchange.size)]
        exchange.run(programs.gather(exchange.ranks, LONGEST_CALL, takes=True), [page.data_ptr(), *rows], _TEXTS)
        if self._place == 0:
            wait_all(gather_single(texts.view(-1), texts[self._host].view(-1), self._lane))
        exchange.run(programs.broadcast(exchange.ranks, texts.nbytes, 0), [texts.data_ptr()], _TEXTS)
        found = texts.numpy()
        return [found[host, place].tobytes().rstrip(b"\0") for host, place in self._text_places]

    def sum_ranks(self, flat: Tensor, call: bytes) -> None:
        """Replace a tensor, which lies in one row, by the sum over all ranks."""
        how, exchange = reduction(ReduceOp.SUM, flat.dtype), self._exchange
        parts = programs.one_part_each(exchange.size, how.kind, flat.element_size() // how.width)
        num_hosts = len(self._hosts)
        layout = [[(host, host + 1)] for host in range(num_hosts)]

        def sum_inside(piece: slice) -> dict[Node, Tensor]:
            inside = flat[piece]
            collectives.reduce_everywhere(exchange, parts, inside, [inside], how, call)
            return {layout[self._host][0]: inside}

        self._sum(sum_inside, flat, layout, num_hosts, call)

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

        def sum_inside(piece: slice) -> dict[Node, Tensor]:
            sums: dict[Node, Tensor] = {}
            for node, of_ranks in plan.of_ranks:
                own = [partials[lo + node[0], hi + node[0]][piece] for lo, hi in of_ranks[self._place]]
                # Of several, the next one may need a partial that lies in `out`.
                target = out[piece] if len(plan.of_ranks) == 1 else torch.empty_like(out[piece])
                collectives.ordered_all_reduce(self._exchange, own, target, of_ranks, node[1] - node[0], how, call)
                sums[node] = target
            return sums

        self._sum(sum_inside, out, plan.of_hosts, num_shards, call)

    def _sum(
        self,
        sum_inside: Callable[[slice], dict[Node, Tensor]],
        out: Tensor,
        layout: Sequence[Sequence[Node]],
        num_shards: int,
        call: bytes,
    ) -> None:
        """Sum into `out`, a part after the other: while one is between the hosts, the next is added inside them."""
        share: Callable[[], object] = _do_nothing
        wait: Callable[[], object] = _do_nothing
        for part in _cut(out):
            sums = sum_inside(part)
            wait()
            wait = self._start_between(sums, out[part], layout, num_shards)
            share()
            share = partial(self._share, out[part], call)
        wait()
        share()

    def _start_between(
        self, sums: Mapping[Node, Tensor], out: Tensor, layout: Sequence[Sequence[Node]], num_shards: int
    ) -> Callable[[], object]:
        """Begin to sum the piece of this rank's lane over the hosts; return what waits for that."""
        pieces = self._pieces(out)
        if self._place >= len(pieces):
            return _do_nothing
        if num_shards not in self._reductions:
            self._reductions[num_shards] = OrderedReductions(self._lane, num_shards)
        own = out[pieces[self._place]]
        # What lies in `out` is reduced in place.
        held = {
            node: own if each.data_ptr() == out.data_ptr() else each[pieces[self._place]] for node, each in sums.items()
        }
        return self._reductions[num_shards].start(held, own, layout, waits=False)

    def _share(self, out: Tensor, call: bytes) -> None:
        """Give every rank of this host the piece of each lane."""
        for place, piece in enumerate(self._pieces(out)):
            program = programs.broadcast(self._exchange.ranks, out[piece].nbytes, place)
            self._exchange.run(program, [out[piece].data_ptr()], call)

    def _pieces(self, out: Tensor) -> list[slice]:
        num_lanes = self._num_lanes if out.nbytes > _SHORT_BYTES else 1
        return [slice(*bounds) for bounds in split_evenly(out.numel(), num_lanes)] if out.numel() else []


def _cut(out: Tensor) -> list[slice]:
    length = _PART_BYTES // out.element_size()
    return [slice(start, start + length) for start in range(0, out.numel(), length)]


def _do_nothing() -> None:
    """Wait for nothing."""
