"""Print a text and what a trained model adds.

The left end of a text longer than the model's positions is cut off.
"""

import os
import sys
from collections.abc import Sequence

import numpy as np

from minipar.autograd import no_grad
from minipar.backend import from_host, to_host
from minipar.cli import UsageParser, report, write_out
from minipar.comm.threads import serial
from minipar.errors import UsageError, printable
from minipar.nn.layers import generator
from minipar.nn.pretrained import load_pretrained
from minipar.nn.transformer import LanguageModel
from minipar.train.config import parse
from minipar.train.from_config import make_model
from minipar.train.resume import check_checkpoint, continued, find_checkpoint


def load(directory: str) -> LanguageModel:
    """Load the model of a model directory, or of the newest checkpoint in a directory.

    UsageError.
    """
    if not os.path.isdir(directory) or os.path.exists(os.path.join(directory, "config.json")):
        return load_pretrained(directory)
    config = parse([f"--resume={os.path.join(directory, '')}"])
    checkpoint = find_checkpoint(config, serial(), "--from")
    assert checkpoint is not None  # as always without --resume auto
    config = continued(config, checkpoint)
    check_checkpoint(checkpoint, config, None, serial())
    model = make_model(config, checkpoint)
    model.materialize()
    return model


def generate(
    model: LanguageModel, tokens: Sequence[int], count: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """Return `tokens` and the `count` tokens that follow. UsageError if a logit is not finite."""
    random, text = generator(seed, "generate"), list(tokens)
    for _ in range(count):
        window = np.array([text[-model.config.n_positions :]])  # (1, T)
        with no_grad(), np.errstate(all="ignore"):
            logits = to_host(model(from_host(window)).data)[0, -1].astype(np.float64)  # (V,)
            likeliest = np.argsort(-logits, kind="stable")[:top_k]
            noise = temperature * random.gumbel(size=len(likeliest))  # with it, argmax draws from softmax(logits / X)
        if not np.isfinite(logits).all():
            raise UsageError("the model's logits are not finite: its training has diverged")
        text.append(int(likeliest[np.argmax(logits[likeliest] + noise)]))
    return text


def check_least(flag: str, number: float, least: int) -> None:
    """Raise UsageError for a number that is smaller than `least`, infinite or NaN."""
    if not least <= number <= sys.float_info.max:
        raise UsageError(f"{flag} {number}: expected a number of at least {least}")


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code: 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.generate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--from", dest="source", metavar="DIR", required=True, help="of --save or --export, or from Hugging Face")
    add("--prompt", metavar="TEXT", default="\n", help="the text to continue (default: a line break)")
    add("--tokens", type=int, default=200, help="bytes to add (default: 200)")
    likeliest = "divides the logits; 0: always the likeliest byte (default: 0.0)"
    add("--temperature", type=float, default=0.0, help=likeliest)
    add("--top-k", type=int, default=256, help="draw from the K likeliest bytes only (default: 256)")
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    try:
        given = parser.parse_args(argv)
        check_least("--tokens", given.tokens, 1)
        check_least("--temperature", given.temperature, 0)
        check_least("--top-k", given.top_k, 1)
        check_least("--seed", given.seed, 0)
        model = load(given.source)
        size = model.config.vocab_size
        if size != 256:
            but = f"the model has {size} tokens, but those of a text are the 256 bytes"
            raise UsageError(f"--from {given.source}: {but}")
        prompt = os.fsencode(given.prompt or "\n")
        text = bytes(generate(model, prompt, given.tokens, given.temperature, given.top_k, given.seed))
        lines = text.decode(errors="replace").split("\n")
        write_out("\n".join(map(printable, lines)) + "\n")
    except (UsageError, MemoryError) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
