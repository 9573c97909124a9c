"""Virtual time: it jumps, it keeps order, and when nothing can happen it says who waits for what."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace import clock
from tailrace.errors import Stuck


def test_timers_of_one_moment_fire_in_the_order_they_were_set() -> None:
    woken: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(1.0)
        woken.append(number)

    async def main() -> None:
        await asyncio.gather(*(sleeper(number) for number in range(200)))

    clock.run(main(), virtual=True)
    assert woken == list(range(200))


def test_cancelled_timers_do_not_disturb_the_order_of_the_others() -> None:
    """asyncio rebuilds its heap when many timers are cancelled."""
    woken: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = [loop.call_at(1.0, woken.append, number) for number in range(1000)]
        for number, timer in enumerate(timers):
            if number % 7:
                timer.cancel()
        await asyncio.sleep(2.0)

    clock.run(main(), virtual=True)
    assert woken == list(range(0, 1000, 7))


def test_the_clock_shows_the_time_of_the_timer_exactly() -> None:
    times: list[float] = []

    async def main() -> None:
        for seconds in (0.1, 0.2, 1e6, 1e-6, 0.0):
            await asyncio.sleep(seconds)
            times.append(clock.now())

    clock.run(main(), virtual=True)
    assert times == [0.1, 0.1 + 0.2, 0.1 + 0.2 + 1e6, 0.1 + 0.2 + 1e6 + 1e-6, 0.1 + 0.2 + 1e6 + 1e-6]


def test_a_timer_of_many_days_is_one_jump() -> None:
    async def main() -> float:
        await asyncio.sleep(1e8)
        return clock.now()

    assert clock.run(main(), virtual=True) == 1e8


def test_stuck_names_who_waits_for_what_in_the_order_they_came() -> None:
    async def main() -> None:
        signal = clock.Signal()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(signal.wait("the miller"))
            tasks.create_task(signal.wait("the mill"))
            tasks.create_task(signal.wait("the miller"))

    with pytest.raises(Stuck, match=r"^t = 0\.000 s: every task waits: the miller; the mill$"):
        clock.run(main(), virtual=True)


def test_stuck_says_so_when_no_wait_is_named() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match=r"t = 2\.500 s: every task waits: no wait is named"):
        clock.run(main(), virtual=True)


def test_a_wait_is_forgotten_when_it_ends_or_is_cancelled() -> None:
    async def main() -> str:
        signal = clock.Signal()
        with clock.waiting("dawn"):
            cancelled = asyncio.ensure_future(signal.wait("rain"))
            await asyncio.sleep(1)
            assert clock.who_waits() == "dawn; rain"
            cancelled.cancel()
            await asyncio.sleep(1)
            assert clock.who_waits() == "dawn"
            assert clock.open_waits() == {"dawn": 0.0}
        signal.fire()
        return clock.who_waits()

    assert clock.run(main(), virtual=True) == "no wait is named"


def test_two_runs_in_one_process_know_only_their_own_waits() -> None:
    async def other() -> str:
        with clock.waiting("noon"):
            return clock.who_waits()

    async def main() -> tuple[str, str]:
        with clock.waiting("dawn"), ThreadPoolExecutor(1) as pool:
            return pool.submit(clock.run, other(), virtual=True).result(), clock.who_waits()

    assert clock.run(main(), virtual=True) == ("noon", "dawn")


def test_a_signal_wakes_everyone_in_the_order_they_came_and_once() -> None:
    woken: list[int] = []

    async def waiter(signal: clock.Signal, number: int) -> None:
        await signal.wait("a signal")
        woken.append(number)

    async def main() -> None:
        signal = clock.Signal()
        async with asyncio.TaskGroup() as tasks:
            waiters = [tasks.create_task(waiter(signal, number)) for number in range(5)]
            await asyncio.sleep(1)
            waiters[2].cancel()
            signal.fire()
            signal.fire()

    clock.run(main(), virtual=True)
    assert woken == [0, 1, 3, 4]


def test_an_exit_in_a_task_is_an_exception_of_that_task_and_the_others_go_on() -> None:
    async def leave() -> None:
        sys.exit("over")

    async def main() -> list[object]:
        other = asyncio.create_task(asyncio.sleep(0.01, "done"))
        caught: list[object] = []
        for task in (leave(), asyncio.wait_for(leave(), 5)):
            try:
                await asyncio.create_task(task)
            except SystemExit as why:
                caught.append(why.code)
        return [*caught, await other]

    assert clock.run(main(), virtual=False) == ["over", "over", "done"]


def test_an_exit_in_the_turn_in_which_the_loop_is_stopped_does_not_undo_the_stop() -> None:
    loop, late = clock.RealTimeLoop(), list[str]()
    loop.call_soon(loop.stop)
    loop.call_soon(sys.exit)
    loop.call_later(0.1, late.append, "the loop went on")
    loop.call_later(0.1, loop.stop)
    loop.run_forever()
    loop.close()
    assert late == []


def test_an_exit_of_the_main_task_is_that_of_the_process() -> None:
    async def leave() -> None:
        sys.exit(3)

    async def main() -> None:
        await asyncio.create_task(leave())

    with pytest.raises(SystemExit) as exit:
        clock.run(main(), virtual=False)
    assert exit.value.code == 3


def test_in_live_time_a_wait_is_no_error_and_the_result_comes_back() -> None:
    async def main() -> str:
        signal = clock.Signal()
        asyncio.get_running_loop().call_later(0.001, signal.fire)
        before_s = clock.now()
        await signal.wait("a timer")
        return "later" if clock.now() > before_s else "never"

    assert clock.run(main(), virtual=False) == "later"


@pytest.mark.parametrize("virtual", [True, False])
def test_the_end_of_tasks_is_waited_for_however_often_the_waiting_is_cancelled(virtual: bool) -> None:
    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(0.05))
        waiting = asyncio.create_task(clock.ended(task))
        for _ in range(3):
            await asyncio.sleep(0.01)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert task.done() and not task.cancelled()

    clock.run(main(), virtual=virtual)
