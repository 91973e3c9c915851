"""A few mistakes, and a few scripts without one, on two real processes. `python -m tests.mistakes` runs all of them."""

import pytest
import torch
from tests.mistakes.judge import LIMIT_SECONDS, Message, Outcome, Report, Verdict, judge
from tests.mistakes.pair import run_on_pair
from tests.mistakes.script import SAME, Script
from tests.mistakes.scripts import SCRIPTS


def outcome_of(name: str, backend: str) -> Outcome:
    return judge(SCRIPTS[name], run_on_pair(name, backend))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gradients_of_autograd_grad_are_assigned", "gloo"),
        ("one_rank_stops_early", "gloo"),
        ("one_rank_has_fewer_batches_and_then_averages_a_metric", "shm"),
        ("set_epoch_is_forgotten", "shm"),
        ("rank_0_alone_averages_the_loss_for_its_log", "shm"),
        ("one_rank_unfreezes_the_backbone_earlier", "gloo"),
        ("a_layer_is_made_in_the_first_forward", "shm"),
        ("gradients_are_compressed_on_one_rank", "shm"),
        ("the_head_is_outside_of_the_wrapper", "gloo"),
        ("models_are_wrapped_in_the_order_of_a_set", "gloo"),
        ("models_of_equal_values_are_wrapped_in_the_order_of_a_set", "shm"),
        ("set_epoch_gets_the_same_number_again", "shm"),
        ("a_broken_batch_of_a_loader_is_left_out", "gloo"),
        ("data_are_in_another_order_on_each_rank", "shm"),
        ("a_checkpoint_without_the_prefix_is_loaded_loosely", "shm"),
        ("a_lookahead_of_one_rank_moves_the_weights_back", "shm"),
        ("lbfgs_decides_by_the_local_loss", "gloo"),
    ],
)
def test_every_rank_is_told_of_a_mistake(name: str, backend: str) -> None:
    outcome = outcome_of(name, backend)
    assert outcome.verdict == Verdict.TOLD, outcome
    assert outcome.seconds < LIMIT_SECONDS


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("the_unwrapped_model_is_trained", "gloo"),
        ("a_method_of_the_module_computes_the_loss", "shm"),
        ("accumulation_with_no_sync", "gloo"),
        ("clipping_and_a_scaler", "shm"),
        ("gradients_are_averaged_by_hand", "gloo"),
        ("an_average_of_weights_on_all_ranks_and_warm_up", "gloo"),
        ("a_generator_and_a_discriminator", "shm"),
        ("synchronized_batch_norm", "shm"),
        ("rank_0_evaluates_alone", "gloo"),
        ("a_critic_with_spectral_norm_is_frozen_for_the_generator", "shm"),
        ("an_encoder_follows_with_momentum_and_a_queue", "gloo"),
    ],
)
def test_a_script_is_right_without_a_warning(name: str, backend: str) -> None:
    outcome = outcome_of(name, backend)
    assert outcome.verdict == Verdict.RIGHT, outcome
    assert not any(report.messages for report in outcome.reports)


def report(*texts: str, end: str = "returned", value: float = 1.0, seconds: float = 1.0) -> Report:
    messages = tuple(Message(kind="UserWarning", text=text, seconds=seconds) for text in texts)
    return Report(messages=messages, result=[torch.tensor(value)] if end == "returned" else None, end=end)


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([report(), report()], Verdict.RIGHT),
        ([report(), report(value=2.0)], Verdict.SILENT),
        ([report("the weights differ"), report("the weights differ", value=2.0)], Verdict.TOLD),
        ([report("the weights differ"), report(value=2.0)], Verdict.PARTLY),
        ([report("another thing"), report("another thing", value=2.0)], Verdict.PARTLY),
        ([report("the weights differ", seconds=60.0), report("the weights differ", value=2.0)], Verdict.PARTLY),
        ([report("the weights differ"), report("the weights differ", end="not done")], Verdict.PARTLY),
        ([report(end="not done"), report()], Verdict.HANG),
        ([report(end="exit code -6"), report()], Verdict.PARTLY),
    ],
)
def test_a_mistake_is_judged_by_what_every_rank_reports(reports: list[Report], verdict: Verdict) -> None:
    script = Script(name="", run=lambda _rank, _wrap: None, cause="weights differ", right=SAME)
    assert judge(script, reports).verdict == verdict


def test_a_message_to_a_correct_script_is_a_false_alarm() -> None:
    script = Script(name="", run=lambda _rank, _wrap: None, cause=None, right=SAME)
    assert judge(script, [report(), report("the weights differ")]).verdict == Verdict.FALSE_ALARM
