"""Claims about what optimizers and models refuse: settings, steps without gradients, two layers of one name."""

import numpy as np
import pytest
import strict_array
from training import MLP, small_gpt

from minipar import nn
from minipar.autograd import Tensor
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Module, Parameter, clip_grad_norm
from minipar.nn.deferred import placeholder
from minipar.nn.guards import array_of, check_size
from minipar.nn.layers import DropoutKeys, dropping
from minipar.nn.optim_guards import check_names
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


@pytest.mark.parametrize("model", CONFIGS)
def test_a_models_defaults_keep_all_arrays_and_drop_nothing(model):
    """Seed 0, float32, values at once, no recompute, and no dropout."""
    made = getattr(nn, model)(CONFIGS[model])
    explicit = getattr(nn, model)(CONFIGS[model], seed=0, dtype="float32")
    state, expected = made.state_dict(), explicit.state_dict()
    assert all(np.array_equal(state[name], expected[name]) for name in expected)
    assert {array.dtype for array in state.values()} == {np.dtype("float32")}
    tokens = np.array([[1, 2, 3]])
    with dropping(DropoutKeys(0, 0, [0])):
        logits = made(tokens)
    assert np.array_equal(logits.data, explicit(tokens).data)
    assert "_Checkpoint" not in names_of_nodes(logits)
    again = getattr(nn, model)(CONFIGS[model], recompute=True)
    assert names_of_nodes(again(tokens)).count("_Checkpoint") == CONFIGS[model].n_layer


def names_of_nodes(tensor):
    nodes, names = [tensor.node], []
    while nodes:
        node = nodes.pop()
        names.append(node.operation_name())
        nodes += [each for each in node.input_nodes if each is not None]
    return names


def test_a_parameter_with_a_recipe_is_by_default_deferred():
    made = [
        Parameter(placeholder((2,), "float64"), lambda: np.ones(2), *at_once) for at_once in ((), (True,), (False,))
    ]
    assert [np.isnan(each.data).all() for each in made] == [True, True, False]


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


# ---- batches ---------------------------------------------------------------------------------------------------------


class Foreign:
    """A tensor of another library: it has a dtype of its own, and gives its values as an array."""

    dtype = "torch.int64"

    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 2]])


def test_an_array_stays_where_it_is_and_a_foreign_tensor_is_read():
    host = np.zeros((1, 2), int)
    assert array_of("tokens", host) is host
    assert array_of("tokens", Foreign()).tolist() == [[1, 2]]
    on_device = strict_array.asarray(host)
    assert array_of("tokens", on_device) is on_device  # not copied to the host, which CuPy refuses


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([[1, 2]], r"tokens are a list: give an array, as np.array\(tokens\)"),
        (Tensor(np.zeros((1, 2))), "tokens are a Tensor: give its array, tokens.data"),
        (None, "tokens are a NoneType: give an array"),
    ],
)
def test_what_is_no_array_is_refused(value, says):
    with pytest.raises(UsageError, match=says):
        array_of("tokens", value)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.zeros(3, int), r"tokens of shape \(3,\): expected \(samples, tokens\), as tokens\[None\] for one sample"),
        (np.zeros((1, 3, 1), int), r"tokens of shape \(1, 3, 1\)"),
        (np.zeros((1, 3)), r"tokens of float64: expected integers, as tokens.astype\(int\)"),
        (np.zeros((1, 3), bool), "tokens of bool: expected integers"),
    ],
)
def test_tokens_are_integers_of_two_dims(tokens, says):
    with pytest.raises(UsageError, match=says):
        nn.GPT(CONFIGS["GPT"])(tokens)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 2)])
def test_a_layers_input_ends_with_its_columns(shape):
    layer = Linear(4, 2, name="layer", transposed=True)
    with pytest.raises(UsageError, match=r"Linear of 4 inputs: x has the shape .*, whose last dim must be 4"):
        layer(np.zeros(shape))
    assert layer(np.zeros(4)).shape == (2,) and layer(np.zeros((5, 3, 4))).shape == (5, 3, 2)
    assert layer(np.zeros((0, 4))).shape == (0, 2)


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_a_size_is_an_integer(value):
    with pytest.raises(UsageError, match=f"n = {value!r}: expected an integer"):
        check_size("n", value)


