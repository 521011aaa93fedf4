"""Grader of exercise 20, three broken runs to diagnose. It holds the answers: read no further before you have yours."""

from chapters.exercises.grading import call, require

ANSWERS = {"1": (0, "gradient", 4), "2": (1, "gradient", 6), "3": (0, "update", 8)}
PARTS = ("the first step that differs", "the quantity that compare names first", "the cause")
WHERE = {
    "1": "which parameters have the factor that compare names, and which size of the layout is it?",
    "2": "step 0 is right in everything; what does a step keep from the one before it?",
    "3": "the gradients of step 0 are equal, and its updates are not; which parameters are those?",
}
SOLVED = "You have named three causes from records alone, without the code of the runs (chapter 14)."


def grade(solution):
    found = call(solution, solution.diagnose)
    require(isinstance(found, dict), "return a dict with an answer for each of the runs")
    for name, right in ANSWERS.items():
        require(name in found, f"run {name} has no answer")
        require(
            isinstance(found[name], tuple) and len(found[name]) == len(PARTS),
            f"run {name}: the answer is a tuple of the step, the quantity and the number of the cause",
        )
        step, quantity, _ = found[name]
        require(step == right[0], f"run {name}, {PARTS[0]}: it is not {step}; compare counts steps from 0")
        require(quantity == right[1], f"run {name}, {PARTS[1]}: it is not {quantity}; read compare's second line")
        require(found[name] == right, f"run {name}, {PARTS[2]}: {WHERE[name]}")
