"""The backend "shm": process groups over shared memory, for the CPU tensors of one host.

In a *phase* all ranks of a group exchange data through their *send buffers*. A *channel* carries messages from one rank
to another. A *heap* holds the tensors that the group allocates. Counters in `native/shm.c` alone order what
processes write and read. [Note: memory order]

Invariants:

- The memory has no name: it is freed when the last process that has it ends.
- Ranks compare the descriptions of their calls before data is used; if they differ, all ranks raise.
- A rank that waits checks at least every 50 ms whether the process that it waits for still runs.
- Whatever is reduced is added in the order of the tree over ranks. [Note: one order]
"""
