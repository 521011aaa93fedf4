"""Claims about pictures of what disagrees: a formula's mark is the formula's, and a step ends with its last rank."""

from visualize import parse_trace, plot_bytes


def test_the_formulas_mark_is_not_the_counters():
    """NB: they are equal in every file that minipar writes; the picture is there to show when they are not."""
    table = [
        {"op": "all_reduce", "bytes": 700, "expected": 600},
        {"op": "broadcast", "bytes": 90},
        {"op": "all_gather", "bytes": 10, "expected": 25},
    ]
    axes = plot_bytes(table).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [700, 90, 10]
    (marks,) = axes.lines
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([600, 25], [0, 2])
    assert [text.get_text() for text in axes.texts] == ["700", "90", "10"]


def slices(rank, *spans):
    names = ("forward", "optimizer") * len(spans)
    times = [time for begin, end in spans for time in ((begin, 1.0), (end - 1.0, 1.0))]
    return [
        {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": start * 1e6, "dur": length * 1e6}
        for name, (start, length) in zip(names, times, strict=True)
    ]


def test_a_step_is_from_the_first_ranks_begin_to_the_lasts_end():
    """Another rank is the first and the last in each of the two steps."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "computation"}} for rank in range(3)
    ]
    events = [*slices(0, (2, 10), (12, 21)), *slices(1, (1, 9), (13, 25)), *slices(2, (3, 11), (11, 22))]
    trace = parse_trace({"traceEvents": names + events, "otherData": {"clock": "model"}})
    assert trace.steps() == [(1.0, 11.0), (11.0, 25.0)]
