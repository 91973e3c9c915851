"""Mapping the names in a file to the names in a model, and what does not fit, in one message. Pure.

Wrappers add attributes to names: DataParallel and DistributedDataParallel add the prefix `module.`, torch.compile
adds `_orig_mod.` where it wrapped a module, a LightningModule adds the attribute that holds the model. A prefix is
removed only if *all* names begin with this path component. Text is never replaced inside names:
`encoder.module.weight` and `module_list.0.weight` stay as they are.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import counted

Shape = tuple[int, ...]

WRAPPER = "module"
"""The attribute under which DataParallel and DistributedDataParallel hold the model."""
COMPILED = "_orig_mod"
"""The attribute under which torch.compile holds a module; it may be anywhere in a name."""
_SHOWN = 8
_COMPARED = 2000
"""With more names than this, similar names are not searched for: the search would take longer than the loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    names: Mapping[str, str]
    """From each name in the file to its new name; one to one."""
    notes: tuple[str, ...] = ()
    dropped: str = ""
    """The prefix that was removed from every name, with its last dot."""
    added: str = ""
    """The prefix that was added to every name, with its last dot."""

    @property
    def is_wrapped(self) -> bool:
        return WRAPPER in self.dropped.split(".")

    def rename_module(self, path: str) -> str:
        plain = "".join(f"{part}." for part in path.split(".") if part not in {COMPILED, ""})
        return f"{self.added}{plain.removeprefix(self.dropped)}".removesuffix(".")


def plain_names(names: Collection[str]) -> Renaming:
    """Return the renaming that removes what wrappers added, when there is no model to compare with."""
    return _renamed(names, _common_prefix(_by_uncompiled_name(names), WRAPPER), "", {})


def fit_names(names: Collection[str], expected: Collection[str]) -> Renaming:
    """Choose the renaming from a file's names to a model's.

    The first of these that exists: a renaming that makes the two sets equal, with the fewest components changed; one
    that makes one set a subset of the other; one that removes `module.`, if the model has no child of that name.
    """
    plain, wanted = _by_uncompiled_name(names), _by_uncompiled_name(expected)
    dropped, added = _common_prefix(plain), _common_prefix(wanted, WRAPPER)
    candidates = [
        (".".join([*dropped[:count], ""]), ".".join([*added[:put], ""]))
        for count in range(len(dropped) + 1)
        for put in range(len(added) + 1)
    ]
    candidates.sort(key=lambda pair: pair[0].count(".") + pair[1].count("."))
    for fits in (set.__eq__, _is_subset_either_way):
        for old, new in candidates:
            if fits({new + name.removeprefix(old) for name in plain}, set(wanted)):
                return _renamed(names, old.split(".")[:-1], new, wanted)
    inner = {name.removeprefix(".".join([*added, ""])) for name in wanted}
    has_child = any(name.split(".", 1)[0] == WRAPPER for name in inner)
    return _renamed(names, [] if has_child else _common_prefix(plain, WRAPPER), ".".join([*added, ""]), wanted)


def first_components(names: Iterable[str]) -> dict[str, int]:
    """Return the number of names under each first component, the largest first."""
    counts: dict[str, int] = {}
    for name in names:
        head, dot, _ = name.partition(".")
        if dot:
            counts[head] = counts.get(head, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _renamed(names: Collection[str], dropped: Collection[str], added: str, wanted: Mapping[str, str]) -> Renaming:
    old = ".".join([*dropped, ""])
    plain = _by_uncompiled_name(names)
    compiled = sum(short != name for short, name in plain.items())
    notes = []
    if compiled and all(COMPILED not in name.split(".") for name in wanted.values()):
        notes.append(f"'{COMPILED}.' dropped from {counted(compiled, 'name')}")
    if old and old != added:
        notes.append(f"{old!r} dropped from {counted(len(names), 'name')}")
    if added and old != added:
        notes.append(f"{added!r} added to {counted(len(names), 'name')}")
    targets = {name: added + short.removeprefix(old) for short, name in plain.items()}
    return Renaming(
        names={name: wanted.get(target, target) for name, target in targets.items()},
        notes=tuple(notes),
        dropped=old,
        added=added,
    )


def _by_uncompiled_name(names: Collection[str]) -> dict[str, str]:
    """Return the names, keyed by the name without torch.compile's components; unchanged if two keys would be equal."""
    plain = {".".join(part for part in name.split(".") if part != COMPILED): name for name in names}
    return plain if len(plain) == len(names) else {name: name for name in names}


def _common_prefix(names: Collection[str], only: str | None = None) -> list[str]:
    """Return the path components that all names begin with, without the last; only those equal to `only`, if given."""
    split = [name.split(".") for name in names]
    leading: list[str] = []
    for column in zip(*(parts[:-1] for parts in split), strict=False):
        if len(set(column)) > 1 or only not in {None, column[0]}:
            break
        leading.append(column[0])
    return leading


def _is_subset_either_way(found: set[str], wanted: set[str]) -> bool:
    return bool(found) and (found <= wanted or wanted <= found) and bool(found & wanted)


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
