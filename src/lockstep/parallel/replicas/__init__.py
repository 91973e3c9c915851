"""`DataParallel`: one process runs replicas of a module on several devices, one thread for each.

Invariant: replica 0 is the module itself; every other replica has memory of its own, so no two threads write one
tensor.
"""
