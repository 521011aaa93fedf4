"""Mistakes in visualize: a picture that does not show what was measured."""

from mutants.mutant import mistakes

MUTANTS = [
    *mistakes(
        "visualize/schedule.py",
        "visualize/test_schedule.py",
        (
            "schedule: a pair's B is drawn above its F",
            "(top + i * height / 2, height / 2)",
            "(top + (1 - i) * height / 2, height / 2)",
        ),
    ),
    *mistakes(
        "visualize/measurements.py",
        "visualize/test_measured.py visualize/test_pictures.py visualize/test_memory.py",
        (
            "bytes: the formula's mark is drawn from the counter",
            'rows[place]["expected"] for place in known',
            'rows[place]["bytes"] for place in known',
        ),
        ("loss: steps are counted from 0", '[row["step"] + 1 for row in rows]', '[row["step"] for row in rows]'),
        ("loss: the mean reaches back to the first step", "reach = min(REACH, i // 4)", "reach = min(REACH, i)"),
        ("memory: the peak is the last moment", "max(range(len(totals)), key=totals.__getitem__)", "len(totals) - 1"),
        (
            "memory: the formula's level in bytes",
            "axes.axhline(model_state[label] / scale",
            "axes.axhline(model_state[label]",
        ),
    ),
    *mistakes(
        "visualize/timeline.py",
        "visualize/test_measured.py visualize/test_pictures.py",
        ("timeline: a step ends with the first rank", "max(b for _, b in step)", "step[0][1]"),
        ("timeline: milliseconds are microseconds", '("ms", 1e3)', '("ms", 1e6)'),
        (
            "timeline: waiting longer than its slice",
            'min(number(event.get("args", {}).get("wait", 0.0), 0), length)',
            'number(event.get("args", {}).get("wait", 0.0), 0)',
        ),
    ),
    *mistakes(
        "visualize/mesh.py",
        "visualize/test_mesh.py",
        ("mesh: bytes of all steps as those of one", "Fraction(total, self.steps)", "Fraction(total)"),
        (
            "mesh: heads where bytes leave",
            '("<|" if down > least[axis] else "", "|>" if up > least[axis] else "")',
            '("<|" if up > least[axis] else "", "|>" if down > least[axis] else "")',
        ),
        ("mesh: messages are counted as bytes", "count[1] += message.nbytes", "count[1] += 1"),
    ),
    *mistakes(
        "visualize/timeline.py",
        "visualize/test_mesh.py",
        ("mesh: coordinates with the slowest axis first", "for axis in reversed(shape):", "for axis in shape:"),
    ),
    *mistakes(
        "visualize/schedule.py",
        "visualize/test_schedule.py visualize/test_schedule_command.py",
        ("schedule: a bubble's percentage is a fraction", "{100 * float(bubble):.1f}", "{float(bubble):.1f}"),
        (
            "schedule: a stage's time as that of a rank's layers",
            "v * (slot.end - slot.start)",
            "(slot.end - slot.start)",
        ),
    ),
    *mistakes(
        "visualize/style.py",
        "visualize/test_pictures.py visualize/test_memory.py",
        ("style: a KiB has 1000 bytes", '("KiB", 2**10)', '("KiB", 10**3)'),
        ("style: dark letters on dark colours", "lightness(colour) < 55", "lightness(colour) < 5"),
    ),
    *mistakes(
        "visualize/plan.py",
        "visualize/test_agreement.py",
        ("plan: seconds next to milliseconds", '1000 * row["predicted_seconds"]', 'row["predicted_seconds"]'),
        ("plan: the fastest layouts last", 'key=lambda row: -row["seconds"]', 'key=lambda row: row["seconds"]'),
    ),
    *mistakes(
        "visualize/message_time.py",
        "visualize/test_message_time.py",
        ("messages: one on its way while the rank computes", "max(free, left)", "left"),
    ),
    *mistakes(
        "visualize/shares.py",
        "visualize/test_shares.py",
        ("shares: spans that overlap count twice", "reached = stop", "reached = begin"),
        ("shares: what lies outside of the steps shown counts", "max(start, reached), min(stop, end)", "start, stop"),
        ("shares: waiting counts as communicating", "(one.start + one.wait, one.end)", "(one.start, one.end)"),
        ("shares: neither is what is not computed", "covered(computing + waiting + communicating", "covered(computing"),
    ),
    *mistakes(
        "visualize/arrows.py",
        "visualize/test_arrows.py",
        ("arrows: the axes with most messages first", "lambda track: (count[", "lambda track: (-count["),
        ("arrows: collectives beside messages of single ranks", "    if single:", "    if not single:"),
    ),
    *mistakes(
        "visualize/__main__.py",
        "visualize/test_names_and_sizes.py visualize/test_schedule_command.py",
        ("memory: always rank 0", "read_ledger(file, options.rank)", "read_ledger(file, 0)"),
        ("names: files of one stem are one run", "if len(set(names)) < len(names):", "if False:"),
        ("schedule: any number of ranks in a file", "len(chosen.ranks) > MOST_RANKS", "len(chosen.ranks) > MOST"),
    ),
    *mistakes(
        "visualize/style.py",
        "visualize/test_names_and_sizes.py",
        ("style: files of any size", "check_file(path, MOST_BYTES,", "check_file(path, math.inf,"),
        ("style: a large file without a word", "if size >= LONG:", "if False:"),
    ),
    *mistakes(
        "minipar/parallel/pipeline/schedule_file.py",
        "visualize/test_schedule_command.py",
        ("schedule: one blank line at a file's end", "while rows and not rows[-1]:", "if rows and not rows[-1]:"),
    ),
]
