"""The doctor: what a job does, or did last, from its recording and from what the system knows of its processes.

    finding      which recording is meant: the newest, a folder's, a process'
    system       what the system knows of processes: stopped, in disk sleep, memory, system call, use; the neighbours
    activity     what a worker did last, from its events
    diagnosis    who is waited for, and why; takes values and returns values
    stacks       Python stacks of the workers and of their loading processes, on request
    slow         which part bounds the steps, and which worker is behind
    slow_causes  why, from what the system says that a worker uses
    stall_watch  logs by itself why a job stands still
    report       verdict first, then a row per worker; as text or JSON; the timeline

Nothing here changes the job. A stack is requested with a signal that the worker has asked for, and only from a process
that still has its handler.
"""
