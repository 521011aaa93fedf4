"""Claims about buckets: backward sends each as soon as it and those before it are complete, and lets messages move."""

import numpy as np
import pytest
from training import MLP, TiedModel

from minipar.comm import serial
from minipar.parallel.buckets import BackwardHooks, Bucket
from minipar.parallel.groups import Group
from minipar.parallel.placement import attach_placements

X, Y = np.ones((2, 3)), np.ones((2, 1))


class Watched:
    """The hooks of a model's buckets, and what they do."""

    def __init__(self, model, *groups):
        attach_placements(model)
        self.model = model
        self.done = []
        self.buckets = [Bucket(Group(group, serial(), 0), serial()) for group in groups]
        for bucket in self.buckets:
            bucket.set_gradient(np.full(bucket.size, np.nan))
        self.hooks = BackwardHooks(self.buckets, self.send, lambda: self.done.append("progress"))

    def send(self, bucket):
        bucket.complete()
        self.done.append(self.buckets.index(bucket))

    def backward(self):
        """Run a pass; return what the hooks have done in it."""
        self.done.clear()
        self.model.loss_sum(X, Y).backward()
        return list(self.done)


def mlp(order):
    """An MLP with one bucket for each layer."""
    model = MLP()
    layers = {"first": model.first.parameters(), "second": model.second.parameters()}
    return Watched(model, *[layers[name] for name in order])


def sends(done):
    return [each for each in done if each != "progress"]


def test_each_gradient_lets_messages_move():
    """So does the one that sends a bucket. In a pass that sends none nothing travels."""
    watched = mlp(["second", "first"])
    done = watched.backward()
    assert done.count("progress") == 4 and sends(done) == [0, 1]
    assert done.index(0) < 3 and done[-2:] == [1, "progress"]
    watched.hooks.finish()
    with watched.hooks.no_sync():
        assert watched.backward() == []


def test_a_bucket_waits_for_those_before_it():
    watched = mlp(["first", "second"])
    assert sends(watched.backward()) == [0, 1]
    assert watched.done[-3:] == [0, 1, "progress"]


def test_what_the_loss_does_not_use_is_sent_at_the_end_as_zeros():
    model = MLP()
    unused = MLP()
    attach_placements(unused)
    watched = Watched(model, unused.parameters(), model.parameters())
    assert not watched.hooks.has_gradients
    assert sends(watched.backward()) == [] and watched.hooks.has_gradients
    watched.hooks.finish()
    assert sends(watched.done) == [0, 1] and not watched.hooks.has_gradients
    assert not watched.buckets[0].gradient.any() and watched.buckets[1].gradient.any()
    assert all(np.shares_memory(p.grad, watched.buckets[0].gradient) for p in unused.parameters())
    assert sends(watched.backward()) == [], "the next pass starts again"


@pytest.mark.parametrize("fails", [False, True])
def test_passes_send_again_after_no_sync(fails):
    """They do so also after an error in it. The end of a no_sync inside another one changes nothing."""
    watched = mlp(["second", "first"])
    hooks = watched.hooks
    try:
        with hooks.no_sync():
            with hooks.no_sync():
                assert watched.backward() == [] and not hooks.enabled
            assert watched.backward() == [] and not hooks.enabled
            if fails:
                raise FloatingPointError
    except FloatingPointError:
        assert fails
    assert hooks.enabled and sends(watched.backward()) == [0, 1]


def test_a_bucket_knows_its_parameters_places():
    model = MLP()
    watched = Watched(model, model.parameters())
    (bucket,) = watched.buckets
    shown = [(p.placement.dp.offset, p.placement.dp.size, p.placement.dp.bucket_size) for p in model.parameters()]
    assert shown == [(0, 15, 26), (15, 5, 26), (20, 5, 26), (25, 1, 26)]
    assert (bucket.size, bucket.own) == (26, slice(0, 26))
    assert [p.placement.dp.replica for p in bucket.parameters] == [0] * 4
    flat = np.arange(26.0)
    views = dict(bucket.views(flat))
    assert views[model.second.weight].tolist() == [[20.0], [21.0], [22.0], [23.0], [24.0]]
    assert all(np.shares_memory(view, flat) for view in views.values())
    bucket.drop_gradient()
    assert bucket.gradient is None and all(p.grad is None and p.grad_buffer is None for p in bucket.parameters)


def test_gradients_from_before_move_into_a_buckets_array():
    model = MLP()
    attach_placements(model)
    bucket = Bucket(Group(model.parameters(), serial(), 0), serial())
    model.second.bias.grad = np.array([3.0])
    flat = np.zeros(26)
    bucket.set_gradient(flat)
    assert flat[25] == 3.0 and np.shares_memory(model.second.bias.grad, flat) and model.first.bias.grad is None


def test_a_bucket_waits_for_every_tied_leaf():
    model = TiedModel()
    watched = Watched(model, model.parameters())
    (bucket,) = watched.buckets
    assert bucket.leaves() == {model.weight, model.leaf}
