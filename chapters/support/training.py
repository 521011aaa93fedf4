"""Make the trainers of chapters 7 to 10, 12 and 13 from flags of the command line."""

from minipar.comm import Communicator, DeviceMesh
from minipar.train.config import parse, resolve
from minipar.train.data import Tokens, load_tokens
from minipar.train.settings import TrainConfig
from minipar.train.trainer import Trainer


def configuration(flags: str, ranks: int = 1) -> TrainConfig:
    """Return the configuration that `python -m minipar.train` would make of these flags on so many ranks."""
    return resolve(parse(flags.split(), rank=1), ranks)


def text_for(config: TrainConfig) -> Tokens:
    """Return the text on which the trainer trains without `--data`."""
    return load_tokens(None, vocab_size=config.model.vocab_size, seq_len=config.model.seq_len)


def make_trainer(comm: Communicator, flags: str, kind: type[Trainer] = Trainer) -> Trainer:
    """Return this rank's trainer."""
    config = configuration(flags, comm.size)
    sizes = config.mesh
    mesh = DeviceMesh(comm, dp=sizes.dp, tp=sizes.tp, pp=sizes.pp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp)
    return kind(config, mesh, text_for(config))
