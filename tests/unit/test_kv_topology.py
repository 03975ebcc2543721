"""Where GPUs' workers, network cards and arenas are put, on machines that are only files."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_kvstore.device import placing
from headrace_kvstore.device.topology import Placement, Roots, Topology, cpu_list, place, read
from tests.support.sysfs import Machine, dgx_h100, gh200, laptop

ALL = range(224)
LOCAL = frozenset([*range(56), *range(112, 168)])


@pytest.fixture
def dgx(tmp_path: Path) -> Topology:
    return read(dgx_h100(tmp_path).roots)


def test_each_gpu_of_a_dgx_has_the_card_below_its_own_switch(dgx: Topology) -> None:
    found = [place(dgx, gpu.bus_id, ALL, None).net_devices for gpu in dgx.gpus]
    assert found == [f"mlx5_{n}:1" for n in range(8)]


def test_its_workers_run_on_the_socket_of_their_gpu(dgx: Topology) -> None:
    placed = [place(dgx, gpu.bus_id, ALL, None) for gpu in dgx.gpus]
    assert [each.node for each in placed] == [0] * 4 + [1] * 4
    assert placed[0].cpus == LOCAL and placed[7].cpus == frozenset(ALL) - LOCAL


def test_its_arena_lies_on_both_sockets_in_turns(dgx: Topology) -> None:
    assert dgx.arena_nodes() == (0, 1)


def test_the_driver_s_way_to_write_an_address_is_understood(dgx: Topology) -> None:
    bus_id = dgx.gpus[3].bus_id
    assert dgx.gpu("0000" + bus_id.upper()) == dgx.gpu(bus_id) == dgx.gpus[3]
    assert place(dgx, "", ALL, None) == place(dgx, "0000:99:00.0", ALL, None) == Placement()


@pytest.mark.parametrize("allowed", [range(4), LOCAL])
def test_a_process_that_somebody_has_bound_stays_there(dgx: Topology, allowed: range) -> None:
    placed = place(dgx, dgx.gpus[0].bus_id, allowed, None)
    assert placed == Placement(net_devices="mlx5_0:1")


@pytest.mark.parametrize("chosen", ["mlx5_7:1", "all", ""])
def test_network_devices_that_somebody_has_chosen_stay(dgx: Topology, chosen: str) -> None:
    assert place(dgx, dgx.gpus[0].bus_id, ALL, chosen).net_devices == ""


def test_a_container_with_the_gpus_of_one_socket_keeps_its_arena_there(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.node(0, "0-3")
    made.node(1, "4-7")
    made.gpu("pci0000:01/0000:01:01.0/0000:02:00.0", 0, mine=False)
    made.gpu("pci0000:11/0000:11:01.0/0000:12:00.0", 1)
    made.nic("mlx5_0", "pci0000:11/0000:11:01.0/0000:13:00.0", 1, mine=False)
    made.nic("mlx5_1", "pci0000:11/0000:11:01.0/0000:14:00.0", 1, state="1: DOWN")
    found = read(made.roots)
    assert [gpu.bus_id for gpu in found.gpus] == ["0000:12:00.0"]
    assert (found.arena_nodes(), found.nics) == ((1,), ())
    assert place(found, "0000:12:00.0", range(8), None) == Placement(frozenset(range(4, 8)), 1)


def test_cards_that_are_equally_near_are_all_named(tmp_path: Path) -> None:
    made = laptop(tmp_path)
    switch = "pci0000:01/0000:01:01.0/0000:02:00.0"
    made.gpu(f"{switch}/0000:03:00.0", 0)
    made.nic("mlx5_0", f"{switch}/0000:04:00.0", 0)
    made.nic("mlx5_1", f"{switch}/0000:05:00.0", 0)
    assert place(read(made.roots), "0000:03:00.0", range(8), None) == Placement(
        net_devices="mlx5_0:1,mlx5_1:1"
    )


def test_a_gh200_has_one_node_with_processors_so_nothing_is_bound(tmp_path: Path) -> None:
    found = read(gh200(tmp_path).roots)
    assert [gpu.node for gpu in found.gpus] == [0] and len(found.nics) == 2
    assert found.arena_nodes() == ()
    assert place(found, "0009:01:00.0", range(72), None) == Placement(), "UCX chooses the card"


def test_on_a_laptop_nothing_changes(tmp_path: Path) -> None:
    found = read(laptop(tmp_path).roots)
    assert found == Topology({0: frozenset(range(8))}, (), ())
    assert found.arena_nodes() == ()


def test_a_gpu_whose_node_the_firmware_does_not_tell_decides_nothing(tmp_path: Path) -> None:
    made = dgx_h100(tmp_path)
    made.gpu("pci0000:e1/0000:e1:01.0/0000:e2:00.0", -1)
    found = read(made.roots)
    assert found.arena_nodes() == ()
    assert place(found, "0000:e2:00.0", ALL, None) == Placement()


def test_mig_instances_are_counted_and_are_where_their_card_is(tmp_path: Path) -> None:
    made = laptop(tmp_path)
    made.gpu("pci0000:01/0000:01:01.0/0000:02:00.0", 0, instances=7)
    assert [gpu.instances for gpu in read(made.roots).gpus] == [7]


def test_where_the_kernel_shows_nothing_there_is_nothing(tmp_path: Path) -> None:
    assert read(Roots(tmp_path, tmp_path, tmp_path)) == Topology({}, (), ())
    assert cpu_list("0-2,5") == {0, 1, 2, 5} and cpu_list("x") == cpu_list("") == frozenset()


class Driver:
    """CUDA's library, as far as it is asked."""

    status = 0

    def cuDeviceGetPCIBusId(self, text: ctypes.Array[ctypes.c_char], size: int, device: int) -> int:
        text.value = b"0000:%02x:00.0" % device
        return self.status


