"""Weights through a process group: between real processes that may die, stop or be late."""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch.distributed as dist
from torch import Tensor
from transport_cases import (
    HASTY,
    SETTINGS,
    answer,
    broadcast_with_torch,
    digest,
    many_megabytes,
    process,
    receive_all,
    receive_one_part_and,
    receive_with_torch,
    send_many_megabytes,
    some_tensors,
)

from tailrace.contracts.weights import Address, Link, Weights, new_link
from tailrace.drivers.weights import process_group
from tailrace.drivers.weights.process_group import PIECE_BYTES, ProcessGroupSender
from tailrace.drivers.weights.settings import ProcessGroupSettings
from tailrace.drivers.weights.tensors import manifest
from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.errors import ConfigError, NotJoined, TransferFailed


@pytest.fixture
def sender() -> Iterator[ProcessGroupSender]:
    opened = ProcessGroupSender(SETTINGS)
    yield opened
    opened.close()


@pytest.fixture
def hasty() -> Iterator[ProcessGroupSender]:
    opened = ProcessGroupSender(HASTY)
    yield opened
    opened.close()


def test_two_engines_receive_every_bit_over_links_that_stay(sender: ProcessGroupSender) -> None:
    links = [new_link("engine-0"), new_link("engine-1")]
    with (
        process(receive_all, 1) as (_, one),
        process(receive_all, 1) as (_, two),
        ThreadPoolExecutor() as pool,
    ):
        for version in (1, 2, 3):
            tensors = some_tensors(version)
            weights = sender.store(tensors, version)
            for connection, link in zip((one, two), links, strict=True):
                connection.send((weights, link))
            list(pool.map(sender.send, [version] * 2, links))
            assert [answer(one), answer(two)] == [digest(tensors)] * 2
        assert sorted(sender._connections._groups) == sorted(links)


def test_all_ranks_of_an_engine_receive_the_same(sender: ProcessGroupSender) -> None:
    weights, link = sender.store(some_tensors(0), 1), new_link("engine-0", num_ranks=2)
    with process(receive_all, 1) as (_, one), process(receive_all, 2) as (_, two):
        one.send((weights, link))
        two.send((weights, link))
        sender.send(1, link)
        assert answer(one) == answer(two) == digest(some_tensors(0))


def test_three_engines_receive_every_bit_of_messages_of_several_pieces_over_one_link(
    sender: ProcessGroupSender,
) -> None:
    tensors, link = many_megabytes(), new_link("engine-0", "engine-1", "engine-2", num_ranks=3)
    assert max(tensor.nbytes for tensor in tensors.values()) > PIECE_BYTES
    with ExitStack() as stack:
        engines = [stack.enter_context(process(receive_all, 1))[1] for _ in link.engines]
        for version in (1, 2):
            weights = sender.store(tensors, version)
            for rank, engine in enumerate(engines, 1):
                engine.send((weights, link._replace(first_rank=rank)))
            sender.send(version, link)
            assert [answer(engine) for engine in engines] == [digest(tensors)] * 3
        assert list(sender._connections._groups) == [link]


def test_the_ranks_that_do_not_come_are_named_and_the_others_are_let_go(hasty: ProcessGroupSender) -> None:
    weights, link = hasty.store(some_tensors(0), 1), new_link("engine-0", "engine-1", num_ranks=2)
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(WeightReceiver().receive, weights, link)
        with pytest.raises(NotJoined, match=r"engine-1 did not take version 1 .*: rank 2 did not") as left:
            hasty.send(1, link)
        assert left.value.ranks == (2,)
        with pytest.raises(TransferFailed, match="did not send version 1: the transfer was given up"):
            receiving.result()


def test_a_transfer_that_is_given_up_ends_at_both_ends(sender: ProcessGroupSender) -> None:
    weights, link = sender.store(some_tensors(0), 1), new_link("engine-0", "engine-1", num_ranks=2)
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(WeightReceiver().receive, weights, link)
        sending = pool.submit(sender.send, 1, link)
        sender.give_up(link)
        for end in (receiving, sending):
            with pytest.raises(TransferFailed, match="the transfer was given up"):
                end.result()


def test_tensors_that_change_after_the_publication_are_sent_as_they_were(sender: ProcessGroupSender) -> None:
    tensors, link = some_tensors(0), new_link("engine-0")
    weights = sender.store(tensors, 1)
    for tensor in tensors.values():
        tensor.zero_()
    with process(receive_all, 1) as (_, connection):
        connection.send((weights, link))
        sender.send(1, link)
        assert answer(connection) == digest(some_tensors(0))


def test_the_last_two_versions_can_be_sent_any_number_of_times(sender: ProcessGroupSender) -> None:
    published = [sender.store(some_tensors(version), version) for version in range(3)]
    link = new_link("engine-0")
    with process(receive_all, 1) as (_, connection):
        for version in (2, 1, 2):
            connection.send((published[version], link))
            sender.send(version, link)
            assert answer(connection) == digest(some_tensors(version))


