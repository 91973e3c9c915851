"""Comparing the names and shapes in a file with those of a model, and one message with all differences. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]

_SHOWN = 8
_COMPARED = 2000
"""With more names than this, similar names are not searched for: the search would take longer than the loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What `load_weights` read, and what did not fit the model."""

    recognised: str
    """The format of the file and the changes to its names, in words."""
    missing: tuple[str, ...] = ()
    """Names in the model that are not in the file; these tensors keep their values."""
    unexpected: tuple[str, ...] = ()
    """Names in the file that are not in the model."""
    misshaped: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Names with different shapes: (shape in the file, shape in the model); these tensors keep their values."""
    clashing: tuple[tuple[str, str], ...] = ()
    """Pairs of names that share one tensor in the model, but have different values in the file."""

    @property
    def fits(self) -> bool:
        """Whether the file and the model have the same names and shapes."""
        return not (self.missing or self.unexpected or self.misshaped or self.clashing)


def find_shape_mismatches(
    found: Mapping[str, Shape], expected: Mapping[str, Shape | None]
) -> dict[str, tuple[Shape, Shape]]:
    """Return the names whose shapes differ, with both; None is the shape of a lazy parameter, which takes any."""
    return {
        name: (shape, wanted)
        for name, shape in found.items()
        if (wanted := expected.get(name)) is not None and not _is_same_shape(shape, wanted)
    }


def describe_misfit(loaded: LoadedWeights, source: str, hint: str, *, can_load_rest: bool) -> str:
    lines = [f"{source} does not fit the model ({loaded.recognised})."]
    if loaded.missing:
        lines.append(f"{len(loaded.missing)} missing in the file: {_listed(loaded.missing)}")
    if loaded.unexpected:
        near = [_with_similar_name(name, loaded.missing) for name in loaded.unexpected[:_SHOWN]]
        lines.append(f"{len(loaded.unexpected)} not in the model: {_listed(near, len(loaded.unexpected))}")
    if loaded.misshaped:
        shapes = [
            f"size mismatch for {name}: {list(found)} in the file, {list(wanted)} in the model"
            for name, (found, wanted) in loaded.misshaped.items()
        ]
        lines.append(f"{len(shapes)} of another shape: {_listed(shapes, separator='; ')}")
    if loaded.clashing:
        pairs = [f"{first} and {second}" for first, second in loaded.clashing]
        lines.append(f"{len(pairs)} pairs are one tensor in the model and differ in the file: {_listed(pairs)}")
    advice = "Build the model as it was when the file was written"
    advice += ", or load only what fits with strict=False." if can_load_rest else "."
    return "\n  ".join([*lines, f"{hint} {advice}".strip()])


def _is_same_shape(found: Shape, wanted: Shape) -> bool:
    """Compare shapes as torch does: torch before 0.4 wrote a scalar as a vector with one element."""
    return found == wanted or (found == (1,) and wanted == ())


def _with_similar_name(name: str, candidates: Sequence[str]) -> str:
    near = [other for other in candidates if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")][:1]
    if not near and len(candidates) <= _COMPARED:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
    return f"{name} (similar to {near[0]})" if near else name


def _listed(items: Sequence[str], count: int | None = None, separator: str = ", ") -> str:
    more = (len(items) if count is None else count) - _SHOWN
    return separator.join(items[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
