"""The connection between the launcher and each of its workers: a pair of sockets that the worker inherits.

No other process can reach it: it has no port and no name. It carries the key-value store through which the workers of
a launch meet, and what the launcher sends to one worker by itself. Everything is one JSON object per line; nothing is
unpickled.

    launcher (`server.py`, one thread)                worker (`client.py`, one reading thread)
    ----------------------------------                ----------------------------------------
    answers requests from its table (`table.py`)  <-  {"id": 7, "op": "get", "key": "address"}
                                                  ->  {"id": 7, "value": "..."}
    sends what concerns this worker               ->  {"event": "...", ...}
    passes on what a worker reports               <-  {"report": "...", ...}

This package does not import torch: `lockstep run` starts its workers without it.
"""
