"""Begin and end of a strategy on real peers: joining, leaving, errors, signals, second fits."""

from __future__ import annotations

import glob
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.swarm_helpers import Child, call
from tests.integration.toy import (
    ALONE,
    FAST,
    LOOPBACK,
    NOTHING,
    Regression,
    Together,
    UntilRound,
    address_in,
    flat,
    left_behind,
    loader,
    meet_at,
    share_address,
    stay_in_rounds,
)
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]


def in_session(pid: int) -> list[psutil.Process]:
    """Return the living processes of the session that ``pid`` leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def wait_until_gone(pid: int, timeout: float = 10.0) -> list[str]:
    deadline = time.monotonic() + timeout
    while (living := in_session(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{process.pid} {process.name()}" for process in living]


# -- errors ----------------------------------------------------------------------------------------


def failing_fits() -> dict[str, Any]:
    from rayhive import HivemindStrategy
    from rayhive.errors import PeerError
    from rayhive.strategy.strategy import StrategyError

    class Failing(Regression):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ZeroDivisionError

    def no_averager(**_: Any) -> Any:
        raise ArithmeticError("no averager")

    before = signal.getsignal(signal.SIGINT)
    try:
        make_trainer(HivemindStrategy(**ALONE)).fit(Failing(), loader())
    except ZeroDivisionError:
        result: dict[str, Any] = {"raised": True}
    result["handler kept"] = signal.getsignal(signal.SIGINT) is before
    result["after an error"] = left_behind()

    try:
        strategy = HivemindStrategy(**ALONE, grad_averager_factory=no_averager)
        make_trainer(strategy).fit(Regression(), loader())
    except ArithmeticError:
        result["half built"] = left_behind()

    dead = "/ip4/127.0.0.1/tcp/1/p2p/QmV2hXDUSpqX9QSoTbhZLpxmy5FGmUtzHE3shSQHMvCW7G"
    try:
        HivemindStrategy(**ALONE, initial_peers=dead)
    except PeerError as error:
        result["dead peer"] = dead in str(error)
    try:
        HivemindStrategy(**ALONE, initial_peers=f"{dead},nonsense")
    except StrategyError as error:
        result["nonsense"] = [(p.key, p.value) for p in error.problems]
    result["after joining failed"] = left_behind()

    unused = HivemindStrategy(**ALONE)
    assert unused.dht.is_alive()
    del unused
    result["never used"] = left_behind()
    return result


def test_errors_leave_nothing_behind() -> None:
    result = call(failing_fits).result()
    assert result == {
        "raised": True,
        "handler kept": True,
        "after an error": NOTHING,
        "half built": NOTHING,
        "dead peer": True,
        "nonsense": [["initial_peers", "nonsense"]],
        "after joining failed": NOTHING,
        "never used": NOTHING,
    }


# -- signals ---------------------------------------------------------------------------------------


def train_for_ever(delays: dict[str, Any]) -> None:
    from rayhive import HivemindStrategy

    # Lightning takes SIGTERM only from the default, which a measuring of coverage is not
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    class Announced(UntilRound):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == 6:
                print("TRAINING", flush=True)

    strategy = HivemindStrategy(**{**ALONE, **delays})
    make_trainer(strategy, Announced(10**6, pace_s=0.01)).fit(Regression(), loader())


def _training(delays: dict[str, Any]) -> tuple[Child, list[psutil.Process]]:
    child = call(train_for_ever, delays=delays)
    child.wait_for_line("TRAINING")
    processes = in_session(child.pid)
    assert {"p2pd"} < {process.name() for process in processes}
    return child, processes


@pytest.mark.parametrize("delays", [{}, {"delay_state_averaging": True}])
def test_an_interrupt_from_the_terminal_ends_everything(delays: dict[str, Any]) -> None:
    child, _ = _training(delays)
    child.signal(signal.SIGINT, group=True)  # as a terminal does
    assert child.exit_code(20) == 1  # Lightning's, for an interrupt
    assert wait_until_gone(child.pid) == []
    assert glob.glob(f"/tmp/hivemind-{child.pid}-*") == []
    assert "Detected KeyboardInterrupt" in child.log()


def test_a_polite_end_ends_everything() -> None:
    child, _ = _training({"delay_state_averaging": True, "delay_grad_averaging": True})
    child.signal(signal.SIGTERM)
    assert child.exit_code(20) is not None
    assert wait_until_gone(child.pid) == []
    assert glob.glob(f"/tmp/hivemind-{child.pid}-*") == []


def test_a_killed_trainer_takes_everything_with_it() -> None:
    child, processes = _training({})
    child.signal(signal.SIGKILL)
    assert child.exit_code(10) == -signal.SIGKILL
    assert wait_until_gone(child.pid, 5.0) == []
    assert [p.pid for p in processes if p.is_running() and p.status() != "zombie"] == []
    assert glob.glob(f"/dev/shm/torch_{child.pid}_*") == []
    for path in glob.glob(f"/tmp/hivemind-{child.pid}-*"):  # no process is left to remove these
        os.unlink(path)


# -- fits one after the other ----------------------------------------------------------------------


def several_tasks() -> dict[str, Any]:
    import hivemind

    from rayhive import HivemindStrategy

    class Evaluated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", super().training_step(batch, batch_idx))

    strategy, module = HivemindStrategy(**ALONE), Evaluated()
    result: dict[str, Any] = {"rounds": [], "wrapped": [], "moved": []}
    first_dht = strategy.dht
    make_trainer(strategy).validate(module, loader(samples=16), verbose=False)
    result["kept by validate"] = strategy.dht is first_dht and first_dht.is_alive()
    for _ in range(2):
        before = flat(module)
        trainer = make_trainer(strategy, UntilRound(3))
        trainer.fit(module, loader())
        result["rounds"].append(strategy.optimizer.local_epoch)
        result["wrapped"].append(isinstance(trainer.optimizers[0], hivemind.Optimizer))
        result["moved"].append(flat(module) != before)
        result["peers"] = strategy.num_peers
        trainer.save_checkpoint("after.ckpt")
        make_trainer(strategy).validate(module, loader(samples=16), verbose=False)
        assert not strategy.dht.is_alive()
    result["left_behind"] = left_behind()
    return result


def test_one_strategy_serves_several_tasks() -> None:
    assert call(several_tasks).result() == {
        "kept by validate": True,
        "rounds": [3, 3],
        "wrapped": [True, True],
        "moved": [True, True],
        "peers": 1,
        "left_behind": NOTHING,
    }


def fit_on_a_given_dht() -> dict[str, Any]:
    import hivemind

    from rayhive import HivemindStrategy
    from rayhive.strategy.strategy import StrategyError

    dht = hivemind.DHT(start=True, host_maddrs=LOOPBACK)
    settings = {**FAST, "target_batch_size": 64, "dht": dht}
    strategy = HivemindStrategy(**settings)
    make_trainer(strategy, UntilRound(2)).fit(Regression(), loader())
    result = {"same": strategy.dht is dht, "alive": dht.is_alive()}
    dht.shutdown()
    try:
        HivemindStrategy(**settings)
    except StrategyError as error:
        result["ended"] = "dht" in str(error)
    return result


def test_a_given_dht_is_left_to_its_owner() -> None:
    assert call(fit_on_a_given_dht).result() == {"same": True, "alive": True, "ended": True}


def fit_by_name() -> dict[str, Any]:
    import sys

    import rayhive

    assert "hivemind" not in sys.modules
    trainer = make_trainer("hivemind", UntilRound(1), max_steps=3)
    trainer.fit(Regression(), loader(batch_size=4096))
    settings = trainer.strategy.settings.optimizer
    return {
        "class": type(trainer.strategy)
        is rayhive.HivemindStrategy
        is rayhive.CollaborativeStrategy,
        "target": settings["target_batch_size"],
        "round": trainer.optimizers[0].local_epoch,
    }


def test_a_trainer_finds_the_strategy_by_name() -> None:
    assert call(fit_by_name).result() == {"class": True, "target": 8192, "round": 1}


# -- further ---------------------------------------------------------------------------------------


def first_of_two(folder: str) -> dict[str, Any]:
    """Fits twice while the second peer trains on, and meets it again."""
    from rayhive import HivemindStrategy

    stay_in_rounds()
    strategy = HivemindStrategy(**ALONE)
    result: dict[str, Any] = {"zero": strategy.is_global_zero, "peers": []}
    for number in range(2):
        callback = Together(f"{folder}/{number}", 0, rounds=3 * (number + 1))
        make_trainer(strategy, callback).fit(Regression(seed=number), loader())
        result["peers"].append(callback.most_peers)
    result["round"] = strategy.optimizer.local_epoch
    return result


def second_of_two(folder: str) -> dict[str, Any]:
    from rayhive import HivemindStrategy

    stay_in_rounds()

    class Twice(Together):
        """Meets the first peer in each of its fits."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if self.seen >= 3 and self.folder.name == "0":
                trainer.should_stop = False
                self.meet("end")
                self.folder = self.folder.parent / "1"
                trainer.optimizers[0].begin_batch()  # it stepped out while it waited here
                self.at_start(trainer)

    strategy = HivemindStrategy(**ALONE)
    callback = Twice(f"{folder}/0", 1, rounds=6)
    make_trainer(strategy, callback).fit(Regression(seed=9), loader(seed=1))
    return {"zero": strategy.is_global_zero, "round": strategy.optimizer.local_epoch}


