"""`make planted`: plausible mistakes of meaning, each of which must make a test of `make test` fail.

    python tests/release/planted.py "regex of names"

A row has a name, the file, the text that stands there exactly once, the wrong text, and the test files below tests/
that run first. If these pass, all of `make test` runs. The first rows are mistakes that a reader planted who did not
know the tests; the museum's are read from docs/museum.md. One line is printed for each, then those that are not caught.
"""

import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from museum.exhibits import exhibits
from mutation import ROOT, Mutation, copied_tree, environment

JOBS = 2  # mistakes at a time
DEADLINES = 300.0, 3000.0  # seconds, for the first tests and for all
PATIENCE = 5.0  # seconds until tests that take longer are killed
PASSED = "all tests pass"
PYTEST = [sys.executable, *"-m pytest -q -x --tb=no -rfE -p no:cacheprovider -p no:nbmake -p no:xdist".split()]
# All of `make test` but what counts tokens and letters: these would notice any change.
EVERY = ["tests", "--ignore=tests/test_size.py", "--ignore=tests/test_style.py"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)

# fmt: off
ROWS = [
    # ---- planted from outside (three more of these are the museum's exhibits 7, 9 and 24)
    ("gradients are multiplied by the ranks", "minipar/parallel/loss.py",
     "1 / targets)", "comm.size / targets)", "parallel/test_ddp.py"),
    ("a bucket does not wait for the tied head", "minipar/parallel/buckets.py",
     "leaf in (p, *p.ties)}", "leaf in (p,)}", "parallel/test_ddp.py"),
    ("the end of backward does not wait for the sums", "minipar/parallel/wrapper.py",
     "works:\n            work.wait()", "works:\n            pass", "parallel/test_ddp.py"),
    ("the ring's neighbours are swapped", "minipar/more/context/context_parallel.py",
     "left = context.source(1)  # rank - 1\n        self.right = context.source(-1)",
     "left = context.source(-1)  # rank - 1\n        self.right = context.source(1)", "parallel/test_context.py"),
    ("ZeRO's own chunk ignores the remainder", "minipar/parallel/buckets.py",
     "slice(*chunk_bounds(self.size, sharing.size)[sharing.rank])",
     "slice(sharing.rank * (self.size // sharing.size), (sharing.rank + 1) * (self.size // sharing.size))",
     "parallel/test_zero.py"),
    ("a resumed run starts without second moments", "minipar/train/checkpoint.py",
     "            own.reshape(-1)[...] = local", "            own.reshape(-1)[...] = (kind != \"exp_avg_sq\") * local",
     "train/test_checkpoint.py"),
    ("a resumed run counts steps, not updates", "minipar/train/trainer.py",
     'self.optimizer.steps = run["optimizer_steps"]', 'self.optimizer.steps = run["step"]', "train/test_overflow.py"),
    ("the causal mask is on a block's first columns", "minipar/more/context/blockwise.py",
     "scores[..., -rows:] += mask", "scores[..., :rows] += mask", "autograd/test_attention.py"),
    ("the bubble is idle / busy", "minipar/parallel/pipeline/actions.py",
     "Fraction(idle) / total", "Fraction(idle) / (total - idle)", "parallel/pipeline/test_schedules.py"),
    ("the norm counts whole parameters on each rank of tp", "minipar/parallel/grad_norm.py",
     "return sums[:, WHOLE] + split", "return (1 if tp is None else tp.size) * sums[:, WHOLE] + split",
     "parallel/test_grad_norm.py"),
    ("AdamW decays after the update", "minipar/nn/optim.py",
     "    value *= decay\n    value -= step_size * (m / (xp.sqrt(v) / root_correction + eps))",
     "    value -= step_size * (m / (xp.sqrt(v) / root_correction + eps))\n    value *= decay", "nn/test_optim.py"),
    ("1F1B warms up one forward too many", "minipar/parallel/pipeline/schedules.py",
     "ahead=min(p - 1 - r, m)) for", "ahead=min(p - r, m)) for", "parallel/pipeline/test_schedules.py"),
    ("replicas get overlapping samples", "minipar/train/trainer.py",
     "(replica * self.args.microbatches + microbatch)", "(replica + microbatch)", "train/test_trainer.py"),
    ("router weights are not divided by their sum", "minipar/more/experts/mixtral.py",
     "chosen / chosen.sum(-1, keepdims=True)", "chosen", "nn/test_moe.py"),
    ("sums over tp are in 2 bytes", "minipar/parallel/tensor/mappings.py",
     'return xp.promote_types(x.dtype, "float32")', "return x.dtype", "train/test_precision.py"),
    ("warm-up starts from 0", "minipar/nn/optim.py",
     "lr * (step + 1) / (warmup_steps + 1)", "lr * step / (warmup_steps + 1)", "nn/test_optim.py"),
    ("the ring's scratch has the shortest chunk's size", "minipar/comm/algorithms.py",
     "(2, own[0].size)", "(2, own[-1].size)", "comm/test_collectives.py"),
    ("gradients keep the loss scale", "minipar/train/scaled_trainer.py",
     "        self.scale.divide(self.ddp.parameters())\n", "", "train/test_overflow.py"),
    ("hooks stay off after no_sync", "minipar/parallel/wrapper.py", "self.hooks.enabled = previous", "pass",
     "parallel/test_contract.py"),
    ("Ulysses takes the ranks' tokens for contiguous ones", "minipar/more/context/ulysses.py",
     "whole[:, self.context.positions(length)]", "whole[:, np.arange(length).reshape(self.context.size, -1)]",
     "parallel/test_context.py"),
    ("the planner's bubble has p stages", "minipar/plan/pipeline_time.py",
     "return m * slowest + (p - 1) * one", "return m * slowest + p * one", "plan/test_step_time.py"),
    ("compare says the inverse factor", "minipar/compare/step_comparison.py",
     'return whole, ""', 'return whole and 1 / whole, ""', "compare/test_compare.py"),
    # ---- autograd and nn
    ("merged blocks have each other's share", "minipar/more/context/blockwise.py",
     "share_2 = xp.where(difference > 0,", "share_2 = xp.where(difference < 0,", "autograd/test_attention.py"),
    ("attention's backward forgets the scale", "minipar/autograd/attention.py",
     "dscores *= scale_of(q)", "dscores *= 1", "autograd/test_fused.py"),
    ("LayerNorm's backward forgets the mean", "minipar/autograd/fused.py",
     "dx -= dx.mean(axis=-1, keepdims=True)", "dx -= 0", "autograd/test_fused.py"),
    ("ignored targets get a gradient", "minipar/autograd/fused.py",
     "dlogits *= xp.where(counted, grad, 0)[:, None]", "dlogits *= grad", "autograd/test_fused.py"),
    ("the last user's gradient replaces those before it", "minipar/autograd/backward.py",
     "result = gradients[node] + result", "pass", "autograd/test_graph.py"),
    ("GPT's residual projections start as large as the rest", "minipar/nn/gpt.py",
     "self.initializer_range / math.sqrt(2 * self.n_layer)", "self.initializer_range", "nn/test_gpt.py"),
    ("Llama's gate and product change places", "minipar/more/llama.py",
     "swiglu(self.gate_proj(x), self.up_proj(x))", "swiglu(self.up_proj(x), self.gate_proj(x))", "nn/test_models.py"),
    ("dropout draws the same masks in every step", "minipar/nn/layers.py",
     "{keys.step} {sample}", "{sample}", "nn/test_dropout.py"),
    ("a token's weights do not add up to one", "minipar/more/experts/mixtral.py",
     "return indices, chosen / chosen.sum(-1, keepdims=True)", "return indices, chosen", "nn/test_moe.py"),
    ("squares of float32 are summed in float32", "minipar/parallel/grad_norm.py",
     '.sum(dtype="float64")', ".sum()", "nn/test_optim.py"),
    # ---- comm
    ("the barrier is one round short", "minipar/comm/algorithms.py",
     "range((p - 1).bit_length()):", "range((p - 1).bit_length() - 1):", "comm/test_collectives.py"),
    ("an ordered sum starts from the rank's own part", "minipar/comm/algorithms.py",
     "total = contributions[0]", "total = contributions[r]", "comm/test_collectives.py"),
    ("the mesh exchanges dp and pp", "minipar/comm/mesh.py",
     '[str, ...] = ("tp", "cp", "dp", "pp")', '[str, ...] = ("tp", "cp", "pp", "dp")', "comm/test_mesh.py"),
    ("a message's transmission counts as waiting", "minipar/comm/trace.py",
     "max(0.0, sent - self.time)", "max(0.0, sent + seconds - self.time)", "comm/test_clock.py comm/test_trace.py"),
    # ---- data, tensor, context, expert and pipeline parallelism
    ("ZeRO divides the sum by the ranks", "minipar/parallel/zero.py",
     "gradient = self.complete(bucket)", "gradient = self.complete(bucket); gradient /= self.comm.size",
     "parallel/test_zero.py"),
    ("ZeRO 2's later sums replace the first", "minipar/parallel/chunks.py",
     "if self.shards[0].grad is None:", "if True:", "parallel/test_zero.py"),
    ("FSDP does not wait for what it gathers", "minipar/parallel/fsdp.py",
     "whole = self.gathering.wait()", "whole = self.gathering._result", "parallel/test_fsdp.py"),
    ("hybrid sharding sums nothing over the replicas", "minipar/more/hybrid.py",
     "return _TwoSums(first, self.across, out, algorithm)", "return first", "parallel/test_hybrid.py"),
    ("heads are cut across q, k and v", "minipar/parallel/tensor/plan.py",
     '"c_attn": Split(1, 3,', '"c_attn": Split(1, 1,', "parallel/tensor/test_plan.py"),
    ("other ranks' tokens look up row 0", "minipar/parallel/tensor/layers.py",
     "return y * is_own[..., None].astype(self.weight.dtype)", "return y", "parallel/tensor/test_vocabulary.py"),
    ("the all-gather's gradients are in the order of arrival", "minipar/more/context/context_parallel.py",
     "dblocks[source] = dblock", "dblocks[step] = dblock", "parallel/test_context.py"),
    ("zigzag has no zag", "minipar/more/context/token_order.py",
     "np.concatenate([early, late[::-1]]", "np.concatenate([early, late]", "parallel/test_context.py"),
    ("experts are summed over dp", "minipar/more/experts/expert_parallel.py",
     "(experts, self.replicas)", "(experts, comm)", "parallel/test_expert.py"),
    ("all microbatches have the first one's masks", "minipar/train/trainer.py",
     "DropoutKeys(args.seed, step, self.samples(replica, m))", "DropoutKeys(args.seed, step, self.samples(replica, 0))",
     "train/test_plain_loop.py"),
    ("ZB-H2 puts W off as little as ZB-H1", "minipar/parallel/pipeline/schedules.py",
     "delay=2 * r", "delay=r", "parallel/pipeline/test_schedules.py"),
    ("a shard is saved from its place in the whole", "minipar/parallel/state.py",
     "slice(own.start - held.start, own.stop - held.start)", "slice(own.start, own.stop)", "parallel/test_state.py"),
    ("the traffic formula of ZeRO 3 gathers once", "minipar/parallel/predicted_traffic.py",
     "return 2 * layout.microbatches", "return layout.microbatches", "parallel/test_traffic.py"),
    ("microbatches' whole gradients need no memory", "minipar/parallel/predicted_memory.py",
     "own + psi if accumulating else own", "own", "parallel/test_memory.py"),
    ("ranks may start from different models", "minipar/parallel/contract.py",
     "comm,\n            parameters,", "comm,\n            [],", "parallel/test_contract.py"),
    # ---- train
    ("the loss is a mean over samples", "minipar/train/trainer.py",
     "return float(loss[0]) / self.tokens_per_step", "return float(loss[0]) / self.args.global_batch",
     "train/test_plain_loop.py"),
    ("a target is its own input", "minipar/train/data.py",
     "self.tokens.ids[chosen + 1]", "self.tokens.ids[chosen]", "train/test_data.py"),
    ("the held-out text is trained on", "minipar/train/data.py",
     "Tokens(self.ids[:-kept], self.name)", "Tokens(self.ids, self.name)", "train/test_evaluate.py"),
    ("a checkpoint counts steps, not updates", "minipar/train/checkpoint.py",
     '"optimizer_steps": trainer.optimizer.steps', '"optimizer_steps": step', "train/test_overflow.py"),
    ("a checkpoint has rounded values", "minipar/train/checkpoint.py",
     '"parameter": optimizer.values()', '"parameter": [p.data for p in optimizer.parameters]',
     "train/test_precision.py"),
    ("the auxiliary loss is a sum over layers", "minipar/more/experts/mixtral.py",
     "aux_coefficient * factor / len(moes)", "aux_coefficient * factor", "train/test_balance.py"),
    ("--verify lets a NaN pass", "minipar/train/verify.py",
     "if exact or not found <= BOUND:", "if exact or found > BOUND:", "train/test_verify.py"),
    ("one device of a resumed run starts from nothing", "minipar/train/verify.py",
     "        if trainer.args.resume is not None:\n            read_whole", "        if False:\n            read_whole",
     "train/test_verify.py"),
    # ---- plan, compare, bench, visualize, and what stands alone
    ("the planner's 1F1B keeps every microbatch", "minipar/plan/rank_bytes.py",
     "return min(m, p)\n", "return m\n", "plan/test_rank_bytes.py"),
    ("the planner's gated MLP has two matrices", "minipar/plan/model.py",
     "(3 if self.gated else 2) * self.inner", "2 * self.inner", "plan/test_model.py"),
    ("the search keeps the slowest layout of each mesh", "minipar/plan/search.py",
     "seconds < best[mesh].seconds", "seconds > best[mesh].seconds", "plan/test_search.py"),
    ("a record's updates add up from the first step", "minipar/compare/record.py",
     "before[...] = parameters[name]", "pass", "test_record.py"),
    ("both ways of a message are one", "minipar/bench/machine.py",
     "/ (2 * ROUND_TRIPS)", "/ ROUND_TRIPS", "bench/test_bench.py"),
    ("a mesh's picture has the bytes of all steps", "visualize/mesh.py",
     "Fraction(total, self.steps)", "Fraction(total)", "visualize/test_mesh.py"),
    ("the ledger counts a view as an array of its own", "minipar/memory.py",
     'while isinstance(getattr(array, "base", None), xp.ndarray):', "while False:", "test_memory.py"),
    ("generation cuts off the right end", "minipar/generate.py",
     "text[-model.config.n_positions :]", "text[: model.config.n_positions]", "test_generate.py"),
]
MUSEUM = {  # by exhibit
    1: "train/test_plain_loop.py", 2: "train/test_combinations.py", 3: "parallel/pipeline/test_executor.py",
    4: "parallel/pipeline/test_schedules.py", 5: "parallel/tensor/test_plan.py", 6: "parallel/tensor/test_plan.py",
    7: "parallel/tensor/test_plan.py", 8: "parallel/tensor/test_layers.py", 9: "train/test_combinations.py",
    10: "train/test_plain_loop.py", 11: "parallel/tensor/test_vocabulary.py", 12: "parallel/test_grad_norm.py",
    13: "nn/test_optim.py", 14: "train/test_plain_loop.py", 15: "nn/test_optim.py", 16: "train/test_plain_loop.py",
    17: "train/test_tree.py", 18: "nn/test_dropout.py", 19: "train/test_combinations.py",
    20: "train/test_combinations.py", 21: "train/test_combinations.py", 22: "parallel/test_context.py",
    23: "parallel/test_context.py", 24: "parallel/test_context.py", 25: "autograd/test_fused.py",
    26: "parallel/test_expert.py", 27: "parallel/test_expert.py", 28: "parallel/test_expert.py",
    29: "parallel/tensor/test_models.py", 30: "train/test_combinations.py", 31: "train/test_combinations.py",
}
# fmt: on


