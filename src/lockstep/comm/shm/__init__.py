"""The backend "shm": process groups over shared memory, for the CPU tensors of one host.

In a *phase* all ranks of a group exchange data through their *send buffers*. A *channel* carries messages from one rank
to another. A *heap* holds the tensors that the group hands out. Semaphores alone order what processes write and read.
[Note: memory order]

Invariants:

- The memory has no name: it ends with the last process that has it.
- Every call is described to every rank before data is used; ranks that mean different calls all raise.
- A rank that waits looks, at least every 50 ms, whether the one it waits for still lives.
- Whatever is reduced is added in the order of the tree over ranks. [Note: one order]
"""
