import pytest

from lockstep.checkpoint.interop.names import fit_names, plain_names


@pytest.mark.parametrize(
    ("names", "expected", "changed"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"], {"module.a.w": "a.w", "module.b": "b"}),
        (["module.module.w", "module.module.b"], ["w", "b"], {"module.module.w": "w", "module.module.b": "b"}),
        (["model.w", "model.b"], ["w", "b"], {"model.w": "w", "model.b": "b"}),
        (["_orig_mod.w"], ["w"], {"_orig_mod.w": "w"}),
        (["module._orig_mod.w"], ["w"], {"module._orig_mod.w": "w"}),
        (["_orig_mod.module.w"], ["w"], {"_orig_mod.module.w": "w"}),
        (["a._orig_mod.w", "b"], ["a.w", "b"], {"a._orig_mod.w": "a.w", "b": "b"}),
        (["a.w", "b"], ["module.a.w", "module.b"], {"a.w": "module.a.w", "b": "module.b"}),
        (["a.w"], ["_orig_mod.a.w"], {"a.w": "_orig_mod.a.w"}),
        (["model.w"], ["module._orig_mod.w"], {"model.w": "module._orig_mod.w"}),
        # A head that the file has not, and one that the model has not.
        (["model.w", "model.b"], ["w", "b", "head.w"], {"model.w": "w", "model.b": "b"}),
        (
            ["model.w", "model.b", "model.head.w"],
            ["w", "b"],
            {"model.w": "w", "model.b": "b", "model.head.w": "head.w"},
        ),
    ],
)
def test_what_wrappers_put_before_names_is_dropped(
    names: list[str], expected: list[str], changed: dict[str, str]
) -> None:
    assert fit_names(names, expected).names == changed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # Replacing the text "module." would damage each of these.
        (["encoder.module.w", "decoder.w"], ["encoder.module.w", "decoder.w"]),
        (["my_module.w"], ["my_module.w"]),
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["module.w", "module.b"], ["module.w", "module.b"]),
        (["module_list.0.w"], ["module_list.0.w"]),
        (["model.w"], ["model.w"]),
        (["_orig_mod.w"], ["_orig_mod.w"]),
        # Nothing says that these belong together: they are told as they are.
        (["stem.w"], ["trunk.w", "head.w"]),
        (["module.w", "x"], ["w", "b"]),
    ],
)
def test_names_that_are_the_models_own_stay(names: list[str], expected: list[str]) -> None:
    renaming = fit_names(names, expected)
    assert dict(renaming.names) == {name: name for name in names}
    assert renaming.notes == ()


def test_one_level_is_dropped_where_the_model_has_a_child_of_that_name() -> None:
    names = ["module.module.w", "module.head.w"]
    assert set(fit_names(names, ["module.w", "head.w"]).names.values()) == {"module.w", "head.w"}


def test_a_wrapper_is_dropped_though_other_names_differ() -> None:
    renaming = fit_names(["module.w", "module.old"], ["w", "new"])
    assert set(renaming.names.values()) == {"w", "old"}
    assert renaming.notes == ("'module.' dropped from 2 names",)
    assert renaming.is_wrapped


def test_a_wrapper_stays_where_the_model_has_such_a_child_and_other_names_differ() -> None:
    renaming = fit_names(["module.w", "module.old"], ["module.w", "head.w"])
    assert set(renaming.names.values()) == {"module.w", "module.old"}


def test_names_that_would_become_one_stay_two() -> None:
    names = ["a._orig_mod.w", "a.w"]
    assert dict(plain_names(names).names) == {name: name for name in names}


def test_without_a_model_only_wrappers_are_dropped() -> None:
    assert set(plain_names(["module.model.w", "module.model.b"]).names.values()) == {"model.w", "model.b"}
    assert set(plain_names(["module.w", "head.w"]).names.values()) == {"module.w", "head.w"}


def test_paths_of_modules_follow_their_names() -> None:
    renaming = fit_names(["module._orig_mod.0.w"], ["0.w"])
    assert [renaming.rename_module(path) for path in ("", "module", "module._orig_mod", "module._orig_mod.0")] == [
        *("", "", "", "0"),
    ]


def test_no_names_are_no_error() -> None:
    assert dict(fit_names([], ["w"]).names) == {}
    assert dict(plain_names([]).names) == {}
