"""Claims about what optimizers and models refuse: settings, steps without gradients, two layers of one name."""

import numpy as np
import pytest
from training import MLP, small_gpt

from minipar import nn
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module, Parameter, clip_grad_norm
from minipar.parallel.placement import attach_placements

WRONG = {
    "lr": [float("nan"), -1e-3, float("inf"), None, "1e-3"],
    "eps": [float("nan"), -1e-8, float("inf"), None],
    "weight_decay": [float("nan"), -0.1, float("inf"), None],
    "betas": [(0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.99, 0.999), 0.9, None, (float("nan"), 0.9), (0.9, None)],
}
FINE = {
    "lr": [0, 0.0, 1e-3, np.float32(0.1)],
    "eps": [0, 1e-6],
    "weight_decay": [0, 0.1],
    "betas": [(0, 0), [0.8, 0.9]],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(WRONG))
def test_a_setting_that_cannot_be_meant_is_refused(name, value):
    """When the optimizer is made, and when a schedule assigns it."""
    with pytest.raises(UsageError, match=f"optimizer: {name} = .*: expected"):
        AdamW(MLP().parameters(), **{name: value})
    optimizer = AdamW(MLP().parameters())
    with pytest.raises(UsageError, match=f"optimizer: {name} = .*: expected"):
        setattr(optimizer, name, value)


@pytest.mark.parametrize(("name", "value"), cases(FINE))
def test_any_setting_that_can_be_meant_is_taken(name, value):
    optimizer = AdamW(MLP().parameters(), **{name: value})
    setattr(optimizer, name, value)
    assert getattr(optimizer, name) == value


def test_a_refused_assignment_leaves_the_old_value():
    optimizer = AdamW(MLP().parameters(), lr=0.5)
    with pytest.raises(UsageError):
        optimizer.lr = float("nan")
    assert optimizer.lr == 0.5


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_step_without_any_gradient_is_refused(make):
    optimizer = make(MLP().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"step\(\) without gradients: all 4 parameters .* loss.backward\(\) before"):
        optimizer.step()
    assert optimizer.steps == 0


def test_a_step_with_one_gradient_of_many_is_fine():
    model = MLP()
    optimizer = AdamW(model.parameters(), lr=0.1)
    model.parameters()[-1].grad = np.ones(model.parameters()[-1].shape)
    optimizer.step()
    assert optimizer.steps == 1


def test_a_step_with_a_tied_gradient_alone_is_fine():
    p = Parameter(np.zeros((1, 1)))
    p.tie().grad = np.ones((1, 1))
    SGD([p], lr=1.0).step()
    assert p.data.item() == -1.0


# ---- names -----------------------------------------------------------------------------------------------------------


class Twice(Module):
    """Two layers, by default of one name."""

    def __init__(self, second="fc", **options):
        self.one, self.two = Linear(4, 4, name="fc"), Linear(4, 4, name=second, **options)


@pytest.mark.parametrize("see", [attach_placements, lambda model: AdamW(model.parameters())])
def test_two_layers_of_one_name_are_refused(see):
    with pytest.raises(UsageError, match=r'by the name "fc.weight" and seed 0.*: give each layer a name of its own'):
        see(Twice())


@pytest.mark.parametrize("see", [attach_placements, lambda model: AdamW(model.parameters())])
@pytest.mark.parametrize("options", [{"second": "fc2"}, {"seed": 1}])
def test_layers_of_other_names_or_seeds_are_fine(see, options):
    model = Twice(**options)
    assert not np.array_equal(model.one.weight.data, model.two.weight.data)
    see(model)


def test_layers_of_one_name_and_other_shapes_are_refused():
    class Shapes(Module):
        def __init__(self):
            self.one, self.two = Linear(4, 4, name="fc", bias=False), Linear(4, 8, name="fc", bias=False)

    with pytest.raises(UsageError, match=r"of shapes \(4, 4\) and \(4, 8\)"):
        attach_placements(Shapes())


def test_one_layer_in_two_places_is_one_layer():
    model = Twice("other")
    model.again = model.one
    attach_placements(model)
    attach_placements(small_gpt())


