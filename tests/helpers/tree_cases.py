"""A model whose sums can be trees on up to 8 ranks, and 76 layouts of it, on 2, 4 and 8 ranks."""

MODEL = "--hidden 32 --heads 8 --seq-len 16 --vocab-size 16 --layers 4 --global-batch 8 --reduction tree --steps 20"
UPDATE = "--clip-grad 0.5 --lr-schedule cosine --warmup-steps 5 --weight-decay 0.1"
MODELS = {
    "gpt2": "--dtype float32",
    "llama": "--model llama --kv-heads 8 --ffn 64 --dtype float32",
    "llama in float64": "--model llama --kv-heads 8 --ffn 48 --dtype float64",
    "gpt2 with dropout": "--dtype float64 --dropout 0.1",
}
SCHEDULES = ("1f1b", "zb-h1", "gpipe")
SIZES = [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 4, 1), (1, 4, 2), (2, 1, 4), (1, 2, 4)]
SIZES += [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


def tree_flags(model: str, layout: str) -> str:
    return f"{MODEL} {UPDATE} {MODELS[model]} {layout}"


def all_layouts() -> list[tuple[str, str]]:
    """Return (model, flags): each size with all ZeRO stages, schedules and both kinds of tensor parallelism in turn."""
    found = []
    for number, model in enumerate(MODELS):
        for place, (dp, tp, pp) in enumerate(SIZES, number):
            flags = f"--dp {dp} --tp {tp} --pp {pp}"
            if dp > 1:
                flags += f" --zero-stage {(place + 3) % 4}"
            if dp > 2 and place % 4 == 2:
                flags += " --zero-replicas 2"
            if tp > 1 and place % 2 == 0:
                flags += " --sequence-parallel"
            if pp > 1:
                flags += f" --schedule {SCHEDULES[place % 3]}"
            if pp == 8:
                flags += " --layers 8"
            if place % 5 == 0:
                flags += " --recompute full"
            if tp > 1:
                flags += " --dropout 0"  # which tensor parallelism does not go with
            found.append((model, flags))
    return found
