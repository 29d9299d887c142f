"""The watch of the rounds, with a clock of its own; over real links in the tests of the driver."""

from cluster.router.driver import RoundWatch


class Rounds:
    num_steps = 0
    step_limit_s = 0.0
    has_work = True


class Watched:
    def __init__(self) -> None:
        self.now = 100.0
        self.rounds = Rounds()
        self.watch = RoundWatch(self.rounds, grace_s=5.0, period_s=1.0, clock=lambda: self.now)
        self.watch.close()  # the test looks instead
        self.watch.look()

    def look(self, times: int, apart_s: float = 1.0) -> float:
        for _ in range(times):
            self.now += apart_s
            self.watch.look()
        return self.watch.stalled_s


def test_work_without_a_step_is_a_stall_and_a_step_ends_it():
    one = Watched()
    assert one.look(5) == 0.0
    assert one.look(1) == 6.0
    one.rounds.num_steps += 1
    assert one.look(1) == 0.0
    assert one.look(6) == 6.0


def test_there_is_nothing_to_stall_without_work():
    one = Watched()
    one.rounds.has_work = False
    assert one.look(50) == 0.0
    one.rounds.has_work = True
    assert one.look(5) == 0.0


def test_a_step_has_the_time_that_it_may_take():
    one = Watched()
    one.rounds.step_limit_s = 20.0
    assert one.look(25) == 0.0
    assert one.look(1) == 26.0


def test_a_process_that_did_not_run_has_not_stalled():
    one = Watched()
    assert one.look(1, apart_s=3600.0) == 0.0
    assert one.look(4) > 0.0
