from pathlib import Path

import pytest

from lockstep.errors import ConfigError, DataFileError
from lockstep.runs.importing import call_object, import_object


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good_module.py").write_text(
        "class Net:\n    def make(self): pass\nclass AdamW: pass\nclass Adam: pass\n"
    )
    (tmp_path / "needy_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_dotted_name_is_found() -> None:
    assert import_object("model", "good_module:Net.make").__name__ == "make"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("good_module", "package.module:name"),
        ("good_module:Nett", "'good_module' has no 'Nett'. Did you mean 'Net'?"),
        ("good_module:Adamw", "Did you mean 'AdamW'?"),
        ("good_module:Net.mak", "'good_module.Net' has no 'mak'. Did you mean 'make'?"),
        ("nowhere_module:Net", "there is no module 'nowhere_module'"),
        ("good_module.inner:Net", "there is no module 'good_module.inner'"),
        ("needy_module:Net", "needs a module 'not_installed_anywhere' that is not installed"),
        ("broken_module:Net", "fails to import: SyntaxError"),
    ],
)
def test_the_part_that_is_wrong_is_named(path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_object("model", path)
    assert said in str(caught.value)


def test_a_call_that_fails_names_the_key_and_the_arguments() -> None:
    with pytest.raises(ConfigError, match=r"model could not be constructed: TypeError: .*model_args: size=3"):
        call_object("model", import_object("model", "good_module:Net"), size=3)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a int"):
        call_object("model", 3)


def test_our_own_errors_pass_through() -> None:
    def fail() -> None:
        raise DataFileError("said once")

    with pytest.raises(DataFileError, match=r"^said once$"):
        call_object("data", fail)


def test_the_arguments_that_a_function_takes_are_listed() -> None:
    def optimizer(lr: float, momentum: float = 0.0) -> None:
        """Takes two arguments."""
        raise ValueError(f"{lr} and {momentum} do not fit")

    with pytest.raises(ConfigError, match=r"learning_rate=1[.] It takes lr, momentum[.] Run with"):
        call_object("optimizer", optimizer, learning_rate=1)
    with pytest.raises(ConfigError, match=r"lr=1[.] Run with"):  # its arguments are not what is wrong
        call_object("optimizer", optimizer, lr=1)
