def first_broken(timetable):
    starts = {(r, action): start for r, row in enumerate(timetable) for start, action in row}
    broken = []
    for r, row in enumerate(timetable):
        free = 0
        for start, action in row:
            needs = [(r - 1, action)]
            if action[0] == "B":
                needs = [(r, "F" + action[1:]), (r + 1, action)]
            ready = max([free] + [starts[need] + 1 for need in needs if 0 <= need[0] < len(timetable)])
            if start < ready:
                broken.append((start, r, action))
            free = start + 1
    return min(broken, default=None)


def least_time(forward, backward, m):
    times = []
    for r in range(len(forward)):
        times.append(sum(forward[:r]) + m * (forward[r] + backward[r]) + sum(backward[:r]))
    return max(times)
