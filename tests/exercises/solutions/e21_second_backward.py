def below(root):
    found, waiting = {root}, [root]
    while waiting:
        for tensor in waiting.pop().inputs:
            if tensor not in found:
                found.add(tensor)
                waiting.append(tensor)
    return sorted(found, key=lambda tensor: tensor.number, reverse=True)


def backward(root, gradient, retain_graph=False):
    tensors = below(root)
    if any(tensor.freed for tensor in tensors):
        raise ValueError("backward a second time through a freed graph: pass retain_graph=True to the first")
    for tensor in tensors:
        if tensor.inputs:
            tensor.grad = 0.0
    root.grad += gradient
    for tensor in tensors:
        for x, rule in zip(tensor.inputs, tensor.rules, strict=False):
            x.grad += rule(tensor.grad)
        if tensor.inputs and not retain_graph:
            tensor.free()
