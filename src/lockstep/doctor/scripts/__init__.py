"""Reading a training script for what goes wrong in data-parallel, without running it.

A *mistake* is what trains something else than meant, fails, or waits for ever with several workers. A *note* is what
works and is seldom meant. A rule reports only what it sees in the file: what comes from another module, or from an
argument, counts as right.
"""

import ast

from lockstep.doctor.scripts.data_rules import check_data
from lockstep.doctor.scripts.device_rules import check_devices
from lockstep.doctor.scripts.rank_rules import check_ranks
from lockstep.doctor.scripts.source import Level, ScriptFinding, ScriptSource

__all__ = ["Level", "ScriptFinding", "check_source"]
_WORDS = ("DistributedDataParallel", "init_process_group", "DistributedSampler", "destroy_process_group")


def check_source(text: str) -> list[ScriptFinding] | None:
    """Return what is wrong in a script, by line; None if nothing in it is data-parallel. A SyntaxError is raised."""
    source = ScriptSource(text)
    if not _is_parallel(source):
        return None
    found = [*check_data(source), *check_ranks(source), *check_devices(source)]
    return sorted(found, key=lambda each: (each.line, each.rule))


def _is_parallel(source: ScriptSource) -> bool:
    names = {source.full_name(call.func).rpartition(".")[2] for call in source.calls}
    imported = {name.rpartition(".")[2] for name in source.imported.values()}
    attributes = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    return bool({*names, *imported, *attributes} & set(_WORDS))