def test_a_size_is_at_least_1():
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"n = {value}, expected at least 1"):
            check_size("n", value)
    check_size("n", 1)
    check_size("n", np.int64(3))


def test_one_parameter_named_twice_is_no_two_of_one_name():
    """An optimizer checks names once the parameters are unique; a model may name one parameter twice."""
    one = Linear(2, 3, name="a").weight
    check_names([one, Parameter(np.zeros(2)), Parameter(np.zeros(2)), one])
    with pytest.raises(UsageError, match='the name "a.weight" and seed 0'):
        check_names([one, Linear(2, 3, name="a").weight])


# ---- a model's state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ([1], "load_state_dict of a list: give what state_dict"),
        ({"state": {}, "param_groups": []}, "an optimizer's state: write optimizer.load_state_dict"),
        ({}, "load_state_dict of an empty state: state_dict.. of a wrapper returns the model on rank 0"),
        ({"fc.weight": 1.0}, "fc.weight is a float: give an array"),
        ({"fc.weight": np.zeros(2, complex)}, "fc.weight holds complex128: expected real values"),
        ({"fc.weight": np.array(["a"])}, "fc.weight holds <U1"),
        ({"fc.weight": np.array([None])}, "fc.weight holds object"),
        ({"fc.weight": np.array([b"a"])}, "fc.weight holds .S1"),
    ],
)
def test_a_state_that_no_model_has_is_refused(state, says):
    with pytest.raises(UsageError, match=says):
        Linear(2, 3, name="fc").load_state_dict(state)


def test_a_module_without_parameters_takes_an_empty_state():
    Module().load_state_dict({})


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_an_optimizer_has_no_groups_and_one_name_for_its_rate():
    optimizer = AdamW(MLP().parameters())
    with pytest.raises(AttributeError, match="an optimizer has one group and no param_groups: set optimizer.lr"):
        _ = optimizer.param_groups
    for name in ("learning_rate", "LR", "learningrate"):
        with pytest.raises(UsageError, match=f"optimizer.{name} = 0.1 would change nothing: set optimizer.lr"):
            setattr(optimizer, name, 0.1)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_gradient_is_used_once(make):
    """Unless it is a new array, or lies in flat storage, which a strategy looks after."""
    parameters = [Parameter(np.zeros(2)), Parameter(np.zeros(2))]
    optimizer = make(parameters, lr=1.0)
    parameters[0].grad = np.ones(2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="would use the gradients of the last step again: call optimizer.zero_grad"):
        optimizer.step()
    parameters[1].grad = np.ones(2)  # that of another backward, next to the old one
    with pytest.raises(RuntimeError, match="would use the gradients of the last step again"):
        optimizer.step()
    assert optimizer.steps == 1
    parameters[0].grad = np.ones(2)
    optimizer.step()
    for parameter in parameters:
        parameter.grad_buffer = parameter.grad
    optimizer.step()
    optimizer.zero_grad()
    parameters[0].grad_buffer, parameters[0].grad = None, parameters[0].used_gradient
    with pytest.raises(RuntimeError, match="without gradients"):
        optimizer.step()


def test_a_parameter_keeps_the_shape_that_the_optimizer_saw():
    parameter = Parameter(np.zeros((2, 3)))
    optimizer = AdamW([parameter])
    parameter.data, parameter.grad = np.zeros((1, 3)), np.zeros((1, 3))
    says = r"a parameter of shape \(2, 3\) has the shape \(1, 3\) now: split the model first"
    with pytest.raises(ValueError, match=says):
        optimizer.step()


@pytest.mark.parametrize("given", [MLP(), Parameter(np.zeros(2)), None, 3])
def test_what_has_no_parameters_to_go_through_is_refused(given):
    with pytest.raises(UsageError, match=f"over a {type(given).__name__}: expected parameters; give model.parameters"):
        SGD(given)
