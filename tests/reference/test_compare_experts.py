"""Mistakes with experts, rotary positions and other precision, planted in a torch loop of Mixtral.

minipar has no experts yet. Both records are torch's, written with minipar/record.py; A's loop is right. The names in
brackets are the threads in which somebody reported such a mistake.
"""

import re

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from minipar.compare.differences import as_text, compare
from minipar.record import Record

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


class ExpertsTimesRanks(Loop):
    """Expert gradients are summed over the ranks and not divided (pytorch 160285)."""

    def after_backward(self):
        self.scale(4, "expert")


class ExpertsDividedTwice(Loop):
    """Expert gradients are divided by the ranks, though each expert has seen the tokens of all."""

    def after_backward(self):
        self.scale(1 / 4, "expert")


class RouterNotSummed(Loop):
    """The router has the gradient of one tensor-parallel rank's tokens (torchtitan 2387), here of two equal halves."""

    def after_backward(self):
        self.scale(1 / 2, "gate.weight")


class LossTimesRanks(Loop):
    """The loss is multiplied by the context-parallel ranks (Megatron-LM 906)."""

    def loss(self, step):
        return super().loss(step) * 2


class NormWithoutExperts(Loop):
    """The gradient's norm leaves the experts out (Megatron-LM pull request 5916)."""

    def norm(self):
        return torch.nn.utils.get_total_norm([p.grad for n, p in self.named.items() if "expert" not in n]).item()


class HeadUntied(Loop):
    """The gradient of the head is lost."""

    def after_backward(self):
        self.scale(0, "lm_head")


class KeysAndValuesShort(Loop):
    """The keys' and values' gradients lack the last hop of the ring (TransformerEngine 2484): one of two parts."""

    def after_backward(self):
        self.scale(1 / 2, "k_proj", "v_proj")


class StepNotSkipped(Loop):
    """The step is taken although another rank has seen an overflow (pytorch 115710): A skips it, see `SkipsAStep`."""


class SkipsAStep(Loop):
    """What is right for StepNotSkipped: step 1 is skipped."""

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


MISTAKES = {
    PositionsFromZero: ("gradient", None, "", "other data, masks or order"),
    NamesLocalToAStage: ("gradient", None, "blocks 0 to 1", "other data, masks or order"),
    ResumesWithoutMoments: ("update", None, "", "weight decay, betas, eps, clipping or optimizer state"),
    SumsInBf16: ("gradient", None, "", "other data, masks or order"),
    ExpertsTimesRanks: ("gradient", 4, "the experts", "4 = dp: "),
    ExpertsDividedTwice: ("gradient", 1 / 4, "the experts", "1/4 = 1/dp: "),
    RouterNotSummed: ("gradient", 1 / 2, "gate.weight of every block", "1/2 = 1/tp: "),
    LossTimesRanks: ("gradient", 2, "all parameters", "2 = tp: "),
    NormWithoutExperts: ("grad_norm", None, " in A, ", ""),
    HeadUntied: ("gradient", 0, "the head", "missing in B"),
    KeysAndValuesShort: (
        "gradient",
        1 / 2,
        "self_attn.k_proj.weight, self_attn.v_proj.weight of every",
        "1/2 = 1/tp: ",
    ),
    StepNotSkipped: ("update", float("inf"), "all parameters", "missing in A"),
    RotaryInterleaved: ("gradient", None, "", "other data, masks or order"),
    IdleExpertSkipsDecay: ("update", None, "expert", "weight decay, betas, eps"),
}


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_with_experts_is_named(kind, tmp_path):
    quantity, ratio, group, cause = MISTAKES[kind]
    (SkipsAStep if kind is StepNotSkipped else Loop)().train(tmp_path / "right")
    kind().train(tmp_path / "wrong")
    finding = compare(tmp_path / "right", tmp_path / "wrong")
    assert finding.step == (1 if kind in (StepNotSkipped, ResumesWithoutMoments) else 0), as_text(finding)
    found = finding.differences[0]
    if ratio is None and quantity != "grad_norm":  # a strip or two may have a factor by chance
        found = next(each for each in finding.differences if each.ratio is None)
    assert found.quantity == quantity and group in found.group, as_text(finding)
    if quantity != "grad_norm":
        assert found.ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-3)), as_text(finding)
    assert not cause or any(text.startswith(cause) for text in found.causes), as_text(finding)


def test_the_same_loop_twice_is_equal(tmp_path):
    for name in "ab":
        Loop().train(tmp_path / name)
    assert compare(tmp_path / "a", tmp_path / "b").equal
