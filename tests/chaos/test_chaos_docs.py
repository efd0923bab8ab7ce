"""docs/faults.md shows the committed run, in which every fault happened and nothing failed."""

from table import PAGE, last_result, page_with


def test_the_page_shows_the_last_run():
    assert PAGE.read_text() == page_with(last_result())


def test_every_fault_of_the_last_run_happened_and_ended_well():
    faults = last_result()["faults"]
    assert len(faults) >= 30
    assert all(row["fired"] for row in faults), [row for row in faults if not row["fired"]]
    assert not [row for row in faults if row["outcome"].startswith("FAILED")]
    assert {
        "vanished host",
        "disk full",
        "out of memory",
        "read-only folder",
        "SIGKILL",
        "SIGSTOP",
        "SIGTERM",
        "soak",
    } <= {row["fault"] for row in faults}