@dataclass(frozen=True)
class Mistake:
    """A mutation, and the tests that run first against it."""

    mutation: Mutation
    tests: tuple[str, ...]

    def problem(self) -> str:
        """Return why it cannot be planted: the code has changed, or a test file is gone. Empty if it can."""
        gone = [path for path in (self.mutation.file, *self.tests) if not (ROOT / path).exists()]
        try:
            if not gone:
                self.mutation.apply((ROOT / self.mutation.file).read_text(encoding="utf-8"))
        except ValueError as error:
            return str(error)
        return f"{self.mutation.name}: there is no {', '.join(gone)}" if gone else ""


@dataclass(frozen=True)
class Outcome:
    """What the tests said: the name of the first that failed; None if none did, and then why."""

    test: str | None
    why: str = ""


def mistakes() -> list[Mistake]:
    """Return all mistakes: those of this file, and the museum's."""
    listed = [(Mutation(*row), tests) for *row, tests in ROWS]
    of_museum = [(exhibit.mutation, MUSEUM[exhibit.number]) for exhibit in exhibits()]
    return [Mistake(each, tuple(f"tests/{name}" for name in tests.split())) for each, tests in [*listed, *of_museum]]


def run_tests(tree: Path, arguments: Sequence[str], deadline: float) -> Outcome:
    """Run pytest in a tree until a test fails."""
    process = subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=tree,
        env=environment(tree) | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # the tests end the jobs that they have started
        time.sleep(PATIENCE)
        process.kill()
        process.communicate()
        return Outcome(None, f"no test has failed in {deadline:g} s")
    failed = FAILED.search(output)
    if failed is not None:
        return Outcome(failed[1])
    return Outcome(None, PASSED if process.returncode == 0 else f"pytest has not run: {output[-500:]}")