def test_the_driver_tells_a_devices_address() -> None:
    driver = Driver()
    assert placing.pci_address(27, driver) == "0000:1b:00.0"
    driver.status = 100
    assert placing.pci_address(27, driver) == ""
    assert placing.pci_address(27, object()) == ""


@pytest.fixture
def shared() -> Iterator[mmap.mmap]:
    fd = os.memfd_create("topology")
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as memory:
        os.close(fd)
        yield memory


needs_policies = pytest.mark.skipif(placing._policy() != 0, reason="no memory policies here")


@needs_policies
@pytest.mark.parametrize(
    ("nodes", "mode"), [([0], placing.PREFERRED), ([0, 0], placing.INTERLEAVED)]
)
def test_the_kernel_is_told_where_the_pages_of_a_shared_file_lie(
    shared: mmap.mmap, tmp_path: Path, nodes: list[int], mode: int
) -> None:
    assert placing.spread(shared, tmp_path, nodes)
    found, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    held = ctypes.c_char.from_buffer(shared)
    at, of_address = ctypes.c_void_p(ctypes.addressof(held)), 2
    bits = ctypes.c_ulong(1024)
    assert placing._call("get_mempolicy", ctypes.byref(found), mask, bits, at, of_address) == 0
    assert (found.value, mask[0]) == (mode, 1)
    del held
    shared[:] = bytes(len(shared))


def test_without_gpus_the_kernel_is_not_asked(
    shared: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_told", lambda *_: pytest.fail("it is"))
    assert placing.spread(shared, tmp_path, []) == ""
    monkeypatch.setattr(placing, "mounted_with_policy", lambda _: True)
    assert placing.spread(shared, tmp_path, [0, 1]) == "", "somebody has chosen"


def test_a_policy_of_this_process_s_user_stays_and_its_own_does_not_count(
    shared: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(placing, "_told", lambda name, *_: bool(told.append(name)) or True)
    monkeypatch.setattr(placing, "_policy", lambda: placing.INTERLEAVED)
    monkeypatch.setattr(placing, "_own_policy", [])
    placing.apply(Placement(frozenset(os.sched_getaffinity(0)), 0))
    assert placing.spread(shared, tmp_path, [0, 1]) == "" and not told
    policies = iter([0, *[placing.PREFERRED] * 2])
    monkeypatch.setattr(placing, "_policy", lambda: next(policies))
    placing.apply(Placement(frozenset(os.sched_getaffinity(0)), 0))
    assert placing.spread(shared, tmp_path, [0, 1]) == "interleaved over NUMA nodes 0, 1"
    assert told == ["set_mempolicy", "mbind"]


def test_a_mount_with_a_policy_is_seen(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw,mpol=interleave:0-1 0 0\n")
    assert placing.mounted_with_policy(Path("/dev/shm"), mounts)
    assert not placing.mounted_with_policy(Path("/tmp"), mounts)
    assert not placing.mounted_with_policy(Path("/tmp"), tmp_path / "none")


def test_all_threads_of_a_worker_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, bound = os.sched_getaffinity(0), {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: cpus}))
    monkeypatch.setattr(placing, "_told", lambda *_: True)
    monkeypatch.setattr(placing, "_own_policy", [])
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    placing.apply(Placement(frozenset(before), 0, "mlx5_0:1"))
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert set(bound.values()) == {frozenset(before)} and os.getpid() in bound
    bound.clear()
    placing.apply(Placement())
    assert not bound


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement(), "stays where it is"),
        (Placement(frozenset({1}), 1), "on the processors and memory of NUMA node 1"),
        (Placement(net_devices="mlx5_0:1"), "UCX_NET_DEVICES=mlx5_0:1"),
    ],
)
def test_what_was_done_is_said(placement: Placement, said: str) -> None:
    assert placing.describe(placement) == said
