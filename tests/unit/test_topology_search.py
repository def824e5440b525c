"""The exact search against plain enumeration, and properties of the whole decision on random boxes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from topology_boxes import RTX, box, gpu, shape
from vllm_fleet.errors import UsageError
from vllm_fleet.runtime_env import BARE, parse, render
from vllm_fleet.topology import POLICY_DEFAULTS, decide
from vllm_fleet.topology.search import Search

CLASSES = (6.0, 5.0, 4.0, 3.0, 2.5, 2.25, 2.0, 1.0)


def score_of(matrix, order, tensor):
    """Return (smallest inside groups, sum inside groups, smallest pipeline edge), 0 where there is no pair."""
    inside = [
        matrix[one][other]
        for start in range(0, len(order), tensor)
        for one, other in itertools.combinations(order[start : start + tensor], 2)
    ]
    edges = [matrix[one][other] for one, other in zip(order, order[tensor:])]
    return min(inside, default=0), sum(inside), min(edges, default=0)


def enumerate_all(matrix, tensor, stages, nodes, free, layers):
    """Return (score, on one node, order) by trying every permutation."""
    best = None
    for order in itertools.permutations(range(len(matrix)), tensor * stages):
        on = {nodes[position] for position in order}
        one_node = len(on) == 1 and None not in on
        memory = ()
        if layers and len(set(layers)) > 1:
            poorest = [min(free[position] for position in order[s * tensor : (s + 1) * tensor]) for s in range(stages)]
            sizes = sorted(set(layers), reverse=True)[:-1]
            memory = tuple(min(f for f, layer in zip(poorest, layers) if layer == size) for size in sizes)
        key = (score_of(matrix, order, tensor), one_node, memory, [-position for position in order])
        if best is None or key > best:
            best = key
    return best[0], best[1], [-position for position in best[3]]


@st.composite
def problems(draw):
    size = draw(st.integers(1, 6))
    shapes = [(t, p) for t in range(1, 5) for p in range(1, 5) if t * p <= size]
    tensor, stages = draw(st.sampled_from(shapes))
    levels = draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=4, unique=True))
    matrix = [[0.0] * size for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        matrix[one][other] = matrix[other][one] = draw(st.sampled_from(levels))
    nodes = draw(st.lists(st.sampled_from([0, 1, None]), min_size=size, max_size=size))
    free = draw(st.lists(st.sampled_from([10, 20, 30]), min_size=size, max_size=size))
    layers = draw(st.none() | st.lists(st.sampled_from([23, 25]), min_size=stages, max_size=stages))
    return matrix, tensor, stages, nodes, free, layers


@settings(deadline=None, max_examples=250)
@given(problems())
def test_search_agrees_with_enumeration_on_score_and_order(problem):
    matrix, tensor, stages, nodes, free, layers = problem
    search = Search(matrix, tensor, stages, nodes, free, layers)
    score = search.best()
    order, one_node = search.order()
    assert (tuple(value or 0 for value in score), one_node, order) == enumerate_all(*problem)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 2), (4, 1), (2, 3), (3, 2)])
def test_search_agrees_on_a_box_of_eight(tensor, stages):
    facts = [(0, 5, 6), (1, 4, 5), (2, 3, 5), (6, 7, 6), (0, 6, 4), (1, 7, 4), (2, 5, 3)]
    matrix = [[2.0] * 8 for _ in range(8)]
    for one, other, value in facts:
        matrix[one][other] = matrix[other][one] = float(value)
    nodes = [0, 0, 1, 1, 0, 0, 1, 1]
    search = Search(matrix, tensor, stages, nodes, [0] * 8, None)
    score = search.best()
    order, one_node = search.order()
    expected = enumerate_all(matrix, tensor, stages, nodes, [0] * 8, None)
    assert (tuple(value or 0 for value in score), one_node, order) == expected


def test_a_pool_that_is_too_small_has_no_order():
    assert Search([[0.0]], 2, 1, [0], [0], None).best() is None


@pytest.mark.parametrize(("tensor", "stages", "count"), [(8, 4, 64), (8, 2, 40), (4, 16, 64), (1, 64, 64)])
def test_large_regular_boxes_are_no_problem(tensor, stages, count):
    matrix = [[5.0 if a // 8 == b // 8 else 2.0 for b in range(count)] for a in range(count)]
    search = Search(matrix, tensor, stages, [0] * count, [0] * count, None)
    assert search.best() is not None
    order, _ = search.order()
    assert len(set(order)) == tensor * stages


LINKS = st.sampled_from(["NV4", "PIX ok", "PXB CNS", "PHB ok", "PHB CNS", "NODE ok", "NODE CNS", "SYS ok", "SYS CNS"])


@st.composite
def boxes(draw, least=2, most=6):
    count = draw(st.integers(least, most))
    keys = list(itertools.combinations(range(count), 2))
    links = {key: draw(LINKS) for key in keys}
    verdict = {}
    for one, other in keys:
        status = draw(st.sampled_from([None, "pass", "pass", "inconclusive", "fail"]))
        if status:
            verdict[f"{one}-{other}"] = status
    gpus = {index: {"numa_node": draw(st.sampled_from([0, 1, None]))} for index in range(count)}
    return box(count, links=links, gpus=gpus, verdict=verdict or None, nodes=2)


@st.composite
def boxes_and_shapes(draw):
    facts = draw(boxes())
    count = len(facts["gpus"])
    tensor, stages = draw(st.sampled_from([(t, p) for t in (1, 2, 3, 4) for p in (1, 2, 3) if t * p <= count]))
    policy = shape(tensor, stages, p2p=draw(st.sampled_from(["proven", "proven", "trusted", "required"])))
    policy["lane_gpus"] = "auto"
    return facts, policy


@settings(deadline=None, max_examples=120)
@given(boxes_and_shapes(), st.randoms(use_true_random=False))
def test_the_listing_order_of_pairs_does_not_matter(case, random):
    facts, policy = case
    before = decide(facts, policy)
    pairs = list(facts["pairs"])
    random.shuffle(pairs)
    for pair in pairs:
        random.shuffle(pair["gpus"])
    assert decide({**facts, "pairs": pairs}, policy) == before


def rank(score):
    """Return a decision's score as a comparable tuple."""
    return score["tensor_min"] or 0, score["tensor_sum"], score["pipeline_min"] or 0


