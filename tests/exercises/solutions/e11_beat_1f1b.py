def schedule(p, m):
    lists = []
    for rank in range(p):
        forwards, inputs, weights = 0, 0, 0
        warm_up = min(m, p - rank)
        actions = [f"F{i}" for i in range(warm_up)]
        forwards = warm_up
        while weights < m:
            if inputs < m:
                actions.append(f"I{inputs}")
                inputs += 1
            if inputs == m or inputs - weights > rank:
                actions.append(f"W{weights}")
                weights += 1
            if forwards < m and inputs == forwards - warm_up + 1:
                actions.append(f"F{forwards}")
                forwards += 1
        lists.append(actions)
    return lists
