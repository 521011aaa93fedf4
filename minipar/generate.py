"""Print a text and what a trained model adds, one byte after the other: `python -m minipar.generate --from DIR`."""

import os
import sys
from collections.abc import Sequence

import numpy as np

from minipar.autograd.tensor import no_grad
from minipar.backend import from_host, to_host
from minipar.cli import UsageParser, report
from minipar.errors import UsageError
from minipar.nn.gpt import LanguageModel
from minipar.nn.layers import generator
from minipar.train.flags import count
from minipar.train.pretrained import load_pretrained


def generate(
    model: LanguageModel, tokens: Sequence[int], length: int, temperature: float, seed: int
) -> list[int]:
    """Return `tokens` and the `length` tokens that follow. The model sees as many as it has positions."""
    random = generator(seed, "generate")
    text = list(tokens)
    for _ in range(length):
        window = np.array([text[-model.config.n_positions :]])  # (1, T)
        with no_grad():
            logits = to_host(model(from_host(window)).data)[0, -1].astype(np.float64)  # (V,)
        # With this noise, argmax draws from softmax(logits / temperature).
        text.append(int(np.argmax(logits + temperature * random.gumbel(size=len(logits)))))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 2 when the input is wrong, with one line."""
    parser = UsageParser(prog="python -m minipar.generate", description=__doc__)
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        metavar="DIR",
        required=True,
        help="a directory of --export, or from Hugging Face",
    )
    add("--prompt", metavar="TEXT", default="\n", help="the text to continue (default: a line break)")
    add("--tokens", type=count, default=200, help="bytes to add (default: 200)")
    add("--temperature", type=float, default=0.0, help="0: always the likeliest byte (default: 0.0)")
    add("--seed", type=int, default=0, help="decides the draws (default: 0)")
    try:
        args = parser.parse_args(argv)
        model = load_pretrained(args.source)
        size = model.config.vocab_size
        if size != 256:
            raise UsageError(f"--from {args.source}: its vocabulary has {size} tokens, not 256 bytes")
    except UsageError as error:
        return report(error)
    text = generate(model, os.fsencode(args.prompt), args.tokens, args.temperature, args.seed)
    print(bytes(text).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
