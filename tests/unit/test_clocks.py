"""Only what is shown to people, or compared with other machines' clocks, is read off the wall clock."""

import ast
from pathlib import Path

import prefixroute

# What is dated there: lines of the access log, the start of a recording, KV events by the publisher's clock, when a
# configuration was read, answers of our own, and AWS's signatures and sessions, whose times are told in its terms.
WALL_CLOCK = {
    "access_log.py",
    "exact_tokens/template.py",
    "http/response.py",
    "kv_events/service.py",
    "metrics/facts.py",
    "recording/recorder.py",
    "sagemaker/service.py",
}
WALL_NAMES = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def test_no_deadline_and_no_age_is_taken_off_the_wall_clock() -> None:
    root = Path(prefixroute.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        # The simulated servers are no part of the router.
        if name.startswith(("demo/", "testing/", "sim/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in WALL_NAMES:
                    found.add(name)
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "time_ns"}, name
    assert found == WALL_CLOCK
