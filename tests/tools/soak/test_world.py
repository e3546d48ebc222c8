"""The processes of a soak."""

from pathlib import Path

from penstock.tools.soak.world import World


# Each has a connection to the store of the process that starts them. On a busy machine, what that
# holds was counted before one in place of a lost one had come, and its connection called a leak.
def test_new_processes_are_connected_before_open_files_are_counted() -> None:
    def count() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    with World(2) as world:
        world.wait_until_ready()
        before = count()
        world.replace(1)
        world.wait_until_ready()
        assert count() >= before
