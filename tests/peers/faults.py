"""What happens to the nodes of a cluster and to their links, and what must hold meanwhile and afterwards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.peers.hosts import Cluster

__all__ = ["FAULTS", "Fault", "schedule", "suffer"]


class Fault(NamedTuple):
    """What happens to a node, and how it ends. ``away``: others cannot reach it meanwhile."""

    begin: Callable[[Cluster, str], None]
    end: Callable[[Cluster, str], None] = lambda cluster, name: cluster.network.mend(name)
    away: bool = True


FAULTS = {
    "killed": Fault(lambda c, name: c.members[name].kill(), lambda c, name: c.members[name].start()),
    "stopped": Fault(lambda c, name: c.members[name].pause(), lambda c, name: c.members[name].resume()),
    "partitioned": Fault(lambda c, name: c.network.lose(name)),
    "unplugged": Fault(lambda c, name: c.network.unplug(name)),
    "slow": Fault(lambda c, name: c.network.slow(name, "8mbit"), away=False),
    "restarted": Fault(lambda c, name: c.members[name].stop(), lambda c, name: c.members[name].start()),
}


def suffer(cluster: Cluster, what: str, victim: str) -> None:
    """A fault of one node under load: what must hold meanwhile, and afterwards."""
    fault = FAULTS[what]
    one, other = (name for name in cluster.members if name != victim)
    alone = cluster.computed(victim)
    shared = cluster.computed(victim)
    cluster.until_hit(one, shared)
    ours = cluster.computed(one)
    with cluster.load(seed=list(FAULTS).index(what)) as load:
        load.goes_on(*cluster.members)
        fault.begin(cluster, victim)
        if fault.away:
            assert cluster.ask(other, alone) == 0, "nobody else has it"
        cluster.until_hit(other, ours)
        cluster.until_hit(other, shared)
        load.goes_on(one, other)
        if cluster.members[victim].running:
            cluster.until_hit(victim, alone)
            load.goes_on(victim)
        fault.end(cluster, victim)
        for name in (one, other):
            cluster.until_hit(name, alone)
        cluster.until_hit(victim, ours)
        load.goes_on(*cluster.members)


def schedule(cluster: Cluster, random: Random, seconds: float) -> None:
    """Faults of all nodes and links, several at a time, for so long; and again and again a moment of peace, in which
    everything must recover."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with cluster.load(random.randrange(1 << 30)) as load:
            load.goes_on(*cluster.members)
            for _ in range(random.randrange(1, 6)):
                disturb(cluster, random)
                wait(cluster, random.uniform(0.1, 2.5))
                if random.random() < 0.5:
                    cluster.mend()
            cluster.mend()
            for one, other in itertools.permutations(cluster.members, 2):
                cluster.until_read(other, one)
            load.goes_on(*cluster.members)
        cluster.check_nothing_left()


def disturb(cluster: Cluster, random: Random) -> None:
    """Begin a fault of one node, which may have others already, or of two."""
    name = random.choice([*cluster.members])
    member = cluster.members[name]
    what = random.choice(["kill", "stop", "lose", "unplug", "slow", "divide", "restart", "again"])
    if what == "lose":
        cluster.network.lose(name)
    elif what == "unplug":
        cluster.network.unplug(name)
    elif what == "slow":
        cluster.network.slow(name, random.choice(["1mbit", "8mbit", "40mbit"]))
    elif what == "divide":
        cluster.network.divide(*random.sample([*cluster.members], 2))
    elif not member.running:
        return
    elif what == "kill":
        member.kill()
    elif what == "stop":
        member.pause()
    elif what == "restart":
        member.stop()
        member.start()
    else:
        member.kill()
        member.start()


def wait(cluster: Cluster, seconds: float) -> None:
    """Let the faults last, and see that the budgets hold meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cluster.check_budgets()
        time.sleep(0.1)
