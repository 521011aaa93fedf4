"""Transformers' code that computes in float32 whatever the model's dtype, compiled again to compute in float64."""

import inspect
import re


def compute_in_float64(monkeypatch, module, *names: str) -> None:
    """Replace these classes and functions of a modeling module by the same code with float64 for float32."""
    for name in names:
        source = inspect.getsource(getattr(module, name))
        for single, double in (
            ("torch.float32", "torch.float64"),
            ("torch.float)", "torch.float64)"),
            (".float()", ".double()"),
        ):
            source = source.replace(single, double)
        assert "float32" not in source and "float()" not in source
        body = re.search("^(class|def) .*", source, re.MULTILINE | re.DOTALL)[0]
        body = body.replace("super().__init__()", "torch.nn.Module.__init__(self)")
        scope = dict(vars(module))
        exec(body, scope)
        monkeypatch.setattr(module, name, scope[name])
