"""Mistakes with experts, rotary positions and other precision, planted in a torch loop of Mixtral.

Both records are torch's, written with minipar/compare/record.py; A's loop is right. The names in brackets are the
threads in which somebody reported such a mistake.
"""

import re
from functools import partial

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from minipar.compare.differences import as_text, compare
from minipar.compare.record import Record

VOCAB, LENGTH, BATCH, STEPS, LR = 32, 8, 8, 2, 1e-2
FACTS = {"dtype": "float32", "dp": 4, "tp": 2, "tokens": BATCH * LENGTH}
TORCH = torch.float32  # transformers multiplies the experts with a kernel that has no float64


class Loop:
    """A training loop, with a method for each place in which somebody made a mistake."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        config = MixtralConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config).to(TORCH)
        self.named = dict(self.model.named_parameters())
        tokens = torch.randint(0, VOCAB, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2))
        self.inputs, self.targets = tokens[..., :-1], tokens[..., 1:]

    def train(self, directory) -> None:
        decays = [p for p in self.named.values() if p.ndim >= 2]
        others = [p for p in self.named.values() if p.ndim < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR)
        record = Record(directory, self.arrays(lambda p: p), **FACTS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self.loss(step)
            self.backward(loss)
            self.after_backward()
            gradients, norm = self.arrays(lambda p: p.grad), self.norm()
            self.update(optimizer, step)
            record.step(step, loss.item(), norm, gradients, self.arrays(lambda p: p))

    def arrays(self, what):
        return {name: what(p).detach().numpy().copy() for name, p in self.named.items()}

    def loss(self, step):
        logits = self.model(self.inputs[step]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.targets[step].flatten())

    def backward(self, loss) -> None:
        loss.backward()

    def after_backward(self) -> None:
        pass

    def norm(self) -> float:
        return torch.nn.utils.get_total_norm([p.grad for p in self.named.values()]).item()

    def update(self, optimizer, step) -> None:
        optimizer.step()

    def scale(self, factor: float, *patterns: str) -> None:
        for name, p in self.named.items():
            if any(pattern in name for pattern in patterns):
                p.grad *= factor


class Scaled(Loop):
    """The gradients of some parameters are multiplied."""

    def __init__(self, factor, *patterns):
        super().__init__()
        self.factor, self.patterns = factor, patterns

    def after_backward(self):
        self.scale(self.factor, *self.patterns)


class LossTimesRanks(Loop):
    """The loss is multiplied by the context-parallel ranks (Megatron-LM 906)."""

    def loss(self, step):
        return super().loss(step) * 2


class NormWithoutExperts(Loop):
    """The gradient's norm leaves the experts out (Megatron-LM pull request 5916)."""

    def norm(self):
        return torch.nn.utils.get_total_norm([p.grad for n, p in self.named.items() if "expert" not in n]).item()


class SkipsAStep(Loop):
    """Step 1 is skipped, since another rank has seen an overflow; the wrong loop takes it (pytorch 115710)."""

    def update(self, optimizer, step):
        if step != 1:
            super().update(optimizer, step)


class RotaryInterleaved(Loop):
    """The rotary pairs are neighbours instead of halves (torchtitan 335): the rows of q and k are in another order."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for name, p in self.named.items():
                if "q_proj" in name or "k_proj" in name:
                    p.copy_(p.unflatten(0, (-1, 2, 2)).transpose(1, 2).flatten(0, 2))


class IdleExpertSkipsDecay(Loop):
    """An expert without tokens keeps no gradient and skips its weight decay; here one layer's experts."""

    def update(self, optimizer, step):
        before = {n: p.detach().clone() for n, p in self.named.items() if "layers.1." in n and "expert" in n}
        super().update(optimizer, step)
        with torch.no_grad():
            for name, values in before.items():
                self.named[name] += LR * 0.1 * values


class PositionsFromZero(Loop):
    """A context-parallel rank counts the positions of its half of the sequence from 0."""

    def loss(self, step):
        positions = torch.arange(LENGTH).remainder(LENGTH // 2).expand(BATCH, LENGTH)
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        logits = self.model(self.inputs[step], attention_mask=mask, position_ids=positions).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.targets[step].flatten())