def test_the_first_peer_finds_its_swarm_again_in_a_second_fit(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    first = call(first_of_two, folder=str(tmp_path))
    ((variable, addresses),) = first.invitation().items()
    second = call(second_of_two, env={f"PL_{variable}": addresses}, folder=str(tmp_path))
    results = [first.result(), second.result()]
    assert results[0] == {"zero": True, "peers": [2, 2], "round": 6}
    assert results[1] == {"zero": False, "round": 6}


def one_that_starts_when_it_may(folder: str, peer: int) -> dict[str, Any]:
    """Train one round from parameters of one's own; the first peer is ready after the second."""
    from rayhive import HivemindStrategy

    stay_in_rounds()
    place = Path(folder)
    known = {} if peer == 0 else {"initial_peers": address_in(place)}
    strategy = HivemindStrategy(**ALONE, **known)
    if peer == 0:
        share_address(strategy, place)
        meet_at(place, "shares", 0, 2)
    module = Regression(seed=peer)
    own, began = flat(module), list[list[float]]()

    class Starting(Together):
        """Tells that this peer shares its state, and keeps the parameters of its start."""

        def at_start(self, trainer: Any) -> None:
            (place / f"shares-{peer}").touch()
            began.append(flat(module))
            super().at_start(trainer)

    make_trainer(strategy, Starting(folder, peer, rounds=1)).fit(module, loader(seed=peer))
    return {"own": own, "began": began[0]}


def test_the_first_peer_takes_the_parameters_of_one_that_is_ready_sooner(tmp_path: Path) -> None:
    children = [call(one_that_starts_when_it_may, folder=str(tmp_path), peer=p) for p in (0, 1)]
    first, second = (child.result() for child in children)
    assert second["began"] == second["own"] != first["own"]
    assert first["began"] == second["own"]
