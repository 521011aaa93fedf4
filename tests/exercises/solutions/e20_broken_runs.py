def diagnose():
    return {"1": (0, "gradient", 4), "2": (1, "gradient", 6), "3": (0, "update", 8)}