def test_a_version_that_is_no_longer_kept_fails_at_both_ends_at_once(sender: ProcessGroupSender) -> None:
    published = [sender.store(some_tensors(version), version) for version in range(3)]
    link = new_link("engine-0")
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(WeightReceiver().receive, published[0], link)
        with pytest.raises(TransferFailed, match="version 0 of the weights is no longer kept for engine-0"):
            sender.send(0, link)
        with pytest.raises(TransferFailed, match=r"the trainer at gloo://127\.0\.0\.1:\d+/.* version 0: "):
            receiving.result()


def test_an_engine_that_dies_in_mid_transfer_is_named_and_its_next_life_gets_the_weights(
    sender: ProcessGroupSender,
) -> None:
    tensors = many_megabytes()
    weights, link = sender.store(tensors, 1), new_link("engine-0")
    with (
        process(receive_one_part_and, signal.SIGKILL, weights, link) as (engine, _),
        pytest.raises(TransferFailed, match="engine-0 did not take version 1 of the weights: "),
    ):
        sender.send(1, link)
    assert engine.exitcode == -signal.SIGKILL
    link = new_link("engine-0")
    with process(receive_all, 1) as (_, connection):
        connection.send((weights, link))
        sender.send(1, link)
        assert answer(connection) == digest(tensors)


def test_an_engine_that_stops_in_mid_transfer_is_named_after_the_time_limit(
    hasty: ProcessGroupSender,
) -> None:
    weights, link = hasty.store(many_megabytes(), 1), new_link("engine-0")
    with (
        process(receive_one_part_and, signal.SIGSTOP, weights, link),
        pytest.raises(TransferFailed, match="engine-0 did not take version 1 of the weights: "),
    ):
        hasty.send(1, link)


def test_an_engine_that_never_connects_is_named_after_the_time_limit(hasty: ProcessGroupSender) -> None:
    hasty.store(some_tensors(0), 1)
    with pytest.raises(TransferFailed, match="engine-7 did not take version 1 of the weights: "):
        hasty.send(1, new_link("engine-7"))


def test_a_trainer_that_dies_in_mid_transfer_is_named_and_another_one_can_be_received_from(
    sender: ProcessGroupSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "LISTENS_S", 1.0)
    receiver, link = WeightReceiver(), new_link("engine-0")
    with process(send_many_megabytes, link) as (trainer, connection):
        weights = answer(connection)
        parts = receiver.parts(weights, link)
        assert next(parts).keys() == {"0"}
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TransferFailed, match=r"the trainer at gloo://\S+ did not send version 1: "):
            list(parts)
        with pytest.raises(TransferFailed, match=r"the trainer at gloo://\S+ .*(refused|timed out)"):
            receiver.receive(weights, new_link("engine-0"))
    weights, link = sender.store(some_tensors(5), 2), new_link("engine-0")
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, 2, link)
        assert digest(receiver.receive(weights, link)) == digest(some_tensors(5))
        sending.result()


def test_a_trainer_that_does_not_send_is_named_after_the_time_limit(hasty: ProcessGroupSender) -> None:
    weights = hasty.store(some_tensors(0), 1)
    with pytest.raises(TransferFailed, match=r"the trainer at gloo://\S+ did not send version 1: .*timeout"):
        WeightReceiver().receive(weights, new_link("engine-0"))


def test_links_have_numbers_of_their_own() -> None:
    one, two = new_link("engine-0"), new_link("engine-0", "engine-1", num_ranks=4)
    assert one.number != two.number
    assert two == Link(("engine-0", "engine-1"), two.number, 4)


def test_an_address_is_written_as_it_is_read() -> None:
    text = "gloo://127.0.0.1:4123/?bucket_bytes=1024&timeout_s=2.5"
    address = Address("gloo", "127.0.0.1", 4123, 1024, 2.5)
    assert (Address.parse(text), str(address)) == (address, text)
    assert str(Address.parse("nccl://[fe80::1]:1/?bucket_bytes=1&timeout_s=1")).startswith(
        "nccl://[fe80::1]:1/"
    )


@pytest.mark.parametrize(
    "location", ["mpi://127.0.0.1:1/?bucket_bytes=1&timeout_s=1", "gloo://", "gloo://h/"]
)
def test_a_location_that_is_no_address_fails_the_transfer(location: str) -> None:
    with pytest.raises(TransferFailed, match="is not the address of a process group"):
        WeightReceiver().receive(Weights(1, location), new_link("engine-0"))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"weights\.host = '192\.0\.2\.1': this machine cannot listen on it"
    ):
        ProcessGroupSender(ProcessGroupSettings(host="192.0.2.1"))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_backend_that_torch_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights\.backend = 'nccl': this torch was built without it"):
        ProcessGroupSender(ProcessGroupSettings(backend="nccl"))


