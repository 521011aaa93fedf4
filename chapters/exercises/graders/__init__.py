"""A grader for each exercise: grade(solution) raises a Hint that says what is wrong, or returns."""
