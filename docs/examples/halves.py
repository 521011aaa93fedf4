"""A GPT cut into the two stages of pipeline.py and three_d.py."""

import minipar as mp


class First(mp.Module):
    """The embedding and the first half of the blocks."""

    def __init__(self, gpt, mesh):
        self.wte, self.wpe, self.embed = gpt.wte, gpt.wpe, gpt.embed
        self.h = gpt.h[: len(gpt.h) // 2]

    def forward(self, tokens):
        x = self.embed(tokens)  # (B, T, h)
        for block in self.h:
            x = block(x)
        return x


class Last(mp.Module):
    """The other blocks and the head, which is a copy of the token embedding: GPT-2 ties the two."""

    def __init__(self, gpt, mesh):
        self.h, self.ln_f = gpt.h[len(gpt.h) // 2 :], gpt.ln_f
        sizes = gpt.config.n_embd, gpt.config.vocab_size
        options = {"bias": False, "transposed": True, "dtype": gpt.dtype}
        self.head = mp.ColumnParallelLinear(*sizes, mesh.tp, name="head", **options)
        self.head.weight.data[...] = gpt.wte.weight.data  # (V/t, h)

    def loss_sum(self, x, y):
        for block in self.h:
            x = block(x)
        return mp.vocab_parallel_cross_entropy_sum(self.head(self.ln_f(x)), y, self.head.group)
