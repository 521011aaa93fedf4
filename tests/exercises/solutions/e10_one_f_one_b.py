def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        warm_up = min(m, p - rank - 1)
        actions = [f"F{i}" for i in range(warm_up)]
        for i in range(m - warm_up):
            actions += [f"F{warm_up + i}", f"B{i}"]
        actions += [f"B{i}" for i in range(m - warm_up, m)]
        lists.append(actions)
    return lists
