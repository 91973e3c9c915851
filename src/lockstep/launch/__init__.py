"""Launching: starting workers that call a function or run a script; returning their results, or why they failed.

The *launcher* is the process that calls `launch` or `run_script`; a *worker* is a process that it starts. Which code
runs where is the file:

    process     functions (`launch`)     scripts (`lockstep run`)
    launcher    launcher.py,             scripts.py,
                functions.py             output.py
                 supervision.py, worker_pool.py, sessions.py
    worker      worker.py                script_entry.py, then the script
    guardian                     guardian.py
    is sent     messages.py, pickling.py environment.py

Invariants: no worker outlives the launcher, however the launcher ends; two launches never clash, because the kernel
picks the port and the launcher holds it; the first failure in time is the one that is reported.

Nothing is imported here: starting a script needs no torch, which launching a function does.
"""
