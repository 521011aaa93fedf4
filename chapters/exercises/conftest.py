"""After the tests: a line for each exercise."""


def pytest_terminal_summary(terminalreporter):
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, ())]
    lines = {
        report.nodeid.split("[")[-1].rstrip("]"): report for report in reports if "test_exercise[" in report.nodeid
    }
    if not lines:
        return
    terminalreporter.section(f"{sum(report.passed for report in lines.values())} of {len(lines)} exercises solved")
    for name, report in sorted(lines.items()):
        solved = f"solved: {dict(report.user_properties).get('reached')}"
        text = solved if report.passed else report.longreprtext.strip().replace("\n", "\n" + " " * 28)
        terminalreporter.write_line(f"{name:28}{text}", green=report.passed)
