"""Make the trainers of chapters 6 to 14 from flags of the command line."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from minipar.comm import Communicator, DeviceMesh
from minipar.train.data import Tokens, load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer


def parsed(flags: str, ranks: int = 1, **shape: Any) -> Namespace:
    """Return flags as `python -m minipar.train` reads them on so many ranks.

    `shape` are values of the model's config that have no flag; the command line reads them from a config.json.
    """
    args = parse(flags.split(), ranks)
    args.shape = replace(args.shape, **shape)
    return args


def text_for(args: Namespace) -> Tokens:
    """Return the text on which the program trains without `--data`."""
    return load_tokens(None, vocab_size=args.vocab_size, seq_len=args.seq_len)


def trainer_for(comm: Communicator, args: Namespace, tokens: Tokens, kind: type[Trainer] = Trainer) -> Trainer:
    """Return this rank's trainer on a mesh of the sizes in `args`."""
    mesh = DeviceMesh(comm, dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, ep=args.ep)
    return kind(args, mesh, tokens)


def make_trainer(comm: Communicator, flags: str, kind: type[Trainer] = Trainer) -> Trainer:
    """Return this rank's trainer of these flags, on the text for them."""
    args = parsed(flags, comm.size)
    return trainer_for(comm, args, text_for(args), kind)
