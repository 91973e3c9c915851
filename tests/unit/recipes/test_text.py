"""The text recipe: vocabulary, windows, the transformer, the loss, and what it writes."""

import math
import sysconfig
from pathlib import Path

import pytest
import torch

from lockstep.errors import DataFileError
from lockstep.recipes import text


@pytest.fixture
def model() -> text.Transformer:
    torch.manual_seed(0)
    return text.Transformer(width=16, num_layers=2, num_heads=2, block_size=8)


def decode(characters: torch.Tensor) -> str:
    return "".join(text.VOCABULARY[number] for number in characters.tolist())


def columns(windows: text.Windows) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and all targets, [num_windows, block_size] each."""
    pairs = [windows[index] for index in range(len(windows))]
    return torch.stack([inputs for inputs, _ in pairs]), torch.stack([targets for _, targets in pairs])


def test_vocabulary_has_each_character_once():
    assert len(set(text.VOCABULARY)) == len(text.VOCABULARY) == 98


def test_text_survives_encoding():
    line = "\tdef f(x: int) -> str:  # ~{}\n"
    assert decode(text.encode(line)) == line


def test_unknown_character_becomes_replacement():
    assert decode(text.encode("aé\r€b")) == "a" + text.REPLACEMENT * 3 + "b"


def test_windows_cover_text_once():
    inputs, targets = columns(text.Windows("abcdefghijk", block_size=3))
    assert list(map(decode, inputs)) == ["abc", "def", "ghi"]
    assert list(map(decode, targets)) == ["bcd", "efg", "hij"]


@pytest.mark.parametrize(("num_chars", "num_windows"), [(0, 0), (1, 0), (3, 0), (4, 1), (6, 1), (7, 2)])
def test_window_needs_character_after_last(num_chars, num_windows):
    assert len(text.Windows("x" * num_chars, block_size=3)) == num_windows


def test_index_past_end_is_an_error():
    with pytest.raises(IndexError):
        text.Windows("abcdefg", block_size=3)[2]


def test_datasets_hold_out_last_part():
    train, test = text.datasets(block_size=10, max_chars=2000)
    assert (len(train), len(test)) == (179, 19)
    assert train[0][0].dtype == train[0][1].dtype == torch.int64
    source = text.encode(text.read_sources(Path(sysconfig.get_paths()["stdlib"]), 2000))
    assert torch.equal(columns(train)[0].flatten(), source[:1790])
    assert torch.equal(columns(test)[0].flatten(), source[1800:1990])


def test_datasets_are_the_same_each_time():
    first, second = (text.datasets(block_size=16, max_chars=5000) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(columns(one)[0], columns(other)[0])


@pytest.mark.parametrize("arguments", [{"block_size": 0}, {"block_size": 128, "max_chars": 1289}])
def test_datasets_refuse_arguments_that_leave_no_window(arguments):
    with pytest.raises(ValueError, match="expected at least 1 and"):
        text.datasets(**arguments)


def test_smallest_text_gives_one_test_window():
    assert len(text.datasets(block_size=128, max_chars=1290)[1]) == 1


def test_sources_are_joined_in_order_of_names(tmp_path):
    for name, content in {"b.py": "two", "a.py": "one", "c.txt": "no", "_sysconfigdata_x.py": "no"}.items():
        (tmp_path / name).write_text(content)
    assert text.read_sources(tmp_path, max_chars=100) == "onetwo"


def test_sources_are_cut_at_max_chars(tmp_path):
    (tmp_path / "a.py").write_text("x" * 10)
    assert text.read_sources(tmp_path, max_chars=7) == "x" * 7


def test_source_that_is_not_utf8_is_left_out(tmp_path):
    (tmp_path / "a.py").write_bytes(b"\xff\xfe")
    (tmp_path / "b.py").write_text("b")
    assert text.read_sources(tmp_path, max_chars=10) == "b"


def test_folder_without_sources_is_named(tmp_path):
    with pytest.raises(DataFileError, match=f"{tmp_path} holds no .py files"):
        text.read_sources(tmp_path, max_chars=10)


def test_source_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "a.py").mkdir()
    with pytest.raises(DataFileError, match=r"a\.py cannot be read: Is a directory"):
        text.read_sources(tmp_path, max_chars=10)


def test_library_without_enough_text_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x" * 50)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataFileError, match="hold 50 characters, fewer than the 90"):
        text.datasets(block_size=8)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_model_scores_each_next_character(model, length):
    scores = model(torch.zeros(3, length, dtype=torch.int64))
    assert scores.shape == (3, length, len(text.VOCABULARY))
    assert scores.dtype == torch.float32


def test_model_refuses_more_than_its_block(model):
    with pytest.raises(ValueError, match="has 9 characters; the model sees at most 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_width_must_be_multiple_of_heads():
    with pytest.raises(ValueError, match="width is 10; expected a multiple"):
        text.Transformer(width=10, num_heads=4)


def test_model_does_not_see_the_future(model):
    first, second = text.encode("abcdefgh"), text.encode("abcdXYZ!")
    scores = model(torch.stack([first, second]))
    torch.testing.assert_close(scores[0, :4], scores[1, :4])
    assert not torch.allclose(scores[0, 4], scores[1, 4])


def test_model_tells_positions_apart(model):
    scores = model(text.encode("aaaaaaaa").unsqueeze(0))[0]
    assert not torch.allclose(scores[0], scores[5])


def test_loss_is_mean_nats_per_character():
    output = torch.zeros(2, 5, 98)
    output[:, 0, 3] = math.log(98 + 1)  # The right character has (98 + 1) of 2 * 98 parts, once in five.
    expected = (4 * math.log(98) + math.log(2 * 98 / 99)) / 5
    assert text.loss(output, torch.full((2, 5), 3)).item() == pytest.approx(expected)


def test_untrained_model_guesses(model):
    output = model(text.encode("def f(x)").unsqueeze(0))
    assert text.loss(output, text.encode("ef f(x):").unsqueeze(0)).item() == pytest.approx(math.log(98), abs=0.3)


def train_briefly(seed: int) -> tuple[text.Transformer, float]:
    torch.manual_seed(seed)
    model = text.Transformer(width=32, num_layers=1, num_heads=2, block_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, targets = columns(text.Windows("for x in yz:\n" * 48, block_size=16))
    for _ in range(60):
        optimizer.zero_grad()
        loss = text.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model, loss.item()


@pytest.mark.usefixtures("deterministic")
def test_training_twice_gives_the_same_bits():
    first, second = (train_briefly(seed=1)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_trained_model_writes_what_it_read():
    model, loss = train_briefly(seed=0)
    assert loss < 0.5
    # Beyond the block too: 13 characters do not divide 16, so the windows began everywhere in the line.
    assert text.sample(model, "for x", num_chars=34, temperature=0.1) == "for x in yz:\n" * 3


def test_sample_continues_prompt_beyond_block(model):
    written = text.sample(model, "def é", num_chars=30)
    assert written.startswith("def é")
    assert len(written) == 35


def test_sample_depends_on_seed_alone(model):
    torch.manual_seed(1)
    first = text.sample(model, seed=5, num_chars=50)
    torch.manual_seed(2)
    assert text.sample(model, seed=5, num_chars=50) == first
    assert text.sample(model, seed=6, num_chars=50) != first


def test_sample_leaves_global_random_state(model):
    before = torch.get_rng_state()
    text.sample(model, num_chars=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_low_temperature_writes_the_likeliest(model):
    written = text.sample(model, "a", num_chars=5, temperature=1e-6)
    with torch.no_grad():
        likeliest = model(text.encode(written[:-1]).unsqueeze(0))[0].argmax(-1)
    assert written[1:] == decode(likeliest)


@pytest.mark.parametrize("training", [True, False])
def test_sample_evaluates_without_a_graph_and_restores_mode(model, training):
    model.train(training)
    modes: list[tuple[bool, bool]] = []
    model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
    text.sample(model, num_chars=1)
    assert modes == [(False, False)]
    assert model.training == training


def test_sample_restores_mode_after_error(model):
    def fail(*_) -> None:
        raise RuntimeError("broken")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        text.sample(model, num_chars=1)
    assert model.training


@pytest.mark.parametrize("arguments", [{"prompt": ""}, {"temperature": 0.0}, {"temperature": -1.0}])
def test_sample_refuses_bad_arguments(model, arguments):
    with pytest.raises(ValueError, match="expected some text and a temperature above 0"):
        text.sample(model, **arguments)
