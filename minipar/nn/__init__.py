"""The serial model: modules, GPT-2, Llama, Mixtral, optimizers. Nothing here depends on the number of ranks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "gpt": ["GPT", "GPTConfig"],
        "layers": ["Dropout", "DropoutKeys", "Embedding", "LayerNorm", "Linear", "MaskSlice", "RMSNorm", "dropping"],
        "llama": ["Llama", "LlamaConfig"],
        "module": ["Module", "Owner", "Parameter", "Part", "placeholder"],
        "moe": ["Mixtral", "MixtralConfig", "MoE"],
        "optim": ["SGD", "AdamW", "Optimizer", "clip_grad_norm", "learning_rate", "squared_norm"],
    },
)
