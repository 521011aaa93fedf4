"""Mistakes of readers: each is a change of the reference solution's text, and has a hint that names it."""

from typing import NamedTuple


class Mistake(NamedTuple):
    exercise: str
    old: str
    new: str
    hint: str


MISTAKES = [
    Mistake("e01", "left, right = (comm.rank - 1)", "left, right = (comm.rank - 0)", "no partner"),
    Mistake("e01", "return total", "return total.copy() if comm.size == 1 else arriving", "add your own elements"),
    Mistake("e01", "arriving + x[start:stop]", "x[start:stop].copy()", "that arrives for this chunk is not in it"),
    Mistake(
        "e01", "sending = comm.isend(total, right)", "sending = comm.isend(total, right); sending.wait()", "before"
    ),
    Mistake(
        "e01", "total = x[slice(*bounds[left])].copy()", "total = x[slice(*bounds[left])]; x += 0.0 * x + 1e-3", "x has"
    ),
    Mistake(
        "e02",
        "result[slice(*bounds[comm.rank])] = chunk",
        "bounds = bounds[-comm.rank:] + bounds[:-comm.rank]; result[slice(*bounds[comm.rank])] = chunk",
        "order of their arrival",
    ),
    Mistake("e02", ".reshape(x.shape)", "", "the shape of x is lost"),
    Mistake(
        "e02",
        'chunk = comm.reduce_scatter(x.reshape(-1), algorithm="ring")',
        "p, r = comm.size, comm.rank; every = all_gather(comm, x.reshape(-1), x.size * p).reshape(p, *x.shape); "
        "return sum(every[(r + k) % p] for k in range(p))",
        "starts at your own rank",
    ),
    Mistake(
        "e02",
        'chunk = comm.reduce_scatter(x.reshape(-1), algorithm="ring")',
        "return all_gather(comm, x.reshape(-1), x.size * comm.size).reshape(comm.size, *x.shape).sum(0)",
        "never an array that still has to be added up",
    ),
    Mistake(
        "e03",
        "power = 1 << (comm.size.bit_length() - 1)",
        "power = 1 << (comm.size - 1).bit_length()",
        "powers of two only",
    ),
    Mistake("e03", "comm.rank ^ distance", "(comm.rank + distance) % comm.size", "partners must name each other"),
    Mistake(
        "e03",
        "comm.irecv(total, comm.rank - power).wait()",
        "comm.irecv(arriving, comm.rank - power).wait()",
        "left over must receive",
    ),
    Mistake("e03", "        total += arriving\n", "", "not counted"),
    Mistake(
        "e03", "comm.isend(total, comm.rank ^ distance)", "comm.isend(x, comm.rank ^ distance)", "send the running sum"
    ),
    Mistake("e04", "if self.missing == 0:", "if self.missing == len(self.views) - 1:", "count the calls of ready"),
    Mistake(
        "e04",
        "self.comm.all_reduce(self.buffer, async_op=True)",
        "self.comm.all_reduce(self.buffer)",
        "start it with async_op=True",
    ),
    Mistake("e04", "view / self.comm.size", "view.copy()", "their mean is asked for"),
    Mistake("e04", "        self.missing = len(self.views)\n", "", "start anew"),
    Mistake(
        "e04",
        "        self.missing -= 1\n",
        "        self.missing -= 1\n        self.comm.all_reduce(self.views[parameter], async_op=True)\n",
        "one by one",
    ),
    Mistake(
        "e05",
        "return total / count",
        "return comm.all_reduce(gradients.sum(0) / max(tokens.sum(), 1)) / comm.size",
        "ranks' means",
    ),
    Mistake(
        "e05",
        "total = comm.all_reduce(gradients.sum(0))",
        "return comm.all_reduce((gradients / np.maximum(tokens, 1)[:, None]).mean(0)) / comm.size",
        "microbatches' means",
    ),
    Mistake(
        "e05", "return total / count", "return comm.all_reduce(gradients.sum(0) / tokens.sum()) / comm.size", "NaN"
    ),
    Mistake(
        "e04",
        "self.comm.all_reduce(self.buffer, async_op=True)",
        "self.comm.all_reduce(self.buffer, async_op=True); self.work.wait()",
        "ready waits for the all-reduce; wait in `wait`",
    ),
    Mistake("e04", "view / self.comm.size", "view / self.comm.size**2", "twice"),
    Mistake("e01", "        sending.wait()\n", "", "never waited for"),
    Mistake(
        "e03",
        "        sending.wait()\n        total = total + arriving\n",
        "        total += arriving\n        sending.wait()\n",
        "changed while it was being sent",
    ),
    Mistake("e05", "return total / count", "return total / count / comm.size", "once more"),
    Mistake("e05", "return total / count", "return total", "gradient of the sum"),
    Mistake("e05", "np.array([float(tokens.sum())])", "tokens.sum()", "it takes an array"),
    Mistake("e05", "return total / count", "return total / max(tokens.sum(), 1)", "divided by this rank's tokens"),
    Mistake("e06", " / self.comm.size", "", "summed over the ranks, not averaged"),
    Mistake(
        "e06",
        "        self.comm.all_gather(self.parameters[self.own], out=self.parameters)\n",
        "",
        "after the update, gather",
    ),
    Mistake(
        "e06",
        "adam_step(self.parameters[self.own], chunk, self.state)",
        "adam_step(self.parameters[self.own], chunk, AdamState(chunk.size))",
        "state is new in every step",
    ),
    Mistake(
        "e06",
        "self.comm.reduce_scatter(gradient)",
        "self.comm.all_reduce(gradient)[self.own]",
        "an all-reduce of the gradient is too much",
    ),
    Mistake(
        "e06",
        "        chunk = ",
        "        if self.state.steps == 0:\n            self.state = AdamState(gradient.size)\n"
        "        adam_step(self.parameters, self.comm.all_reduce(gradient) / self.comm.size, self.state)\n"
        "        return\n        chunk = ",
        "keep the state of your chunk",
    ),
    Mistake(
        "e07",
        "        del weight\n    g, result",
        "        comm.kept = [*getattr(comm, 'kept', ()), weight]\n    g, result",
        "keep none for backward",
    ),
    Mistake(
        "e07",
        "comm.reduce_scatter((inputs[layer].T @ u).reshape(-1))",
        "np.array_split(comm.all_reduce((inputs[layer].T @ u).reshape(-1)), comm.size)[comm.rank]",
        "all-reduce gives every rank",
    ),
    Mistake(
        "e07",
        "comm.reduce_scatter((inputs[layer].T @ u).reshape(-1))",
        "np.array_split((inputs[layer].T @ u).reshape(-1), comm.size)[comm.rank]",
        "sum it over the ranks",
    ),
    Mistake("e07", "return result[::-1]", "return result", "gradient of another layer"),
    Mistake("e08", "y = comm.all_reduce(z @ D) + e", "y = comm.all_reduce(z @ D + e)", "counts t times: add it after"),
    Mistake("e08", "dx = comm.all_reduce(dinner @ A.T)", "dx = dinner @ A.T", "all column blocks must be summed"),
    Mistake(
        "e08",
        "    comm, x, A, D, z = saved\n",
        "    comm, x, A, D, z = saved\n    dy = comm.all_reduce(dy)\n",
        "the backward of the all-reduce is the identity",
    ),
    Mistake(
        "e08", "z = np.maximum(inner, 0)", "z = np.maximum(inner, 0); comm.all_gather(z)", "nothing is sent between"
    ),
    Mistake("e08", "dinner = (dy @ D.T) * (z > 0)", "dinner = dy @ D.T", "slope of relu"),
    Mistake(
        "e09",
        "own[rows] = logits[rows, local[rows]]",
        "own[rows] = logits[rows, local[rows]]; own = comm.all_reduce(own)",
        "t times",
    ),
    Mistake("e10", "warm_up = min(m, p - rank - 1)", "lists.append('F0 B0'); continue", "expected a list"),
    Mistake("e10", "for i in range(warm_up)]", "for i in range(p - rank - 1)]", "is no action"),
    Mistake("e09", 'comm.all_reduce(logits.max(1), op="max")', "np.zeros(len(logits))", "overflow"),
    Mistake("e09", 'comm.all_reduce(logits.max(1), op="max")', "logits.max(1)", "its own maximum"),
    Mistake("e09", "np.flatnonzero((local >= 0) & (local < width))", "np.flatnonzero(local < width)", "negative index"),
    Mistake("e09", "- comm.all_reduce(own)", "- own", "0 where it is elsewhere"),
    Mistake("e10", "min(m, p - rank - 1)", "min(m, p - rank)", "p - r - 1 forwards"),
    Mistake("e10", "warm_up = min(m, p - rank - 1)", "warm_up = m", "as in GPipe"),
    Mistake("e10", "min(m, p - rank - 1)", "0", "the last rank waits for work"),
    Mistake("e10", "range(m - warm_up, m)]", "range(m - warm_up, m - 1)]", "never runs"),
    Mistake("e11", "inputs - weights > rank", "inputs > weights", "right behind its I"),
    Mistake("e11", "warm_up = min(m, p - rank)", "warm_up = min(m, 2 * (p - rank) - 1)", "alive"),
    Mistake(
        "e11",
        'actions.append(f"W{weights}")',
        'actions.insert(len(actions) - 1, f"W{weights}")',
        "which makes what it needs",
    ),
    Mistake("e12", "first = gradient.divided or mesh.tp.rank == 0", "first = True", "all t ranks of tp"),
    Mistake("e12", "(not gradient.tied or mesh.pp.rank == 0)", "True", "on the first and on the last stage"),
    Mistake(
        "e12",
        "    mesh.pp.all_reduce(total)\n",
        "    mesh.pp.all_reduce(total)\n    mesh.dp.all_reduce(total)\n",
        "do not sum over dp",
    ),
    Mistake("e12", "return sqrt(total[0])", "return float(total[0])", "square root"),
    Mistake("e13", "    if s.zero >= 2:", "    if s.zero >= 1:", "stage 2"),
    Mistake("e13", "min(s.m, s.p)", "s.m", "not m"),
    Mistake("e13", "min(s.m, s.p)", "s.p", "not p"),
    Mistake("e13", "s.h * s.t)", "s.h)", "divided by t too"),
    Mistake("e14", "out = out * scale + p @ v", "out = out + p @ v", "wrong value"),
    Mistake(
        "e14",
        "scale = np.exp(top - unit)",
        "scale = np.exp(0 * unit); unit = scores.max(1, keepdims=True); unit[np.isinf(unit)] = 0; "
        "p = np.exp(scores - unit)",
        "scale the sums so far",
    ),
    Mistake("e14", "np.where(np.isfinite(new), new, 0)", "new", "no key of a block"),
    Mistake("e14", "np.maximum(top, scores.max(1, keepdims=True))", "np.zeros_like(top)", "overflows"),
    Mistake("e14", "in blocks:", "in list(blocks):", "before you ask for the next"),
    Mistake("e14", "(top + np.log(total))[:, 0]", "np.log(total)[:, 0]", "the maximum is missing"),
    Mistake("e14", " / np.sqrt(q.shape[1])", "", "square root of the width"),
    Mistake("e14", "np.where(allowed, q @ k.T / np.sqrt(q.shape[1]), -np.inf)", "q @ k.T / 2.0", "not allowed count"),
    Mistake("e15", "        if comm.size > 1:\n", "        if step < comm.size - 1:\n", "one hop more, home"),
    Mistake("e15", "        if step < comm.size - 1:\n", "        if step < comm.size - 2:\n", "pass them on between"),
    Mistake("e15", "        dkv += of_kv\n", "        dkv = of_kv\n", "add to what arrives"),
    Mistake("e15", "            dkv = to_the_right(comm, dkv)\n", "            pass\n", "belong to the owners"),
    Mistake("e15", "        if comm.size > 1:\n", "        if True:\n", "one rank sends nothing"),
    Mistake("e15", "        dq += of_q\n", "        dq = of_q if step == 0 else dq\n", "with every owner's keys"),
    Mistake("e15", "        if step < comm.size - 1:\n", "        if comm.size > 1:\n", "kv makes c - 1 hops"),
    Mistake(
        "e16", "tokens[positions + 1], positions", "tokens[positions + 1], np.arange(length // c)", "from 0 on this"
    ),
    Mistake("e16", "[[r, 2 * c - 1 - r]]", "[[2 * r, 2 * r + 1]]", "contiguous order"),
    Mistake("e16", "[[r, 2 * c - 1 - r]]", "[[2 * c - 1 - r, r]]", "late chunk comes first"),
    Mistake("e16", "tokens[positions + 1]", "np.roll(tokens[positions], -1)", "shift first, then cut"),
    Mistake("e16", "if length % (2 * c):", "length -= length % (2 * c)\n    if length < 0:", "raise a ValueError"),
    Mistake(
        "e16",
        "return sums[0] / sums[1], sums[2:] / sums[1]",
        "return comm.size * sums[0] / sums[1], comm.size * sums[2:] / sums[1]",
        "times too large",
    ),
    Mistake(
        "e16",
        "    sums = comm.all_reduce(np.concatenate([[loss_sum, count], gradient]))\n",
        "    sums = comm.all_reduce(np.concatenate([[loss_sum, 1], gradient]) / max(count, 1)); sums[1] = 1\n",
        "sum of the ranks' means",
    ),
    Mistake("e17", "result[order] = back", "result[...] = back", "put each result back"),
    Mistake(
        "e17",
        "by_expert = np.argsort(expert",
        "by_expert = np.arange(len(expert)); np.argsort(expert",
        "of other experts",
    ),
    Mistake(
        "e17",
        'order = np.argsort(experts, kind="stable")',
        "order = np.lexsort((-np.arange(len(experts)), experts))",
        "kind='stable'",
    ),
    Mistake("e17", "rows[order], counts", "rows, counts", "sort them by expert before you send"),
    Mistake(
        "e17",
        "leaving, arriving = counts.reshape(ranks, -1).sum(1) * width, here.sum(1) * width",
        "leaving, arriving = counts.reshape(ranks, -1).sum(1), here.sum(1)",
        "expected one for each rank",
    ),
    Mistake("e17", "counts=(arriving, leaving)", "counts=(leaving, arriving)", "with 2 ranks"),
    Mistake("e17", "here.sum(0))", "counts.reshape(ranks, -1)[comm.rank])", "add those of all source ranks"),
    Mistake("e17", "here.sum(0))", "here)", "one for each of this rank's experts"),
    Mistake(
        "e17",
        "    here = comm.all_to_all(counts)",
        "    comm.all_gather(np.zeros(4))\n    here = comm.all_to_all(counts)",
        "elements were sent, expected",
    ),
    Mistake("e18", "mesh.edp.all_reduce(experts)", "mesh.ep.size * mesh.edp.all_reduce(experts)", "times too large"),
    Mistake(
        "e18", "mesh.edp.all_reduce(experts)", "1 / mesh.ep.size * mesh.edp.all_reduce(experts)", "times too small"
    ),
    Mistake("e18", "mesh.edp.all_reduce(experts)", "experts", "other ranks hold the same experts"),
    Mistake("e18", "mesh.edp.all_reduce(experts)", "mesh.dp.all_reduce(experts)", "experts that are not the same"),
    Mistake(
        "e18", "mesh.ep.all_reduce(np.array([(experts**2).sum()]))[0]", "(experts**2).sum()", "are missing: sum their"
    ),
    Mistake("e18", "mesh.ep.all_reduce(np.array([(experts**2).sum()]))[0]", "0.0", "the experts are missing"),
    Mistake(
        "e18", "mesh.ep.all_reduce(np.array([(experts", "mesh.dp.all_reduce(np.array([(experts", "counts d/P times"
    ),
    Mistake(
        "e18",
        "mesh.ep.all_reduce(np.array([(experts**2).sum()]))[0]",
        "mesh.ep.all_reduce(np.array([(experts**2).sum() + (shared**2).sum()]))[0] - (shared**2).sum()",
        "count more than once",
    ),
    Mistake("e18", "mesh.dp.all_reduce(shared) / count", "shared / count", "sum it over all ranks of dp"),
    Mistake(
        "e18", "mesh.dp.all_reduce(shared) / count", "mesh.dp.all_reduce(shared) / count / mesh.dp.size", "once more"
    ),
    Mistake(
        "e19",
        'comm.all_reduce(np.array([float(not np.isfinite(total).all())]), op="max")[0]',
        "not np.isfinite(total).all()",
        "all must agree before one steps",
    ),
    Mistake("e19", "    if overflow:", "    if False:", "this rank has it in its chunk of the sum, and updated"),
    Mistake("e19", "gradient.astype(np.float32)", "gradient", "float16 has no room for it"),
    Mistake(
        "e19",
        "comm.reduce_scatter(gradient.astype(np.float32))",
        "comm.reduce_scatter(gradient).astype(np.float32)",
        "in float32 the sum over the ranks is finite",
    ),
    Mistake("e19", "lr * total / scale", "lr * total", "still in the gradient"),
    Mistake(
        "e19",
        "comm.reduce_scatter(gradient.astype(np.float32))",
        "np.array_split(gradient.astype(np.float32), comm.size)[comm.rank]",
        "add up those of all ranks",
    ),
    Mistake("e19", "scale / 2, 0", "scale, 0", "a skipped step halves the scale"),
    Mistake("e19", "good == 2000", "good > 2000", "not before and not after"),
    Mistake("e19", "(master, 2 * scale, 0)", "(master, 2 * scale, good)", "starts again at 0"),
    Mistake("e20", '(0, "gradient", 4)', '(0, "gradient", 3)', "which size of the layout is it"),
    Mistake("e20", '(1, "gradient", 6)', '(0, "gradient", 6)', "compare counts steps from 0"),
    Mistake("e20", '(1, "gradient", 6)', '(1, "gradient", 7)', "what does a step keep"),
    Mistake("e20", '(0, "update", 8)', '(0, "gradient", 8)', "read compare's second line"),
    Mistake("e20", '(0, "update", 8)', '(0, "update", 9)', "which parameters are those"),
    Mistake("e20", ', "3": (0, "update", 8)', "", "run 3 has no answer"),
    Mistake("e21", "            tensor.grad = 0.0", "            pass", "sent it again"),
    Mistake(
        "e21",
        "        if tensor.inputs:\n            tensor.grad",
        "        if True:\n            tensor.grad",
        "leaves must",
    ),
    Mistake("e21", " and not retain_graph", "", "must free nothing"),
    Mistake("e21", "            tensor.free()", "            pass", "is not freed"),
    Mistake("e21", "        if tensor.inputs and not retain_graph", "        if not retain_graph", "a leaf is freed"),
    Mistake("e21", "any(tensor.freed for tensor in tensors)", "root.freed", "Ask every tensor"),
    Mistake("e21", "any(tensor.freed for tensor in tensors)", "False", "was accepted"),
    Mistake("e21", ", reverse=True", "", "when all of its users have sent"),
    Mistake(
        "e21",
        "tensor.freed for tensor",
        "tensor.freed and not setattr(tensors[-1], 'grad', 0.5) for tensor",
        "look for freed tensors before",
    ),
    Mistake("e21", "    root.grad += gradient", "    root.grad = gradient", "leaves add up"),
    Mistake("e22", "in reversed(segment)", "in segment", "backward take the last block first"),
    Mistake(
        "e22",
        "        x = block.forward(x)",
        "        x = block.forward(x)\n        kept = [*locals().get('kept', ()), x]",
        "no result between them",
    ),
    Mistake(
        "e22",
        "        x = block.forward(x)",
        "        x, what = block.forward_and_save(x)\n        kept = [*locals().get('kept', ()), what]",
        "the first forward must save nothing",
    ),
    Mistake(
        "e22",
        "        x = inputs.pop()",
        "        x = inputs[0]\n        for block in blocks[:start]:\n            x = block.forward(x)",
        "at most 2 are needed",
    ),
    Mistake("e22", "    return dy", "    return x", "what the first block returns"),
    Mistake("e22", "range(1, L + 1)", "range(L, 0, -1)", "Of several take the smallest"),
    Mistake("e22", "return min(best, key=best.get)", "return max(1, round((L * n / s) ** 0.5))", "may be shorter"),
    Mistake("e22", "return min(best, key=best.get)", "return (L * n / s) ** 0.5", "is no whole number"),
    Mistake("e23", "if self.left[name] == 0:", "if True:", "and contributions are missing: {'shared': 1"),
    Mistake("e23", "class Mended(Early):", "Mended = Early\n\n\nclass Other(Early):", "contributions are missing"),
    Mistake("e23", " if uses[name]}", "}", "Is a parameter without uses waited for"),
    Mistake("e23", "        self.send_complete()\n\n    def", "\n    def", "Does a bucket leave in the call"),
    Mistake("e23", "self.views[name] += gradient", "self.views[name][...] = gradient", "this is the last alone"),
    Mistake(
        "e23",
        "            self.missing[self.bucket_of[name]].discard(name)\n",
        "            self.missing[self.bucket_of[name]].discard(name)\n"
        "            if not self.missing[self.bucket_of[name]] and self.bucket_of[name] > len(self.under_way):\n"
        "                self.comm.all_reduce(self.flat[self.bucket_of[name]], async_op=True)\n",
        "leave in this order",
    ),
    Mistake("e23", "log[place:]", "log[place + 2 :]", "a contribution to one of its own parameters"),
    Mistake("e23", "return bucket, name", "return name", "first_early of"),
    Mistake("e24", "    between.all_reduce(gradient)\n", "", "sum the chunks between hosts"),
    Mistake("e24", "inside.size * between.size", "1", "the mean is asked for"),
    Mistake("e24", "inside.size * between.size", "inside.size", "not by those of a host"),
    Mistake("e24", "inside.size * between.size", "between.size", "not by the hosts"),
    Mistake(
        "e24",
        "inside.all_reduce(np.array([(gradient**2).sum()]))",
        "between.all_reduce(inside.all_reduce(np.array([(gradient**2).sum()])))",
        "each element q times",
    ),
    Mistake(
        "e24",
        "inside.all_reduce(np.array([(gradient**2).sum()]))",
        "np.array([(gradient**2).sum()])",
        "that of all n elements",
    ),
    Mistake("e24", "    if norm > limit:", "    if True:", "shorter than the limit"),
    Mistake("e24", "    parameters -= ", "    parameters = parameters - ", "in place"),
    Mistake(
        "e24",
        "inside.reduce_scatter(gradient_of(whole))",
        "np.array_split(inside.all_reduce(gradient_of(whole)), inside.size)[inside.rank].copy()",
        "reduce-scatter the gradient",
    ),
    Mistake(
        "e24",
        "gradient = inside.reduce_scatter(gradient_of(whole))\n    between.all_reduce(gradient)",
        "gradient = inside.reduce_scatter(between.all_reduce(gradient_of(whole)))",
        "all-reduce the chunk that the reduce-scatter left",
    ),
]