# ---- what an optimizer is given --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [AdamW, SGD])
@pytest.mark.parametrize("repeat", [1, 4])
def test_a_parameter_twice_in_one_optimizer_is_refused(make, repeat):
    parameters = MLP().parameters()
    with pytest.raises(UsageError, match=f"over {4 + repeat} parameters, {repeat} of which repeat .*: give each once"):
        make(parameters + parameters[:repeat])


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_an_optimizer_without_parameters_is_refused(make):
    with pytest.raises(UsageError, match=r"optimizer without parameters: give model.parameters\(\)"):
        make([])


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda model: model.named_parameters(), "over a tuple: .*without names"),
        (lambda model: [{"params": model.parameters()}], "over a dict: .*an optimizer has one group"),
        (lambda model: model.state_dict(), r"over a str: .*give model.parameters\(\)"),
        (lambda model: [p.data for p in model.parameters()], r"over a ndarray: .*give model.parameters\(\)"),
    ],
)
def test_what_is_no_parameter_is_refused_by_its_kind(give, says):
    with pytest.raises(UsageError, match=says):
        AdamW(give(MLP()))


@pytest.mark.parametrize("give", [iter, tuple, lambda parameters: (p for p in parameters)])
def test_any_iterable_of_parameters_is_taken(give):
    assert len(AdamW(give(MLP().parameters())).parameters) == 4


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, float("nan"), "1.0", [1.0]])
def test_a_norm_that_cannot_be_clipped_to_is_refused(max_norm):
    p = Parameter(np.zeros(2))
    p.grad = np.array([3.0, 4.0])
    with pytest.raises(UsageError, match="max_norm = .*: expected a number larger than 0, or None"):
        clip_grad_norm([p], max_norm)
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("max_norm", [None, 10, np.float32(10), float("inf")])
def test_a_norm_that_can_be_clipped_to_is_taken(max_norm):
    p = Parameter(np.zeros(2))
    p.grad = np.array([3.0, 4.0])
    assert clip_grad_norm([p], max_norm) == 5.0


# ---- what a model is made of -----------------------------------------------------------------------------------------

CONFIGS = {"GPT": nn.GPTConfig(11, 8, 8, 1, 2), "Llama": nn.LlamaConfig(11, 8, 8, 1, 2)}
CONFIGS["Mixtral"] = nn.MixtralConfig(11, 8, 8, 1, 2, 2)


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_is_made_from_its_own_config(model, config):
    if model == config:
        getattr(nn, model)(CONFIGS[config])
        return
    says = rf"{model} of a {config}Config: give an mp.{model}Config, or write mp.{config}\(config\)"
    with pytest.raises(UsageError, match=says):
        getattr(nn, model)(CONFIGS[config])


@pytest.mark.parametrize("config", [None, {"n_embd": 8}])
def test_a_model_is_made_from_a_config(config):
    with pytest.raises(UsageError, match="GPT of a .*: give an mp.GPTConfig"):
        nn.GPT(config)


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("dtype", ["int32", "float8", "half", "", None, int, np.int64, 4, ["float32"]])
def test_a_dtype_that_no_model_has_is_refused(model, dtype):
    with pytest.raises(UsageError, match=rf"{model}\(dtype=.*\): expected bf16, fp16, fp32, fp64 or bfloat16, float16"):
        getattr(nn, model)(CONFIGS[model], dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("bfloat16", "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("float64"), "float64"),
    ],
)
def test_a_dtype_has_the_names_that_the_command_line_takes(dtype, name):
    model = nn.GPT(CONFIGS["GPT"], dtype=dtype)
    assert model.dtype == name
    assert {str(p.data.dtype) for p in model.parameters()} == {name}


@pytest.mark.parametrize("p", [1.5, 1.0, -0.1, float("nan"), "0.1", None])
def test_a_dropout_that_is_no_probability_is_refused(p):
    with pytest.raises(UsageError, match="dropout = .*: expected a probability from 0 on and below 1"):
        nn.GPT(CONFIGS["GPT"], dropout=p)
