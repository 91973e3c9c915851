"""Parameters that a forward writes."""

import torch
from torch import nn

from lockstep.engine.written_parameters import WrittenParameterCheck


def test_a_write_of_an_even_number_of_equal_values_through_data_is_found() -> None:
    # An exclusive or of all elements is 0 before and after: a bias that went from zeros to ones was not found.
    model = nn.Linear(2, 6)
    nn.init.zeros_(model.bias)
    check = WrittenParameterCheck(model)
    check.begin()
    assert check.find_written() == 0
    check.begin()
    model.bias.data.fill_(1.0)
    assert check.find_written() == check.names.index("bias") + 1


def test_parameters_without_elements_and_of_several_dtypes_are_compared() -> None:
    model = nn.ParameterList(
        [
            torch.zeros(0),
            torch.zeros(3, dtype=torch.complex64),
            torch.zeros(2, dtype=torch.bfloat16),
            torch.zeros(2, 2).t(),
        ]
    )
    check = WrittenParameterCheck(model)
    check.begin()
    model[1].data[0] = 1j
    assert check.find_written() == 2