def judge(mistake: Mistake, trees: "queue.Queue[Path]") -> Outcome:
    """Plant a mistake in one of the copies, run the tests, take it back, and print a line."""
    tree = trees.get()
    path = tree / mistake.mutation.file
    right = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(mistake.mutation.apply(right), encoding="utf-8")
        outcome = run_tests(tree, mistake.tests, DEADLINES[0])
        if outcome == Outcome(None, PASSED):
            outcome = run_tests(tree, EVERY, DEADLINES[1])
    finally:
        path.write_text(right, encoding="utf-8")
        trees.put(tree)
    seconds = time.monotonic() - start
    print(f"{seconds:6.1f} s  {mistake.mutation.name}: {outcome.test or 'NOT CAUGHT, ' + outcome.why}", flush=True)
    return outcome


def main(pattern: str = "") -> int:
    """Plant the mistakes whose names the pattern finds; return 1 if one is not caught or cannot be planted."""
    chosen = [each for each in mistakes() if re.search(pattern, each.mutation.name)]
    problems = [each.problem() for each in chosen if each.problem()]
    ready = [each for each in chosen if not each.problem()]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minipar-planted-", ignore_cleanup_errors=True) as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(JOBS):
            trees.put(copied_tree(Path(folder) / str(i)))
        with ThreadPoolExecutor(JOBS) as pool:
            futures = [pool.submit(judge, each, trees) for each in ready]
            try:
                outcomes = [future.result() for future in futures]
            except BaseException:  # Ctrl-C, which ends the tests too
                pool.shutdown(cancel_futures=True)
                raise
        # A test that fails by itself proves nothing.
        tests = sorted({outcome.test for outcome in outcomes if outcome.test is not None})
        if tests:
            without = run_tests(trees.get(), tests, DEADLINES[1])
            if without != Outcome(None, PASSED):
                problems.append(f"without a mistake: {without.test or without.why}")
    for each, outcome in zip(ready, outcomes, strict=True):
        if outcome.test is None:
            problems.append(f"not caught: {each.mutation.name} ({each.mutation.file}): {outcome.why}")
    minutes = (time.monotonic() - begin) / 60
    caught = sum(outcome.test is not None for outcome in outcomes)
    print(f"{caught} of {len(chosen)} mistakes are caught, by {len(tests)} tests, in {minutes:.1f} minutes")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
