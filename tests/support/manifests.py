"""Manifests of checkpoints that tests write."""

from typing import Any

from lockstep.checkpoint.manifest import Manifest


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {"epoch": 2, "step": 3, "global_step": 25, "num_shards": 4, "seed": 7, "digest": "d"}
    return Manifest(**values | {"optimizer": {"state": {}}, "scheduler": None, "config": None} | changes)
