def step(blocks, x, dy, k):
    inputs = []
    for number, block in enumerate(blocks):
        if number % k == 0:
            inputs.append(x)
        x = block.forward(x)
    for start in reversed(range(0, len(blocks), k)):
        segment = blocks[start : start + k]
        x = inputs.pop()
        saved = []
        for block in segment:
            x, what = block.forward_and_save(x)
            saved.append(what)
        for block in reversed(segment):
            dy = block.backward(saved.pop(), dy)
    return dy


def best_segment(L, n, s):
    best = {}
    for k in range(1, L + 1):
        last = (L - 1) // k
        blocks = L - last * k
        best[k] = max((last + 2) * n + blocks * s, (last + 1) * n + k * s if last else 0)
    return min(best, key=best.get)
