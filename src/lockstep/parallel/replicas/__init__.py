"""`DataParallel`: one process runs replicas of a module on several devices, each device in a thread of its own.

Invariant: replica 0 shares its memory with the module. Every other replica has memory of its own, so no two threads
write to the same tensor.
"""
