"""Claims about combinations: whatever is combined with whatever trains what one device trains, and sends as said.

A row is a command line; its model is the smallest that it allows. The rows have every value of every axis, ranks that
are not powers of two, and the pairs that have been wrong before; tests/release/train has every pair.
"""

import pytest
from combinations import equals_one_device

TO_THE_BIT = [
    # data parallelism and ZeRO
    "--microbatches 3 --clip-grad 0.5",
    "--dp 2 --dropout 0.1",
    "--dp 3 --microbatches 2 --clip-grad 0.5",
    "--dp 3 --order sequential --lr-schedule cosine --warmup-steps 1 --weight-decay 0.1 --seed 5",
    "--dp 3 --dtype float32 --zero-stage 2",
    "--dp 5 --zero-stage 1",
    "--dp 8 --zero-stage 3 --clip-grad 0.5 --recompute full",
    "--dp 3 --zero-stage 3 --microbatches 3 --dropout 0.1",
    # pipelines
    "--pp 2 --schedule naive --microbatches 3",
    "--pp 3 --schedule gpipe --microbatches 4 --recompute full",
    "--pp 4 --schedule 1f1b --microbatches 5 --dropout 0.1",
    "--pp 5 --schedule 1f1b --microbatches 1",
    "--pp 8 --schedule 1f1b --microbatches 3 --layers 11",
    "--pp 2 --dp 2 --schedule interleaved-1f1b --microbatches 4 --zero-stage 1 --clip-grad 0.5",
    "--pp 3 --dp 2 --schedule zb-h1 --microbatches 3 --zero-stage 2",
    "--pp 4 --dp 2 --schedule zb-h2 --microbatches 4 --zero-stage 3 --recompute full",
    "--pp 2 --dp 3 --schedule zbv --microbatches 2 --zero-stage 3 --clip-grad 0.5",
    "--pp 3 --schedule zbv --microbatches 8",
    "--pp 2 --dp 2 --schedule dualpipev --microbatches 4 --zero-stage 2 --dropout 0.1",
    "--pp 3 --schedule dualpipev --microbatches 8",
    # other models
    "--model llama --dp 3 --zero-stage 2",
    "--model llama --dp 4 --zero-stage 3 --microbatches 2 --recompute full",
    "--model llama --pp 2 --dp 2 --schedule zbv --microbatches 2 --zero-stage 3 --clip-grad 0.5",
    "--model llama --pp 4 --schedule interleaved-1f1b --microbatches 4 --dtype float32",
    "--model mixtral --dp 2 --zero-stage 3 --microbatches 2 --recompute full",
    "--model mixtral --pp 3 --schedule zb-h1 --microbatches 3",
    "--model mixtral --dp 2 --pp 2 --zero-stage 1 --microbatches 2 --schedule gpipe --aux-loss 0.5",
    "--model mixtral --dp 3 --experts 40 --top-k 1 --weight-decay 0.5",  # most experts have no token
]
WITHIN_ROUNDING = [
    # sums over replicas of shards, after each microbatch, or round a ring
    "--dp 7 --zero-stage 2 --microbatches 2 --sync-every-microbatch",
    "--dp 4 --zero-stage 2 --zero-replicas 2 --clip-grad 0.5",
    "--dp 6 --zero-stage 3 --zero-replicas 3 --microbatches 2 --sync-every-microbatch",
    "--dp 8 --zero-stage 1 --zero-replicas 4 --microbatches 4",
    "--pp 2 --dp 4 --schedule gpipe --microbatches 2 --zero-stage 3 --zero-replicas 2",
    "--dp 3 --reduction ring",
    "--dp 5 --zero-stage 3 --reduction ring --clip-grad 0.5",
    "--dp 8 --zero-stage 2 --zero-replicas 2 --reduction ring",
    "--pp 2 --dp 3 --zero-stage 1 --reduction ring --microbatches 2",
    # tensor and sequence parallelism
    "--tp 2",
    "--tp 3 --sequence-parallel --weight-decay 0.5",
    "--tp 4 --clip-grad 0.5 --recompute full",
    "--tp 8 --sequence-parallel --microbatches 2",
    "--tp 4 --dp 2 --zero-stage 2 --sequence-parallel --reduction ring",
    "--tp 2 --dp 3 --zero-stage 3 --clip-grad 0.5 --sequence-parallel",
    "--tp 2 --dp 4 --zero-stage 1 --zero-replicas 2 --lr-schedule cosine",
    "--tp 2 --pp 3 --schedule interleaved-1f1b --microbatches 3 --sequence-parallel",
    "--tp 3 --pp 2 --schedule zbv --microbatches 4 --recompute full",
    "--tp 2 --pp 2 --dp 2 --schedule 1f1b --microbatches 4 --zero-stage 1 --sequence-parallel",
    "--tp 2 --pp 2 --dp 2 --schedule zb-h1 --microbatches 2 --zero-stage 3 --sequence-parallel --recompute full",
    "--tp 4 --pp 2 --dp 2 --schedule 1f1b --microbatches 4 --zero-stage 1 --clip-grad 0.5",  # the textbooks' 16 ranks
    # tensor-parallel ranks that share the heads of keys and values
    "--model llama --tp 3 --sequence-parallel --zero-stage 1",
    "--model llama --tp 4 --kv-heads 4",
    "--model llama --tp 2 --kv-heads 2 --sequence-parallel --clip-grad 0.5",
    "--model llama --tp 2 --kv-heads 2 --dp 2 --zero-stage 1 --microbatches 2",
    "--model llama --tp 2 --kv-heads 2 --dp 2 --zero-stage 3 --microbatches 2 --sync-every-microbatch",
    "--model llama --tp 2 --kv-heads 2 --pp 2 --microbatches 2 --schedule zb-h1 --recompute full",
    "--model llama --tp 2 --kv-heads 2 --cp 2",
    # context parallelism
    "--cp 2",
    "--cp 3 --model llama --zero-stage 2",
    "--cp 8 --recompute full",
    "--cp 2 --dp 2 --model llama --zero-stage 1 --reduction ring",
    "--cp 4 --context-parallel all-gather --recompute full --clip-grad 0.5",
    "--cp 2 --context-parallel ulysses --model llama --kv-heads 4 --microbatches 2",
    "--cp 2 --dp 4 --zero-stage 2 --zero-replicas 2 --microbatches 2 --sync-every-microbatch",
    "--cp 2 --pp 3 --microbatches 3 --schedule 1f1b --model llama",
    "--cp 4 --zero-stage 3 --microbatches 2",
    "--cp 2 --context-parallel all-gather --dp 3 --zero-stage 1 --microbatches 2",
    "--cp 2 --context-parallel ulysses --tp 2 --sequence-parallel --recompute full",
    "--cp 3 --tp 2 --sequence-parallel --clip-grad 0.5",
    "--cp 2 --pp 2 --schedule zbv --microbatches 2 --zero-stage 2",
    "--cp 2 --tp 2 --pp 2 --schedule interleaved-1f1b --microbatches 2 --zero-stage 3",
    # experts
    "--model mixtral --tp 2 --dp 2 --sequence-parallel --zero-stage 2",
    "--model mixtral --cp 2 --dp 2 --zero-stage 1 --zero-replicas 2",
    "--model mixtral --experts 4 --dp 2 --ep 2",
    "--model mixtral --experts 6 --dp 3 --ep 3 --zero-stage 2 --microbatches 2",
    "--model mixtral --experts 8 --dp 2 --cp 2 --ep 4 --zero-stage 1",
    "--model mixtral --experts 4 --cp 2 --ep 2 --aux-loss 0.5 --recompute full",
    "--model mixtral --experts 4 --dp 4 --tp 2 --ep 4 --zero-stage 2 --sync-every-microbatch --microbatches 2",
    "--model mixtral --experts 8 --dp 4 --tp 2 --ep 4 --sequence-parallel",
    "--model mixtral --experts 4 --dp 2 --tp 2 --kv-heads 2 --ep 2 --zero-stage 3",
    "--model mixtral --experts 4 --dp 2 --pp 2 --ep 2 --schedule zb-h1 --microbatches 2",
]


@pytest.mark.parametrize("flags", TO_THE_BIT)
def test_a_layout_has_the_bits_of_one_device(flags):
    assert equals_one_device(flags, exact=True) == []


@pytest.mark.parametrize("flags", WITHIN_ROUNDING)
def test_a_layout_that_adds_otherwise_agrees_within_rounding(flags):
    assert equals_one_device(flags, exact=False) == []
