"""Rules about devices, ports, and where loaded tensors go."""

import ast
from collections.abc import Iterator

from lockstep.doctor.scripts.source import (
    WRAPPERS,
    Level,
    ScriptFinding,
    ScriptSource,
    has_unknown_arguments,
    keyword,
    last_name,
    with_keyword,
)


def check_devices(source: ScriptSource) -> Iterator[ScriptFinding]:
    for call in source.calls:
        if source.is_call_of(call, *WRAPPERS):
            yield from _check_device_ids(source, call)
        elif source.full_name(call.func) == "torch.cuda.set_device" and call.args:
            yield from _check_set_device(call)
        elif source.full_name(call.func) == "torch.load":
            yield from _check_map_location(source, call)
    yield from _check_port(source)


def _check_device_ids(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    ids = keyword(call, "device_ids")
    if not isinstance(ids, ast.List | ast.Tuple) or _hides_devices(source):
        return
    mended = "[local_rank]"
    if len(ids.elts) > 1:
        text = "A rank's wrapper takes one device; several are for a model that one process divides."
    elif ids.elts and isinstance(ids.elts[0], ast.Constant):
        text = f"Every rank uses device {ast.unparse(ids.elts[0])}."
    elif ids.elts and _is_global_rank(source, ids.elts[0]):
        text = (
            "Devices are numbered on each host, and this is the rank in the whole job: on a second host there is "
            "no such device."
        )
        mended = '[int(os.environ["LOCAL_RANK"])]'
    else:
        return
    yield ScriptFinding(
        rule="device-ids",
        level=Level.MISTAKE,
        line=ids.lineno,
        text=text,
        mended=with_keyword(call, device_ids=mended),
    )


def _is_global_rank(source: ScriptSource, node: ast.expr) -> bool:
    values = source.values_of(node)
    return bool(values) and all(
        ast.unparse(value) in {"int(os.environ['RANK'])", "int(os.getenv('RANK'))"}
        or (isinstance(value, ast.Call) and last_name(value.func) == "get_rank")
        for value in values
    )


def _hides_devices(source: ScriptSource) -> bool:
    return any(
        isinstance(node, ast.Constant) and node.value == "CUDA_VISIBLE_DEVICES" for node in ast.walk(source.tree)
    )


def _check_set_device(call: ast.Call) -> Iterator[ScriptFinding]:
    if isinstance(call.args[0], ast.Constant):
        yield ScriptFinding(
            rule="one-device",
            level=Level.MISTAKE,
            line=call.lineno,
            text=f"Every rank uses device {ast.unparse(call.args[0])}.",
            mended="torch.cuda.set_device(local_rank)",
        )


def _check_map_location(source: ScriptSource, call: ast.Call) -> Iterator[ScriptFinding]:
    has_location = keyword(call, "map_location") is not None or len(call.args) > 1 or has_unknown_arguments(call)
    uses_cuda = any(
        (isinstance(node, ast.Attribute) and node.attr == "cuda")
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
        for node in ast.walk(source.tree)
    )
    if not has_location and uses_cuda and not source.is_guarded(call):
        yield ScriptFinding(
            rule="map-location",
            level=Level.MISTAKE,
            line=call.lineno,
            text="Tensors that were saved from a GPU are loaded onto the same GPU, by every rank.",
            mended=with_keyword(call, map_location='"cpu"'),
        )


def _check_port(source: ScriptSource) -> Iterator[ScriptFinding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        target = node.targets[0]
        if not (
            isinstance(target, ast.Subscript)
            and isinstance(target.slice, ast.Constant)
            and target.slice.value == "MASTER_PORT"
        ):
            continue
        if any(isinstance(each, ast.If) and "MASTER_PORT" in ast.unparse(each.test) for each in source.ancestors(node)):
            continue
        yield ScriptFinding(
            rule="fixed-port",
            level=Level.NOTE,
            line=node.lineno,
            text="A second job on this host takes the same port, and one of them ends with an error.",
            mended=f'os.environ.setdefault("MASTER_PORT", {ast.unparse(node.value)})  # torchrun sets it',
        )