class Nccl:
    """Notes how NCCL is used, where there is none. The peer never comes."""

    made: ClassVar[list["Nccl"]] = []
    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        self.place, self.timeout = (rank, size), options._timeout
        self.environment = {name: value for name, value in os.environ.items() if "TORCH_NCCL" in name}
        self.sent: list[Tensor] = []
        self.num_aborted = 0
        self.made.append(self)

    def broadcast(self, data: Tensor, root: int) -> "Nccl":
        self.sent.append(data)
        return self

    def wait(self, timeout: timedelta) -> None:
        assert timeout == self.timeout
        raise RuntimeError("the collective timed out")

    def abort(self) -> None:
        self.num_aborted += 1


def test_nccl_gets_the_process_s_device_and_one_bucket_raises_its_errors_and_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A "meta" tensor stands for one on a GPU."""
    for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "")  # so that it is as before after the test
        monkeypatch.delenv(f"TORCH_NCCL_{name}")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    sender = ProcessGroupSender(
        ProcessGroupSettings(backend="nccl", bucket_bytes=1000, message_timeout_s=9), "meta"
    )
    link, address = new_link("engine-0"), sender.store(some_tensors(0), 1)
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(WeightReceiver(device="meta").receive, address, link)
        with pytest.raises(
            TransferFailed, match=r"engine-0 did not take version 1 .*: the collective timed out"
        ):
            sender.send(1, link)
        with pytest.raises(TransferFailed, match="did not send version 1: the collective timed out"):
            receiving.result()
    assert sorted(group.place for group in Nccl.made) == [(0, 2), (1, 2)]
    for group in Nccl.made:
        assert group.timeout == timedelta(seconds=9)
        # Without these torch ends the process in place of an error.
        assert group.environment == {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }
        assert [data.device.type for data in group.sent] == ["meta"]
        assert group.sent[0].numel() <= 1000
        assert group.num_aborted == 1


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_on_loopback_nothing_listens_to_other_machines(sender: ProcessGroupSender) -> None:
    weights, link = sender.store(some_tensors(0), 1), new_link("engine-0")
    with process(receive_all, 1) as (_, connection):
        connection.send((weights, link))
        sender.send(1, link)
        answer(connection)
        links = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
        sockets = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        ]
        listening = {
            fields[1].partition(":")[0]
            for fields in sockets
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links
        }
        assert listening == {"0100007F"}


def test_a_standalone_link_is_a_group_of_torch_distributed_whose_engine_may_be_any(
    sender: ProcessGroupSender,
) -> None:
    links = [new_link(f"engine-{number}", standalone=True) for number in range(2)]
    addresses = [sender.rendezvous(link) for link in links]
    assert addresses[0].port != addresses[1].port
    assert sender.rendezvous(links[0]) == addresses[0], "it stays where it is"
    for version in (1, 2):
        tensors = some_tensors(version)
        weights = sender.store(tensors, version)
        for link in links:
            address = sender.rendezvous(link)
            if version == 2:  # a new engine, a new group
                link = new_link(*link.engines, standalone=True)
                address = sender.rendezvous(link)
                assert address not in addresses
            with process(receive_with_torch, address.port, weights.tensors, 1, 2) as (_, engine):
                sender.send(version, link)
                assert answer(engine) == digest(tensors)


def test_engines_that_may_be_any_are_ranks_of_one_standalone_group(sender: ProcessGroupSender) -> None:
    tensors, link = some_tensors(3), new_link("engine-0", "engine-1", num_ranks=2, standalone=True)
    weights = sender.store(tensors, 1)
    ends = [link, link._replace(first_rank=2)]
    (port,) = {sender.rendezvous(end).port for end in ends}
    with (
        process(receive_with_torch, port, weights.tensors, 1, 3) as (_, one),
        process(receive_with_torch, port, weights.tensors, 2, 3) as (_, two),
    ):
        sender.send(1, link)
        assert answer(one) == answer(two) == digest(tensors)


def test_a_trainer_of_torch_distributed_sends_to_the_ranks_of_an_engine_from_their_offset_on() -> None:
    tensors = some_tensors(5)
    with process(broadcast_with_torch, 4) as (_, trainer), ThreadPoolExecutor() as pool:
        port = answer(trainer)
        trainer.send(tensors)
        address = Address("gloo", "127.0.0.1", port, bucket_bytes=0, timeout_s=20.0)
        first, weights = Link(("one",), 1, 3, standalone=True), Weights(1, str(address), manifest(tensors))
        second = first._replace(engines=("two",), first_rank=2)
        receivers = [WeightReceiver(1), WeightReceiver(1), WeightReceiver(2)]
        arrived = pool.map(lambda each, link: each.receive(weights, link), receivers, (first, second, second))
        assert [digest(each) for each in arrived] == [digest(tensors)] * 3


def test_a_trainer_that_never_comes_to_the_group_is_a_transfer_that_failed() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = Address("gloo", "127.0.0.1", silent.getsockname()[1], bucket_bytes=0, timeout_s=0.5)
        with pytest.raises(
            TransferFailed, match=r"the process group at gloo://127.0.0.1:\d+/.* was not made"
        ):
            WeightReceiver().connect(str(address), Link(("engine",), 1, 1, standalone=True))
