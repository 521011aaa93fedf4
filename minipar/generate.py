"""Print a text and what a trained model adds.

The left end of a text longer than the model's positions is cut off.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from minipar.autograd import no_grad
from minipar.backend import from_host, to_host
from minipar.cli import UsageParser, report, write_out
from minipar.comm.threads import serial
from minipar.errors import UsageError, printable
from minipar.nn.layers import generator
from minipar.nn.pretrained import load_pretrained
from minipar.train.config import parse
from minipar.train.from_config import make_model
from minipar.train.resume import check_checkpoint, continued, find_checkpoint

NUMBERS: dict[str, tuple[Any, int, str]] = {  # default, least, help
    "--tokens": (200, 1, "bytes to add"),
    "--temperature": (0.0, 0, "divides the logits; 0: always the likeliest byte"),
    "--top-k": (256, 1, "draw from the K likeliest bytes only"),
    "--seed": (0, 0, "of the draws"),
}


def load(directory: str) -> Any:
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


def generate(model: Any, tokens: Sequence[int], count: int, temperature: float, top_k: int, seed: int) -> list[int]:
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


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code: 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--from", metavar="DIR", required=True, help="of --save or --export, or from Hugging Face")
    parser.add_argument("--prompt", metavar="TEXT", default="\n", help="the text to continue (default: a line break)")
    for flag, (default, _, text) in NUMBERS.items():
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default: {default})")
    try:
        source, prompt, *numbers = vars(parser.parse_args(argv)).values()
        for (flag, (_, least, _)), number in zip(NUMBERS.items(), numbers, strict=True):
            if not least <= number <= sys.float_info.max:
                raise UsageError(f"{flag} {number}: expected a number of at least {least}")
        model = load(source)
        if (size := model.config.vocab_size) != 256:
            raise UsageError(f"--from {source}: the model has {size} tokens, but those of a text are the 256 bytes")
        text = bytes(generate(model, os.fsencode(prompt or "\n"), *numbers)).decode(errors="replace")
        write_out("\n".join(map(printable, text.split("\n"))) + "\n")
    except (UsageError, MemoryError) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
