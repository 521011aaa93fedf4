"""The trainer of `--reduction tree`: all sums are balanced trees, so all layouts have the same bits."""

from argparse import Namespace

import numpy as np

from minipar.comm.mesh import DeviceMesh
from minipar.errors import UsageError
from minipar.more.tree import exact_norm
from minipar.more.tree.leaves import LeafGradients
from minipar.more.tree.tree_sums import is_power_of_two, tree_sum
from minipar.parallel.pipeline.actions import Action
from minipar.train.data import Tokens
from minipar.train.trainer import Trainer


def check_tree(args: Namespace) -> None:
    """Fill in microbatches of one sample, the leaves, unless they are given.

    UsageError for a layout that cannot have the bits of one device (docs/combinations.md says why).
    """
    goes_on_cpu = args.dtype in ("float32", "float64") and args.device == "cpu"
    if not goes_on_cpu or args.cp > 1 or args.sync_every_microbatch or args.shape.model_type == "mixtral":
        rule = "gpt2 or llama in float32 or float64 on the CPU, with cp 1 and without --sync-every-microbatch"
        raise UsageError(f"--reduction tree is for {rule}")
    if args.microbatches is None:
        args.microbatches = max(1, args.global_batch // args.dp)
    for name in ("dp", "tp", "microbatches"):
        size = getattr(args, name)
        if not is_power_of_two(size):
            raise UsageError(
                f"--reduction tree with {name} = {size}: pairs are added, so it is a power of two"
            )


class TreeTrainer(Trainer):
    """A trainer whose microbatches' gradients and losses are the leaves of trees."""

    loss_order = "tree"
    clip = staticmethod(exact_norm.clip_exact_norm)

    def __init__(self, args: Namespace, mesh: DeviceMesh, tokens: Tokens) -> None:
        super().__init__(args, mesh, tokens)
        exact_norm.check_size(sum(self.sizes.values()))
        # The leaves are summed over tp one by one, so their sum must not be summed over tp again.
        self.ddp.before_reduce = None
        assert self.tensor is not None  # trees have their own layers, on one rank too
        buckets = [bucket.parameters for bucket in self.ddp.buckets]
        self.leaves = LeafGradients(buckets, self.tensor, self.pipeline)

    def replica_gradient(self, step: int) -> float:
        with self.ddp.no_sync():
            losses = self.run_schedule(step, self.mesh.dp.rank)
        self.leaves.finish(self.args.microbatches)
        self.ddp.synchronize()
        return float(tree_sum(np.array(losses)))

    def after_action(self, action: Action) -> None:
        self.leaves.take(action.microbatch)