class NamesLocalToAStage(Loop):
    """A pipeline stage calls its first layer 0 (Megatron-LM 7452): what is recorded as layer 0 is layer 1."""

    def arrays(self, what):
        other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        found = super().arrays(what)
        return {re.sub(r"layers\.\d\.", lambda match: other[match[0]], name): found[name] for name in found}


class ResumesWithoutMoments(Loop):
    """A run that is resumed in another layout loses the optimizer's state (nanotron 221)."""

    def update(self, optimizer, step):
        if step == 1:
            optimizer.state.clear()
        super().update(optimizer, step)


class SumsInBf16(Loop):
    """Gradients are summed in bf16 although float32 was asked for (pytorch 190626)."""

    def after_backward(self):
        for p in self.named.values():
            p.grad.copy_(p.grad.bfloat16())


MISTAKES = {  # the loop; and the step, the quantity, the factor, the parameters and the cause that are named
    "positions from 0": (PositionsFromZero, 0, "gradient", None, "", "other data, masks or order"),
    "names local to a stage": (NamesLocalToAStage, 0, "gradient", None, "blocks 0 to 1", "other data, masks or order"),
    "resumed without moments": (ResumesWithoutMoments, 1, "update", None, "", "weight decay, betas, eps"),
    "sums in bf16": (SumsInBf16, 0, "gradient", None, "", "other data, masks or order"),
    "the loss times ranks": (LossTimesRanks, 0, "gradient", 2, "all parameters", "2 = tp: "),
    "a norm without experts": (NormWithoutExperts, 0, "grad_norm", None, " in A, ", ""),
    "a step that is not skipped": (Loop, 1, "update", float("inf"), "all parameters", "missing in A"),
    "rotary pairs of neighbours": (RotaryInterleaved, 0, "gradient", None, "", "other data, masks or order"),
    "idle experts skip the decay": (IdleExpertSkipsDecay, 0, "update", None, "expert", "weight decay, betas, eps"),
    # Expert gradients are summed over the ranks and not divided (pytorch 160285).
    "experts times ranks": (partial(Scaled, 4, "expert"), 0, "gradient", 4, "the experts", "4 = dp: "),
    # Expert gradients are divided by the ranks, though each expert has seen the tokens of all.
    "experts divided twice": (partial(Scaled, 1 / 4, "expert"), 0, "gradient", 1 / 4, "the experts", "1/4 = 1/dp: "),
    # The router has the gradient of one tensor-parallel rank's tokens (torchtitan 2387), here of two equal halves.
    "router not summed": (partial(Scaled, 1 / 2, "gate.weight"), 0, "gradient", 1 / 2, "gate.weight", "1/2 = 1/tp: "),
    "head untied": (partial(Scaled, 0, "lm_head"), 0, "gradient", 0, "the head", "missing in B"),
    # They lack the last hop of the ring (TransformerEngine 2484): one of two parts.
    "keys and values short": (
        partial(Scaled, 1 / 2, "k_proj", "v_proj"), 0, "gradient", 1 / 2, "k_proj.weight, self_attn.v_proj.weight of",
        "1/2 = 1/tp: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_with_experts_is_named(name, tmp_path):
    loop, step, quantity, ratio, group, cause = MISTAKES[name]
    right = SkipsAStep if loop is Loop else Loop
    right().train(tmp_path / "right")
    loop().train(tmp_path / "wrong")
    finding = compare(tmp_path / "right", tmp_path / "wrong")
    assert finding.step == step, as_text(finding)
    found = finding.differences[0]
    if ratio is None and quantity != "grad_norm":  # a strip or two may have a factor by chance
        found = next(each for each in finding.differences if each.ratio is None)
    assert found.quantity == quantity and group in found.group, as_text(finding)
    if quantity != "grad_norm":
        assert found.ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-3)), as_text(finding)
    assert not cause or any(text.startswith(cause) for text in found.causes), as_text(finding)
