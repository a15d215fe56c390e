"""Where the kernel counts what its OOM killer has ended, in each form of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cluster.oom_killer import oom_kills

V1_COUNTER = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_COUNTER = "low 0\nhigh 0\nmax 12\noom 5\noom_kill {}\noom_group_kill 1\n"


class Host:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def describe(self, mounts: str, own: str) -> None:
        (self.proc / "self" / "mountinfo").write_text(mounts.format(at=self.cgroups))
        (self.proc / "self" / "cgroup").write_text(own)

    def count(self, path: str, text: str) -> None:
        (self.cgroups / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cgroups / path).write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


V2 = "31 23 0:28 {root} {{at}} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:27 / {{at}} rw - tmpfs tmpfs rw,mode=755\n"
    "32 30 0:30 / {{at}}/cpu rw - cgroup cgroup rw,cpu\n"
    "35 30 0:32 {root} {{at}}/memory rw - cgroup cgroup rw,memory\n"
    "41 30 0:38 / {{at}}/unified rw - cgroup2 cgroup2 rw\n"
)


def test_v2_is_read_from_the_process_own_cgroup(host: Host) -> None:
    host.describe(V2.format(root="/"), "0::/user.slice/job\n")
    host.count("user.slice/job/memory.events", V2_COUNTER.format(3))
    host.count("user.slice/memory.events", V2_COUNTER.format(99))
    assert oom_kills(host.proc) == 3


def test_v2_without_the_memory_controller_is_counted_with_its_parent(host: Host) -> None:
    host.describe(V2.format(root="/"), "0::/user.slice/job\n")
    host.count("user.slice/memory.events", V2_COUNTER.format(4))
    assert oom_kills(host.proc) == 4


def test_v1_is_read_even_where_v2_is_mounted_beside_it(host: Host) -> None:
    host.describe(V1.format(root="/"), "4:memory:/job\n1:cpu:/other\n0::/\n")
    host.count("memory/job/memory.oom_control", V1_COUNTER.format(2))
    host.count("unified/memory.events", V2_COUNTER.format(99))
    assert oom_kills(host.proc) == 2


@pytest.mark.parametrize(("form", "file"), [(V1, "memory/memory.oom_control"), (V2, "memory.events")])
def test_a_container_sees_its_own_cgroup_at_the_mount(host: Host, form: str, file: str) -> None:
    host.describe(form.format(root="/docker/abc"), "4:memory:/docker/abc\n0::/docker/abc\n")
    host.count(file, V2_COUNTER.format(6))
    assert oom_kills(host.proc) == 6


def test_outside_of_any_cgroup_the_hosts_own_count_is_read(host: Host) -> None:
    host.describe(V2.format(root="/"), "0::/\n")
    (host.proc / "vmstat").write_text("nr_free_pages 1\noom_kill 8\ndrop_pagecache 0\n")
    assert oom_kills(host.proc) == 8


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill max\n", "low 0\n"])
def test_what_cannot_be_read_counts_nothing(host: Host, text: str) -> None:
    assert oom_kills(host.proc) == 0, "no files at all"
    host.describe(V2.format(root="/"), "0::/\n")
    host.count("memory.events", text)
    assert oom_kills(host.proc) == 0


def test_this_host_has_a_count() -> None:
    first = oom_kills()
    assert first >= 0
    assert oom_kills() >= first
