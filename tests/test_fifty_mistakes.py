"""Claims about mistakes that an engineer who knows PyTorch makes here: each is refused, and the text names the remedy.

docs/examples/mistakes.md has the same mistakes, those that are refused and those that work.
"""

import re

import numpy as np
import pytest
from launcher import run_mpi
from training import MLP

import minipar as mp
from minipar.comm import run_local
from minipar.nn.pretrained import load_config

SIZES = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}


def gpt(**sizes):
    return mp.GPT(mp.GPTConfig(**SIZES | sizes))


def pair():
    model = gpt()
    return model, mp.AdamW(model.parameters(), lr=0.1)


def batch(step=0):
    rows = np.random.Generator(np.random.Philox(step)).integers(0, 11, (2, 9))
    return rows[:, :-1], rows[:, 1:]


def backward(model, step=0):
    model.loss(*batch(step)).backward()


# ---- steps, in a serial model ----------------------------------------------------------------------------------------


def forgets_zero_grad(world):
    model, optimizer = pair()
    for step in range(2):
        backward(model, step)
        optimizer.step()


def steps_twice(world):
    model, optimizer = pair()
    backward(model)
    optimizer.step()
    optimizer.step()


def two_optimizers(world):
    model, optimizer = pair()
    other = mp.AdamW(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    other.step()


def forgets_zero_grad_of_split_layers(world):
    model = gpt()
    mp.tensor_parallel(model, world)
    optimizer = mp.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        backward(model, step)
        optimizer.step()


def zero_grad_before_step(world):
    model, optimizer = pair()
    backward(model)
    optimizer.zero_grad()
    optimizer.step()


def backward_after_step(world):
    model, optimizer = pair()
    old = model.loss(*batch(1))
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    old.backward()


def backward_after_step_of_a_wrapper(world):
    ddp = mp.DistributedDataParallel(gpt(), world)
    optimizer = mp.AdamW(ddp.parameters(), lr=0.1)
    old = ddp.loss(*batch(1))
    ddp.loss(*batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    old.backward()


def backward_twice(world):
    loss = gpt().loss(*batch())
    loss.backward()
    loss.backward()


def backward_of_no_grad(world):
    with mp.no_grad():
        loss = gpt().loss(*batch())
    loss.backward()


def backward_of_a_pipeline(world):
    mesh = mp.DeviceMesh(world, pp=2)
    stages = [mp.Linear(3, 3, name="a", dtype="float64"), MLP()]
    model = mp.PipelineModule(stages, mesh, num_microbatches=2)
    model(np.ones((4, 3)), np.ones((4, 1))).backward()


# ---- what an optimizer is given --------------------------------------------------------------------------------------


def a_model_to_the_optimizer(world):
    mp.AdamW(gpt())


def a_wrapper_to_the_optimizer(world):
    mp.AdamW(mp.DistributedDataParallel(gpt(), world))


def one_parameter_to_the_optimizer(world):
    mp.AdamW(gpt().parameters()[0])


def groups_of_torch(world):
    pair()[1].param_groups[0]["lr"] = 1e-4


def another_name_of_lr(world):
    pair()[1].learning_rate = 1e-4


def an_optimizer_before_tensor_parallel(world):
    model, optimizer = pair()
    mp.tensor_parallel(model, world)
    backward(model)
    optimizer.step()


# ---- sizes, models, states -------------------------------------------------------------------------------------------


def a_size_of_float(world):
    gpt(n_embd=16.0)


def a_size_of_text(world):
    gpt(vocab_size="11")


def no_layers(world):
    gpt(n_layer=0)


def a_set_of_layers(world):
    model = mp.Module()
    model.layers = {mp.Linear(2, 2, name="a")}
    model.parameters()


def a_rank_for_the_communicator(world):
    mp.DistributedDataParallel(gpt(), world.rank)


def swapped_arguments(world):
    mp.DistributedDataParallel(world, gpt())


def a_frozen_parameter(world):
    model = gpt()
    model.parameters()[0].requires_grad = False
    mp.DistributedDataParallel(model, world)


def the_optimizers_state(world):
    model, optimizer = pair()
    model.load_state_dict(optimizer.state_dict())


def a_path_for_a_state(world):
    gpt().load_state_dict("model.npz")


def the_state_of_another_rank(world):
    gpt().load_state_dict({})


def lists_for_arrays(world):
    model = gpt()
    model.load_state_dict({name: array.tolist() for name, array in model.state_dict().items()})


def complex_values(world):
    model = gpt()
    model.load_state_dict({name: array.astype("c16") for name, array in model.state_dict().items()})


def two_models_of_one_seed(world):
    mp.AdamW(gpt().parameters() + gpt().parameters())


# ---- communicators and meshes ----------------------------------------------------------------------------------------


def a_float_to_sum(world):
    world.all_reduce(1.0)


def a_list_to_sum(world):
    world.all_reduce([1.0, 2.0])


def a_tensor_to_sum(world):
    world.all_reduce(mp.Tensor(np.ones(2)))


def words_to_sum(world):
    world.all_reduce(np.array(["a"]))


def nothing_to_broadcast_into(world):
    world.broadcast(np.ones(2) if world.rank == 0 else None)


def a_mesh_of_torch(world):
    mp.DeviceMesh("cpu", (2,))


def a_mesh_of_tuples(world):
    mp.DeviceMesh(world, (2,))


def a_mesh_of_text(world):
    mp.DeviceMesh(world, dp="2")


AGAIN = "would use the gradients of the last step again: call optimizer.zero_grad() after each step"
LATE = "backward() too late: the optimizer has changed the parameters since this loss was computed"
GIVE = "give model.parameters() or wrapper.parameters()"
ARRAY = "give an array of the same shape and dtype on every rank, such as np.array([value]"
REFUSED = [
    (forgets_zero_grad, AGAIN),
    (steps_twice, AGAIN),
    (two_optimizers, "and give each parameter to one optimizer"),
    (forgets_zero_grad_of_split_layers, AGAIN),
    (zero_grad_before_step, "call loss.backward() before step(), and zero_grad() after it"),
    (backward_after_step, LATE),
    (backward_after_step_of_a_wrapper, LATE),
    (backward_twice, "backward() a second time through the same graph"),
    (backward_of_no_grad, "it was computed under no_grad"),
    (backward_of_a_pipeline, "a PipelineModule has run backward already"),
    (a_model_to_the_optimizer, f"optimizer over a GPT: expected parameters; {GIVE}"),
    (a_wrapper_to_the_optimizer, f"optimizer over a DistributedDataParallel: expected parameters; {GIVE}"),
    (one_parameter_to_the_optimizer, f"optimizer over a Parameter: expected parameters; {GIVE}"),
    (groups_of_torch, "an optimizer has one group and no param_groups: set optimizer.lr"),
    (another_name_of_lr, "optimizer.learning_rate = 0.0001 would change nothing: set optimizer.lr"),
    (an_optimizer_before_tensor_parallel, "split the model first (mp.tensor_parallel, ...), then make the optimizer"),
    (a_size_of_float, "n_embd = 16.0: expected an integer"),
    (a_size_of_text, "vocab_size = '11': expected an integer"),
    (no_layers, "n_layer = 0, expected at least 1"),
    (a_set_of_layers, "layers is a set of modules: a set has no order; give a list"),
    (a_rank_for_the_communicator, "int is no Communicator: give world, as main(world) gets it"),
    (swapped_arguments, "Communicator is no mp.Module"),
    (a_frozen_parameter, "wte.weight.requires_grad is False, but a wrapper trains all parameters"),
    (the_optimizers_state, "this is an optimizer's state: write optimizer.load_state_dict(state)"),
    (a_path_for_a_state, "load_state_dict of a str: give what state_dict() returned"),
    (the_state_of_another_rank, "load what rank 0 has saved, on every rank"),
    (lists_for_arrays, "wte.weight is a list: give an array"),
    (complex_values, "wte.weight holds complex128: expected real values"),
    (two_models_of_one_seed, "or another seed"),
    (a_float_to_sum, f"all_reduce of a float: {ARRAY}"),
    (a_list_to_sum, f"all_reduce of a list: {ARRAY}"),
    (a_tensor_to_sum, "all_reduce of a Tensor: give its array, x.data"),
    (words_to_sum, "all_reduce of an array of <U1: expected values that can be added"),
    (nothing_to_broadcast_into, f"broadcast of a NoneType: {ARRAY}"),
    (a_mesh_of_torch, "DeviceMesh of a str: give world, as main(world) gets it"),
    (a_mesh_of_tuples, "dp = (2,): expected an integer for each axis"),
    (a_mesh_of_text, "dp = '2': expected an integer for each axis"),
]


@pytest.mark.parametrize(("mistake", "says"), REFUSED, ids=[mistake.__name__ for mistake, _ in REFUSED])
def test_a_mistake_is_refused_with_its_remedy(mistake, says):
    with pytest.raises((mp.UsageError, ValueError, RuntimeError, AttributeError), match=re.escape(says)):
        run_local(2, mistake)


# ---- what is no mistake ----------------------------------------------------------------------------------------------


def test_gradients_of_several_backwards_add_up_in_one_step():
    model, optimizer = pair()
    for _ in range(2):
        backward(model)
        backward(model, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 2


def test_optimizers_may_take_turns_and_gradients_may_be_assigned():
    model, optimizer = pair()
    parameter = model.parameters()[-1]
    for turn in (optimizer, mp.AdamW(model.parameters()), optimizer):
        parameter.grad = np.ones_like(parameter.data)
        turn.step()
    assert optimizer.steps == 2


def test_another_models_step_makes_no_graph_too_old():
    """As a generator's loss goes through a discriminator, and adds to its gradients."""
    (first, optimizer), (second, _) = pair(), pair()
    loss = second.loss(*batch())
    backward(first)
    optimizer.step()
    loss.backward()


def test_a_graph_is_not_too_old_for_values_that_were_put_back():
    model, optimizer = pair()
    before = [p.data for p in model.parameters()]
    loss = model.loss(*batch())
    for p in model.parameters():
        p.data = p.data.copy()
    backward(model)
    optimizer.step()
    for p, values in zip(model.parameters(), before, strict=True):
        p.data = values
    loss.backward()


def test_a_frozen_parameter_stays_in_a_serial_model():
    """The embedding of a GPT, whose head would give it a gradient."""
    model, optimizer = pair()
    frozen = model.parameters()[0]
    frozen.requires_grad = False
    before = frozen.data.copy()
    backward(model)
    optimizer.step()
    assert np.array_equal(frozen.data, before)


def test_layers_in_nested_lists_are_trained():
    model = mp.Module()
    model.blocks = [[mp.Linear(2, 2, name="a")], {"up": (mp.Linear(2, 2, name="b"),)}]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.up.0.weight", "blocks.1.up.0.bias"]


def test_a_state_of_integers_or_other_floats_is_taken():
    model = gpt()
    model.load_state_dict({name: np.zeros(array.shape, int) for name, array in model.state_dict().items()})
    model.load_state_dict({name: array.astype("f2") for name, array in model.state_dict().items()})
    assert not any(p.data.any() for p in model.parameters())


# ---- what only the end of a program shows ----------------------------------------------------------------------------

NOTE = "note: each of the 2 ranks trained a model of its own, and no gradients were summed; train with ddp = mp.Dist"


def forgets_the_wrapper(world):
    model, optimizer = pair()
    backward(model)
    optimizer.step()


def trains_with_a_wrapper(world):
    ddp = mp.DistributedDataParallel(gpt(), world)
    optimizer = mp.AdamW(ddp.parameters())
    ddp.loss(*batch(world.rank)).backward()
    optimizer.step()


def says_hello(world):
    return world.rank


def forgets_the_wrapper_and_sends_losses(world):
    """As a script that prints the mean of all ranks' losses."""
    forgets_the_wrapper(world)
    for _ in range(10):
        world.all_reduce(np.ones(2))


def sums_gradients_by_itself(world):
    model, optimizer = pair()
    backward(model, world.rank)
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
        world.all_reduce(parameter.grad)
    optimizer.step()


def sends_parameters_in_two_bytes(world):
    """As ranks that train for many steps by themselves, and then share what they have learned."""
    forgets_the_wrapper(world)
    world.all_reduce(np.ones(sum(p.size for p in gpt().parameters()), "f2"))


@pytest.mark.parametrize("program", [forgets_the_wrapper, forgets_the_wrapper_and_sends_losses])
def test_a_forgotten_wrapper_is_noted_once(program, capfd):
    mp.launch(program, threads=2)
    assert capfd.readouterr().err.count(NOTE) == 1


@pytest.mark.parametrize(
    "program", [trains_with_a_wrapper, says_hello, sums_gradients_by_itself, sends_parameters_in_two_bytes]
)
def test_other_programs_have_no_note(program, capfd):
    mp.launch(forgets_the_wrapper, threads=1)  # one device
    mp.launch(program, threads=2)
    assert capfd.readouterr().err == ""


PROGRAM = """
import os, minipar as mp, numpy as np
def main(world):
    model = mp.GPT(mp.GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    optimizer = mp.AdamW(model.parameters())
    model.loss(np.ones((1, 8), int), np.ones((1, 8), int)).backward()
    optimizer.step()
    {end}
mp.launch(main)
"""


def test_a_forgotten_wrapper_is_noted_once_under_mpirun():
    result = run_mpi(2, PROGRAM.format(end="pass"))
    assert (result.returncode, result.stderr.count(NOTE)) == (0, 1)


def test_os_exit_0_on_a_rank_fails_the_job():
    """MPICH's mpirun would end the other ranks and exit with 0."""
    result = run_mpi(2, PROGRAM.format(end="os._exit(0) if world.rank else world.barrier()"))
    assert result.returncode == 1
    assert result.stderr.count("minipar: rank 1 has called os._exit(0), which ends the job: return, or call") == 1


def test_a_process_that_a_rank_forked_may_exit():
    result = run_mpi(2, PROGRAM.format(end="os.fork() or os._exit(0)"))
    assert result.returncode == 0 and "os._exit" not in result.stderr


@pytest.mark.parametrize("checkpoint", ["step-00000003/manifest.json", "manifest.json"])
def test_a_checkpoint_is_no_model_to_start_from(checkpoint, tmp_path):
    file = tmp_path / checkpoint
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    with pytest.raises(mp.UsageError, match="holds checkpoints of --save, .*: go on from it with --resume"):
        load_config(tmp_path)
