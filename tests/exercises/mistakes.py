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
        "counts of ",
    ),
    Mistake("e17", "counts=(arriving, leaving)", "counts=(leaving, arriving)", ", all_to_all: counts"),
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
        "neither between them nor the last",
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
    Mistake(
        "e24",
        "inside.all_reduce(np.array([(gradient**2).sum()]))",
        "between.all_reduce(np.array([(gradient**2).sum()]))",
        "squares of the chunks inside the host",
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
    Mistake("e25", "range(of_q[0] * G // a, of_q[-1] * G // a + 1)", "range(r * G // t, (r + 1) * G // t)", "no head"),
    Mistake(
        "e25",
        "range(of_q[0] * G // a, of_q[-1] * G // a + 1)",
        "range(r % G, r % G + max(1, G // t))",
        "head i reads i G // a",
    ),
    Mistake("e25", "    if copies > 1:", "    if False:", "sum the copies' gradients"),
    Mistake(
        "e25",
        "sharers.all_reduce(np.concatenate([dk, dv])), 2)",
        "comm.all_reduce(np.concatenate([dk, dv])), 2)",
        "heads that are not the same",
    ),
    Mistake(
        "e25",
        "sharers.all_reduce(np.concatenate([dk, dv])), 2)",
        "sharers.all_reduce(np.concatenate([dk, dv])) / copies, 2)",
        "do not average",
    ),
    Mistake(
        "e25", "    return dq, dk, dv", "    return comm.all_reduce(dq), dk, dv", "no other rank has these columns"
    ),
    Mistake(
        "e25",
        "    return dq, dk, dv",
        "    comm.all_reduce(np.zeros(4))\n    return dq, dk, dv",
        "about that head alone",
    ),
    Mistake("e24", "    parameters -= 0.1 * velocity\n", "", "1 host of 1, rank 0, step 0"),
    Mistake("e29", "return 1 + (p - 1)", "return 2 + (p - 1)", "with 1 stage:"),
    Mistake("e25", "float(np.sqrt(comm", "float(0.5 + np.sqrt(comm", "a 8, G 4, 1 rank: the norm"),
    Mistake("e25", " / copies", "", "must count once"),
    Mistake("e25", "return dq, dk", "return sharers.all_reduce(dq), dk", "only k and v are copied"),
    Mistake("e25", "comm.all_reduce(np.array([squares]))[0]", "squares", "sum the squares over all ranks"),
    Mistake("e25", "np.array([squares]))[0]", "np.array([squares, 0.0]))[0]", "one all-reduce of one value"),
    Mistake("e27", "return min(broken, default=None)", "return broken[0] if broken else None", "an earlier one breaks"),
    Mistake("e27", "starts[need] + 1 for", "starts[need] for", "it breaks a rule; ask each action"),
    Mistake("e27", "starts[need] + 1 for", "starts[need] + 2 for", "this one breaks no rule"),
    Mistake("e27", "free = start + 1", "pass", "two actions at a time"),
    Mistake("e27", '[(r, "F" + action[1:]), (r + 1, action)]', "[(r + 1, action)]", "B before F on the last rank"),
    Mistake("e27", "sum(forward[:r]) + m", "m", "has to come down to the last rank"),
    Mistake("e27", " + sum(backward[:r])", "", "has still to go up"),
    Mistake("e27", "return max(times)", "return times[-1]", "the slowest rank need not be the last"),
    Mistake("e27", "return max(times)", "return max(times) + max(forward) - min(forward)", "but one takes"),
    Mistake("e27", "return max(times)", "return m * (forward[0] + backward[0])", "this is the work of one rank"),
    Mistake("e28", "if np.isin(own, flat).any():", "if True:", "needs none of its elements"),
    Mistake("e28", "    if missing:", "    if False:", "KeyError"),
    Mistake(
        "e28",
        '    if missing:\n        raise ValueError(f"element {missing[0]} is in no piece")',
        "    found.update((place, np.float32(0)) for place in missing)",
        "an element of this part is in no piece",
    ),
    Mistake(
        "e28",
        "part_of(places, cut, r, t)",
        "np.array_split(places, t, axis=cut.dim or 0)[r] if cut.dim is not None else places",
        "of the 3 groups",
    ),
    Mistake("e28", ".reshape(-1)[piece.start", ".T.reshape(-1)[piece.start", "not of the whole"),
    Mistake("e28", "read(piece), strict", "read(piece) + 0 * read(piece), strict", "read more than once"),
    Mistake(
        "e28",
        "stretches = np.split(whole, cut.groups, axis=cut.dim)",
        "stretches = [whole]",
        "cut each of the `groups` stretches by itself",
    ),
    Mistake("e28", "[piece.start :", "[:", "from dp 2 x tp 2 to rank 0 of tp 4: ValueError"),
    Mistake("e28", "[piece.start : piece.stop]", "[: piece.stop - piece.start]", "elements start:stop of the writer's"),
    Mistake("e28", "if cut.dim is None:", "if False:", "Here dim is None"),
    Mistake("e28", ".reshape(wanted.shape)\n", "\n", "the part has the shape"),
    Mistake(
        "e28",
        "[found[place] for place in flat.tolist()])",
        "[float(found[place]) for place in flat.tolist()])",
        "what was saved is float32",
    ),
    Mistake(
        "e28", "flat, found = wanted.reshape(-1), {}", "flat, found = wanted.T.reshape(-1), {}", "in another order"
    ),
    Mistake("e29", "tokens = b * ", "tokens = own * ", "the tokens of one"),
    Mistake("e29", "range(1, int(own) + 1)", "range(1, min(1, int(own)) + 1)", "microbatches may be larger"),
    Mistake("e29", "Fraction(b * model.T * model.kept, t)", "b * model.T * model.kept", "16 parameters/N + b T kept/t"),
    Mistake(
        "e29", "held <= machine.memory:", "held < machine.memory:", "a memory that is full: ZeRO-3: None, expected 1"
    ),
    Mistake(
        "e29", "held > machine.memory:", "held >= machine.memory:", "full: tp x pp with 2 stages: None, expected 1"
    ),
    Mistake("e29", "* machine.g // t", "* machine.g", "the tokens are b T g/t"),
    Mistake(
        "e29",
        "max(1, Fraction(machine.network, tokens)) + price(model, machine, t)",
        "max(1, Fraction(machine.network, tokens) + price(model, machine, t))",
        "or it stands inside the max (it comes on top)",
    ),
    Mistake("e29", "N *= 2", "N += machine.g * p", "crossover: N doubles"),
    Mistake("e29", "other > ours", "other >= ours", "if both take as long"),
    Mistake("e29", "while N <= ", "while N < ", "the last N gives"),
    Mistake("e29", "* machine.g // t", "", "share its g network cards"),
    Mistake("e29", "3 * model.h) / 3", "3 * model.h)", "which is a third of the step"),
    Mistake("e29", "(machine.network, tokens)) + price(model, machine, t)", "(machine.network, tokens))", "is missing"),
    Mistake("e29", "own % b == 0 and held <= machine.memory", "own % b == 0", "needs more memory than there is"),
    Mistake("e29", "min(m, p) * Fraction", "m * Fraction", "min(m, p) T kept/(g p); which"),
    Mistake("e29", "min(m, p) * Fraction", "p * Fraction", "12 parameters/N + min(m, p)"),
    Mistake("e29", "min(m, p) * Fraction", "Fraction", "min(m, p) microbatches, not one"),
    Mistake("e29", "(p - 1) / m", "(p - 1) / (m + p - 1)", "the bubble is idle / computing"),
    Mistake("e29", "other is None or ", "other is not None and ", "a layout that is not possible loses"),
    Mistake(
        "e06",
        "        self.comm.all_gather(self.parameters[self.own], out=self.parameters)\n",
        "        self.parameters = self.comm.all_gather(self.parameters[self.own])\n",
        "a new array in its place",
    ),
    Mistake(
        "e18",
        "mesh.edp.all_reduce(experts) / count",
        "mesh.edp.all_reduce(experts) / count**2",
        "experts: divided by the tokens twice",
    ),
    Mistake(
        "e18",
        "mesh.dp.all_reduce(shared) / count",
        "mesh.dp.all_reduce(shared) / count**2",
        "shared: divided by the tokens twice",
    ),
    Mistake(
        "e18",
        "mesh.edp.all_reduce(experts) / count",
        "mesh.edp.all_reduce(experts) / count / mesh.dp.size",
        "experts: divided by the ranks once more",
    ),
    Mistake("e26", "return scheduled(*FOUND[3])", "return scheduled(*FOUND[3])[:3]", "a list of 4 lists"),
    Mistake("e26", "FOUND[3])", "FOUND[3]) and [['F0']] * 4", "such as '2F0', of the kinds F, I, W and B"),
    Mistake("e26", "FOUND[3])", "FOUND[3]) and [[(0, 'F', 0)]] * 4", "actions are strings such as '2F0'"),
    Mistake("e26", "*FOUND[3])", "range(4), [3] * 4, [1] * 4, [2] * 4, [0] * 4, [9] * 4)", "ifw-3-alive has time 135"),
    Mistake("e26", "*FOUND[3])", "range(4), [2] * 4, [0] * 4, [2] * 4, [1] * 4, [9] * 4)", "ifw-2-alive has time 174"),
    Mistake(
        "e26",
        "return scheduled(*FOUND[3])",
        "from minipar.parallel.pipeline.schedules import _in_turn_with_late_weights as late\n"
        "    return [[str(action) for action in late(rank, 8, min(3 - rank, 2), 0)] for rank in range(4)]",
        "1f1b-3-alive has time 156, memory 3, which is no worse in either",
    ),
    Mistake("e26", "P, M, TIMES = 4, 8,", "P, M, TIMES = 4, 7,", "the last microbatch is 6, expected 7"),
    Mistake("e26", "    return lists", "    lists[1].pop()\n    return lists", "is missing"),
    Mistake("e26", "    return lists", "    lists[1].append(lists[1][0])\n    return lists", "done 2 times"),
    Mistake("e26", "    return lists", "    lists[0] = lists[0][::-1]\n    return lists", "whose result it needs"),
    Mistake(
        "e26",
        "    return lists",
        "    lists[1] = sorted(lists[1], key=lambda a: int(a[2:] or 0))\n    return lists",
        "never ends",
    ),
    Mistake(
        "e26", "    return lists", "    lists[0].append('0SEND_F0')\n    return lists", "messages take no time here"
    ),
    Mistake(
        "e26",
        "return scheduled(*FOUND[3])",
        "return [[f'{rank}{kind}{i}' for kind in 'FB' for i in range(8)] for rank in range(3)] + [\n"
        "        [f'{s}F{i}' for i in range(8) for s in (3, 4)] + [f'{s}B{i}' for i in range(8) for s in (4, 3)]]",
        "must have the same number",
    ),
    Mistake(
        "e26",
        "return scheduled(*FOUND[3])",
        "from minipar.parallel.pipeline.schedules import _in_turn\n"
        "    return [[str(action) for action in _in_turn(rank, 8, 5 - rank)] for rank in range(4)]",
        "1f1b has time 132, memory 4, which is no worse in either",
    ),
    Mistake(
        "e26",
        "return scheduled(*FOUND[3])",
        "return [sorted((f'{rank}{kind}{i}' for kind in 'FB' for i in range(8)), key=lambda a: 'FB'.index(a[1])) "
        "for rank in range(4)]",
        "gpipe has time 132, memory 8, the same score",
    ),
    Mistake("e22", "    for start in reversed(", "    last = x\n    for start in reversed(", "of forward (del)"),
    Mistake("e22", "x = inputs.pop()", "x = inputs[start // k]", "drop a segment's input when its backward is done"),
    Mistake(
        "e22",
        "max((last + 2) * n + blocks * s, (last + 1) * n + k * s if last else 0)",
        "(last + 2) * n + blocks * s",
        "take the maximum over all j",
    ),
    Mistake(
        "e21",
        "    for tensor in tensors:\n        if tensor.inputs:\n",
        "    again = root.grad\n    for tensor in tensors:\n        if tensor.inputs and again:\n",
        "must start each pass from 0",
    ),
    Mistake(
        "e21",
        "    tensors = below(root)",
        "    def walk(tensor):\n        for x in tensor.inputs:\n            walk(x)\n\n    walk(root)\n"
        "    tensors = below(root)",
        "RecursionError",
    ),
    Mistake("e21", "zip(tensor.inputs, ", "zip(dict.fromkeys(tensor.inputs), ", "a sum of 5000"),
    Mistake("e25", "of_q = range(r * a // t, (r + 1) * a // t)", "of_q = range(r, a, t)", "a / t of them, in order"),
    Mistake("e25", "return of_q, ", "return range(of_q[0], of_q[-1]), ", "a / t of them"),
    Mistake("e24", "gradient_of(whole)", "gradient_of(whole) + 0 * gradient_of(whole)", "called 2 times"),
    Mistake("e24", "gradient_of(whole)", "gradient_of(parameters)", "gradient_of was given"),
    Mistake("e29", "return min(times, default=None)", "return float(min(times, default=0))", "return a Fraction"),
    Mistake(
        "e23",
        "        self.left[name] -= 1\n",
        "        self.left[name] -= 1\n        [work.wait() for work in self.under_way]\n",
        "leave it under way",
    ),
    Mistake(
        "e30",
        "            self.comm.broadcast(self.matrices[i], who)\n",
        "            pass\n",
        "and then sends it to all",
    ),
    Mistake(
        "e30", "total = arrived.sum(0) / d", "total = arrived[self.comm.rank]", "gradient of the owner's own samples"
    ),
    Mistake(
        "e30", "gradient.reshape(mean.shape), mean)", "gradient.reshape(mean.shape), 0 * mean)", "is new in every step"
    ),
    Mistake(
        "e30",
        "muon_step(self.matrices[i], gradient.reshape(mean.shape), mean)",
        "blocks = [np.array_split(x, d) for x in (self.matrices[i], gradient.reshape(mean.shape), mean)]; "
        "[muon_step(*rows) for rows in zip(*blocks) if len(rows[0])]",
        "its owner needs all of its rows",
    ),
    Mistake(
        "e30",
        "        order = sum(self.by_owner, [])\n",
        "        self.all = getattr(self, 'all', [np.zeros(m.shape) for m in self.matrices])\n"
        "        for m, gradient, mean in zip(self.matrices, gradients, self.all):\n"
        "            muon_step(m, gradient, mean)\n"
        "            m[...] = self.comm.all_reduce(m) / self.comm.size\n"
        "        return\n",
        "sum the gradients first",
    ),
    Mistake(
        "e30", "for i in self.by_owner[comm.rank]}", "for i in range(len(matrices))}", "keep the means of your own"
    ),
    Mistake(
        "e30",
        "self.comm.all_to_all(packed, out=arrived, counts=(sends, [mine] * d))",
        "start = sum(sends[: self.comm.rank]); arrived[...] = 0; "
        "arrived[0] = self.comm.all_reduce(packed)[start : start + mine]",
        "send each gradient to its owner alone",
    ),
    Mistake("e30", "total = arrived.sum(0) / d", "total = arrived.sum(0)", "the mean is asked for"),
    Mistake("e31", " / comm.size", "", "their mean is asked for"),
    Mistake(
        "e31",
        "comm.all_reduce(own - parameters) / comm.size",
        "own - parameters; comm.all_reduce(moved.copy())",
        "your own steps",
    ),
    Mistake("e31", "(moved + 0.9 * velocity)", "velocity", "comes on top of the movement"),
    Mistake("e31", "own - parameters", "parameters - own", "it is added"),
    Mistake("e31", "0.7 * (", "(", "no outer rate"),
    Mistake("e31", "velocity *= 0.9", "velocity *= 0", "it keeps 0.9 of the last one"),
    Mistake("e31", "own = parameters.copy()", "own = parameters", "are lost"),
    Mistake(
        "e31",
        "own = parameters.copy()\n    for _ in range(H):\n        local_step(own)\n    moved = ",
        "own = parameters\n    for _ in range(H):\n        local_step(own)\n    own -= parameters\n    moved = ",
        "take a copy first",
    ),
    Mistake("e31", "velocity += moved", "velocity += comm.all_reduce(moved.copy()) / comm.size", "nothing else"),
    Mistake("e31", "local_step(own)", "own = parameters.copy(); local_step(own)", "go on from where"),
    Mistake("e31", "for _ in range(H)", "for _ in range(H + 1)", "called 2 times, expected 1"),
    Mistake("e31", "    parameters += ", "    parameters = parameters + ", "in place"),
]
