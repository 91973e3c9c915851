"""Runs scripts that are written for torchrun one after another, in processes that import torch once.

Each script gets a rendezvous of its own, which somebody else serves.

usage: run_all.py FOLDER SCRIPT:PORT ...
"""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, exit=True)
    folder, *scripts = sys.argv[1:]
    for script, _, port in (each.rpartition(":") for each in scripts):
        os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"] = port, "True"
        sys.argv = [script, str(Path(folder) / f"{Path(script).stem}.pt")]
        runpy.run_path(script, run_name="__main__")
