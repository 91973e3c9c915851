"""Names that torch does not promise to keep, each under a name of ours: nothing else in the package uses one.

"Private" is a name with a leading underscore, of a module, a class or an object of torch, and what we rely on by
observation: how a reference count behaves, in which order graph tasks are numbered. Each entry says what we rely on.
Its contract test in `tests/unit/torch_private` checks that it *behaves* so, and each assertion there says what it is
for and what breaks without it. With a new torch, run these first.

Callers name the module. The tests pass with torch 2.11, 2.12, 2.13 and 2.15. Names are bound when a module is imported,
so a call costs what it costs in torch. `torch._foreach_*` are here too: torch's documentation lists only some, as beta.

    autograd    the engine's callbacks and graph tasks, hooks on gradients
    modules     what modules and optimizers keep inside; storages, versions, reference counts, foreach operations;
                nested values, dispatch modes, kernels of devices, the default device
    groups      process groups, their stores and backends; how a client of the TCPStore greets it
    loaders     how far a DataLoader is
    compiler    torch.compile, seen from outside and without importing it; keeping it out of what C++ calls
    compiler_import    optimizers and marked functions that do not import the compiler; its switches when somebody does
    sharded_checkpoints    what torch.distributed.checkpoint pickles; it is slow to import

Methods by which torch calls *us* (`_allgather_base` of a process group, `_check_comm_hook` of a DDP) are no uses: they
stay with the class that has them, and `tests/conformance` runs torch's own tests on them.
"""
