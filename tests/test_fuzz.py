"""About 200 of the random inputs of `make fuzz`: each ends in success, or with code 2 and one line."""

import pytest
from fuzz import test_plan, test_train, test_visualize
from fuzz.harness import CASES, fuzz
from hypothesis import strategies as st

TARGETS = {
    "flags of a training": (test_train.TRAIN, test_train.flag_cases, test_train.WARM),
    "a model's directory": (test_train.TRAIN, test_train.model_directories(), test_train.WARM),
    "a GPU's file": (test_plan.PLAN, test_plan.gpu_files, test_plan.WARM),
    "a file of a picture": (
        test_visualize.READ,
        st.builds(test_visualize.read_case, test_visualize.files()),
        test_visualize.READ_WARM,
    ),
}
EACH = 50  # cases of a target


@pytest.mark.parametrize("target", TARGETS)
def test_random_inputs_end_in_success_or_one_line(target):
    command, cases, warm = TARGETS[target]
    count = fuzz(command, cases, EACH / CASES, warm)
    assert 0 < count.succeeded < count.cases
