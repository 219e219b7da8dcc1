"""Routing and retries of requests: the client's pure functions."""

from collections import Counter

from agentfactory.base.http.retries import FIRST_DELAY, LONGEST_DELAY, Retries
from agentfactory.rollout.inference.routing import REMEMBERED, Replica, Router, ServerState

A, B = "http://a", "http://b"


def send_to_replica(router: Router, chain: str, prompt: str = "", avoid: tuple[str, ...] = ()) -> Replica:
    """Send one request, which stays in flight."""
    replica = router.choose(chain, prompt or chain, avoid)
    assert replica is not None
    router.load[replica] += 1
    return replica


def send(router: Router, chain: str, prompt: str = "", avoid: tuple[str, ...] = ()) -> str:
    return send_to_replica(router, chain, prompt, avoid).url


def test_new_prompts_go_where_the_load_is_least() -> None:
    router = Router([A, B])
    assert [send(router, f"c{i}") for i in range(4)] == [A, B, A, B]
    for _ in range(2):
        router.load[Replica(B)] -= 1
    assert [send(router, f"d{i}") for i in range(2)] == [B, B]


def test_a_chain_stays_where_its_prefix_is_however_busy() -> None:
    router = Router([A, B])
    assert send(router, "chain") == A
    for _ in range(50):
        router.load[Replica(A)] += 1
    assert send(router, "chain", prompt="a longer prompt, as each turn has") == A


def test_a_group_shares_its_prompt_until_the_load_is_uneven() -> None:
    router = Router([A, B])
    assert [send(router, f"g0.{i}", "g0") for i in range(9)] == [A] * 9
    assert send(router, "g1.0", "g1") == B, "another group goes to the idle server"
    members = [send(router, f"g0.{i}", "g0") for i in range(9, 30)]
    assert B in members, "far more work at home: the prompt is computed a second time"
    assert abs(router.load[Replica(A)] - router.load[Replica(B)]) < 15


def test_a_lost_server_gets_nothing_and_comes_back_only_when_proven() -> None:
    router = Router([A, B])
    assert send(router, "chain") == A
    router.lost(A, now=5.0)
    assert router.silent_since is None, "the other one serves"
    assert send(router, "chain") == B
    router.answers(A, ServerState.UNPROVEN)
    assert router.states[A] is ServerState.UNPROVEN
    assert [send(router, f"c{i}") for i in range(4)] == [B] * 4
    router.answers(A, ServerState.SERVING)
    assert send(router, "new") == A
    assert send(router, "chain") == B, "its prefix is there now"


def test_what_failed_is_avoided_while_there_is_another() -> None:
    router = Router([A, B])
    assert send(router, "chain") == A
    assert send(router, "chain", avoid=(A,)) == B
    assert send(router, "chain", avoid=(A, B)) == B
    router.lost(B, now=0.0)
    assert send(router, "chain", avoid=(A,)) == A


def test_a_chain_stays_at_one_of_the_replicas_behind_an_address() -> None:
    router = Router([A])
    assert send_to_replica(router, "before") == Replica(A, None), "one replica: the server is not told which"
    router.has_replicas(A, 2)
    homes = {f"c{i}": send_to_replica(router, f"c{i}") for i in range(8)}
    assert Counter(homes.values()) == {Replica(A, 0): 4, Replica(A, 1): 4}
    for _ in range(20):
        router.load[homes["c0"]] += 1
    assert {chain: send_to_replica(router, chain, "a longer prompt") for chain in homes} == homes
    group = {send_to_replica(router, f"g{i}", "the same prompt") for i in range(8)}
    assert group == {homes["c1"]}, "a group shares its prompt, at the idle replica"


def test_memory_is_bounded() -> None:
    router = Router([A, B])
    for i in range(REMEMBERED + 10):
        router.choose(f"c{i}", [i])
    assert len(router._chains) == len(router._prompts) == REMEMBERED


def test_delays_double_up_to_a_longest_and_end_at_the_limit() -> None:
    retries = Retries(limit=60.0)
    now, delays = 100.0, []
    while (delay := retries.delay(now, draw=1.0)) is not None:
        delays.append(delay)
        now += delay
    assert delays[:4] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert max(delays) == LONGEST_DELAY
    assert now == 160.0, "the last try is at the limit, not before and not after"
    assert retries.failing_since == 100.0
