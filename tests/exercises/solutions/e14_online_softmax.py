import numpy as np


def online_attention(q, blocks):
    out = np.zeros_like(q)
    total = np.zeros((len(q), 1))
    top = np.full((len(q), 1), -np.inf)
    for k, v, allowed in blocks:
        scores = np.where(allowed, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
        new = np.maximum(top, scores.max(1, keepdims=True))
        unit = np.where(np.isfinite(new), new, 0)
        p = np.exp(scores - unit)
        scale = np.exp(top - unit)
        out = out * scale + p @ v
        total = total * scale + p.sum(1, keepdims=True)
        top = new
    return out / total, (top + np.log(total))[:, 0]
