"""The controller's half of transfers of weights. Engines that load a version within GATHER_S share one.

If one of them dies, the others get transfers of their own, and the next shared one is without it. An engine
that does not come to a shared transfer gets its own for as long as its process lives. What ends the waits is
in process_group.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from tailrace.clock import waiting
from tailrace.contracts.weights import Link, Send, Weights, new_link, send_and_load
from tailrace.errors import EngineDied, NotJoined, TailraceError, TransferFailed, say

GATHER_S = 0.02
"""Seconds in which the engines of a transfer ask for it. They go on generating."""

GiveUp = Callable[[Link], Awaitable[None]]
Receive = Callable[[Weights, Link], Awaitable[None]]
Find = Callable[[int], Awaitable[Weights]]


@dataclass(eq=False, slots=True)
class Receiver:
    """One process, or server, of an engine. `num_ranks`: processes that receive all tensors. `standalone`:
    its links have addresses of their own. `alone`: it gets transfers of its own. `link`: over which it is
    connected."""

    engine: str
    num_ranks: int = 1
    standalone: bool = False
    alone: bool = False
    link: Link | None = None


class _Transfer:
    """A transfer of a version to several engines."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.receivers, self.begun = weights, list[Receiver](), asyncio.Event()
        self.links: list[Link] = []
        """The end of each receiver. The first one is the trainer's, too."""
        self.sending: asyncio.Future[None]
        self.given_up = False

    def connect(self) -> None:
        """Choose the link: that over which all of them, and no others, are connected, or a new one."""
        first, names = self.receivers[0], tuple(each.engine for each in self.receivers)
        kept, numbers = first.link, {each.link and each.link.number for each in self.receivers}
        if kept is None or kept.engines != names or len(numbers) > 1:
            total = sum(each.num_ranks for each in self.receivers)
            kept = new_link(*names, num_ranks=total, standalone=first.standalone)
        self.links = [kept]
        for each in self.receivers[:-1]:
            last = self.links[-1]
            self.links.append(last._replace(first_rank=last.first_rank + each.num_ranks))

    def end_of(self, receiver: Receiver) -> Link:
        return self.links[self.receivers.index(receiver)]

    def missed(self, receiver: Receiver) -> str:
        """Why the trainer did not wait for an engine; empty: it came, or another one failed."""
        error = None if self.sending.cancelled() else self.sending.exception()
        ranks = range(first := self.end_of(receiver).first_rank, first + receiver.num_ranks)
        return str(error) if isinstance(error, NotJoined) and {*ranks} & {*error.ranks} else ""


class Transfers:
    """The transfers of one trainer. `send`: its half. `give_up`: ends what its half over a link waits for;
    None: engines share no transfers. `find`: returns a version as the trainer's present processes have it;
    None: as it was published."""

    def __init__(self, send: Send, give_up: GiveUp | None = None, find: Find | None = None) -> None:
        self._send, self._give_up, self._find = send, give_up, find
        self._gathering: _Transfer | None = None

    async def load(self, weights: Weights, receiver: Receiver, receive: Receive) -> None:
        """Transfer weights to an engine. Raises a TransferFailed if they did not arrive, and what `receive`
        raises."""
        if self._find:
            weights = await self._find(weights.version)
        if self._give_up and weights.is_streamed and not receiver.alone:
            transfer = await self._gathered(weights, receiver)
            if len(transfer.receivers) > 1:
                try:
                    return await self._take_part(transfer, receiver, receive)
                except TransferFailed as failed:
                    why = str(failed) if isinstance(failed, NotJoined) else transfer.missed(receiver)
                if why:
                    receiver.alone = True
                    say(f"warning: {receiver.engine} gets transfers of its own: {why}")
        link, receiver.link = receiver.link, None
        if link is None or link.engines != (receiver.engine,):
            ranks = receiver.num_ranks
            link = new_link(receiver.engine, num_ranks=ranks, standalone=receiver.standalone)
        await send_and_load(self._send(weights, link), receive(weights, link))
        receiver.link = link

    async def _gathered(self, weights: Weights, receiver: Receiver) -> _Transfer:
        """Wait for the engines that ask at the same time."""
        transfer = self._gathering
        if transfer is None or transfer.weights is not weights:
            self._gathering = transfer = _Transfer(weights)
            asyncio.get_running_loop().call_later(GATHER_S, self._begin, transfer)
        transfer.receivers.append(receiver)
        with waiting(f"engines that take version {weights.version} with {receiver.engine}"):
            await transfer.begun.wait()
        return transfer

    def _begin(self, transfer: _Transfer) -> None:
        if self._gathering is transfer:
            self._gathering = None
        if len(transfer.receivers) > 1:
            transfer.connect()
            transfer.sending = asyncio.ensure_future(self._send(transfer.weights, transfer.links[0]))
            # asyncio reports an error that nobody looks at
            transfer.sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        transfer.begun.set()

    async def _take_part(self, transfer: _Transfer, receiver: Receiver, receive: Receive) -> None:
        """Receive. The failure of another engine does not concern one that has the weights."""
        receiver.link, link = None, transfer.end_of(receiver)
        try:
            await receive(transfer.weights, link)
        except (TransferFailed, EngineDied):
            if self._give_up and not transfer.given_up:
                transfer.given_up = True
                with suppress(TailraceError):  # the trainer has ended
                    await self._give_up(transfer.links[0])
            await asyncio.wait([transfer.sending])
            raise

        def keep(sending: asyncio.Future[None]) -> None:
            receiver.link = None if sending.cancelled() or sending.exception() else link

        transfer.sending.add_done_callback(keep)