@settings(deadline=None, max_examples=120)
@given(boxes_and_shapes(), st.randoms(use_true_random=False))
def test_never_worse_than_the_callers_order(case, random):
    facts, policy = case
    names = [str(index) for index in range(len(facts["gpus"]))]
    random.shuffle(names)
    names = names[: policy["tensor_parallel"] * policy["pipeline_parallel"]]
    decision = decide(facts, {**policy, "gpus": names})
    assume(decision["status"] == "selected")
    given_order = [int(name) for name in names]
    assert rank(decision["score"]) >= rank(decision["input_score"])
    if rank(decision["score"]) == rank(decision["input_score"]):
        assert decision["order"] == given_order
    assert sorted(decision["order"]) == sorted(given_order)


@settings(deadline=None, max_examples=120)
@given(boxes_and_shapes(), st.randoms(use_true_random=False))
def test_a_permuted_box_gives_the_same_score(case, random):
    facts, policy = case
    policy["p2p"] = "proven"
    count = len(facts["gpus"])
    place = list(range(count))
    random.shuffle(place)
    cards = [None] * count
    for card in facts["gpus"]:
        index = place[card["index"]]
        cards[index] = {**gpu(index), "numa_node": card["numa_node"]}
    pairs = [{**pair, "gpus": [place[end] for end in pair["gpus"]]} for pair in facts["pairs"]]
    verdict = facts["p2p_verdict"]
    if verdict:
        moved = {}
        for key, status in verdict["pairs"].items():
            one, other = sorted(place[int(end)] for end in key.split("-"))
            moved[f"{one}-{other}"] = status
        verdict = {**verdict, "pairs": moved}
    permuted = {**facts, "gpus": cards, "pairs": pairs, "p2p_verdict": verdict}
    before, after = decide(facts, policy), decide(permuted, policy)
    assert before["status"] == after["status"] == "selected"
    assert before["score"] == after["score"]
    back = {new: old for old, new in enumerate(place)}
    # the permuted order, carried back, is an order of the same worth in the first box
    carried = decide(facts, {**policy, "lane_gpus": None, "gpus": [str(back[index]) for index in after["order"]]})
    assert carried["score"] == before["score"]
    assert carried["order"] == [back[index] for index in after["order"]]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0", "ok", RTX]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(value, here=()):
    """Yield the path of every value inside a JSON value."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*here, key))


def replaced(value, path, new):
    """Return a copy with the value at ``path`` replaced."""
    if not path:
        return new
    value = dict(value) if isinstance(value, dict) else list(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


FULL_POLICY = {
    **POLICY_DEFAULTS,
    "tensor_parallel": 2,
    "gpus": ["0", "1"],
    "exclude": ["2"],
    "layer_partition": [4],
    "bind": True,
    "cpus": "0-7",
    "caller_env": {"NCCL_PROTO": "LL", "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
}
SHELL = set(" '\"`$;&|<>(){}[]*?!~#\\\n\r\t\0^")


def check_outcome(facts, policy):
    """Assert that input gives a usage error or a harmless decision."""
    try:
        decision = decide(facts, policy)
    except UsageError as error:
        assert "\n" not in error.one_line()
        return
    json.dumps(decision)
    assert decision["status"] in ("selected", "fixed", "refused")
    values = [entry["value"] for entry in decision["env"].values() if entry["value"] is not None]
    # What facts may be named is a little more than what an environment file may hold.
    assert all((BARE | set(" ()")).issuperset(value) for value in values)
    if not all(BARE.issuperset(value) for value in values):
        with pytest.raises(UsageError):
            render(decision, {})
    elif decision["status"] != "refused":
        text = render(decision, {})
        assert not SHELL & set(text.replace("\n", ""))
        assert parse(text)["CUDA_VISIBLE_DEVICES"] == decision["env"]["CUDA_VISIBLE_DEVICES"]["value"]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_garbage_gives_a_usage_error_or_a_decision(data):
    facts = box(3, default="PHB ok", verdict={"0-1": "pass"})
    policy = json.loads(json.dumps(FULL_POLICY))
    for _ in range(data.draw(st.integers(1, 3))):
        facts = replaced(facts, data.draw(st.sampled_from(sorted(paths(facts), key=str))), data.draw(JSON))
        policy = replaced(policy, data.draw(st.sampled_from(sorted(paths(policy), key=str))), data.draw(JSON))
    for pair in ((facts, FULL_POLICY), (box(3), policy), (facts, policy)):
        check_outcome(*pair)


@settings(deadline=None, max_examples=60)
@given(JSON, JSON)
def test_plain_garbage(facts, policy):
    check_outcome(facts, policy)


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=12), st.sampled_from(["uuid", "bus_id", "name", "gpus", "exclude", "caller", "order"]))
def test_hostile_strings(text, where):
    facts, policy = box(2, default="PHB ok"), shape(2)
    if where in ("uuid", "bus_id", "name"):
        facts["gpus"][0][where] = text
        policy["caller_env"] = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    elif where == "caller":
        policy["caller_env"] = {"NCCL_PROTO": text, "NCCL_P2P_LEVEL": text}
    elif where == "order":
        policy["caller_env"] = {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": text}
    else:
        policy[where] = [text, "1"]
    check_outcome(facts, policy)
