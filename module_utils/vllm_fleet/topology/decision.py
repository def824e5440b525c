"""The topology decision: facts and policy in, which GPUs in which order with which environment out. Pure."""

from __future__ import annotations

from ..errors import RefusedError
from . import environment as env
from .binding import bind
from .inputs import validate_facts, validate_policy
from .lane import describe, pick
from .links import Links, all_pairs, group_pairs, pipeline_edges
from .search import Search
from .warn import hardware, ordered

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

    from .lane import Gpu, Lane
    from .search import Score


def decide(facts: Dict[str, Any], policy: Dict[str, Any]) -> Dict[str, Any]:
    """Return the decision (schema 1) for topology facts (schema 1) and a policy.

    A refusal is a decision too (``status: refused``); the reason codes are listed in ``docs/topology.md``.

    :raises UsageError: for facts or a policy of the wrong shape.
    """
    box = validate_facts(facts)
    full = validate_policy(policy)
    links = Links(box, full["p2p"])
    try:
        return _decide(box, full, links)
    except RefusedError as refusal:
        return _refused(refusal, hardware(box, links, box["gpus"] or []))


def _decide(facts: Dict[str, Any], policy: Dict[str, Any], links: Links) -> Dict[str, Any]:
    lane = pick(facts, policy)
    return _Decider(facts, policy, links, lane).decide()


def _refused(refusal: RefusedError, warnings: List[Dict[str, str]]) -> Dict[str, Any]:
    return {
        "schema": 1,
        "status": "refused",
        "reason": refusal.reason,
        "message": refusal.one_line()[len(refusal.reason) + 2 :],
        "order": [],
        "lane": [],
        "score": None,
        "input_score": None,
        "candidates": [],
        "env": {},
        "engine_args": [],
        "binding": {"skipped": "refused"},
        "warnings": ordered(warnings),
    }


class _Decider:
    """The second half: the GPUs are known, the order and the environment are not."""

    def __init__(self, facts: Dict[str, Any], policy: Dict[str, Any], links: Links, lane: Lane) -> None:
        self.facts, self.policy, self.links, self.lane = facts, policy, links, lane
        self.tensor, self.stages = policy["tensor_parallel"], policy["pipeline_parallel"]
        self.gpus = {gpu["index"]: gpu for gpu in facts["gpus"] or lane.pool}
        self.classes: Dict[Tuple[int, int], Optional[float]] = {}

    def decide(self) -> Dict[str, Any]:
        lane, policy = self.lane, self.policy
        first = lane.first()
        if policy["mode"] == "fixed":
            if lane.doubts:
                lane.warn("facts_unknown", "; ".join(lane.doubts))
            return self.fixed(first, "fixed", "the GPUs in the order that the policy gives")
        order = None if lane.doubts else self.best_order()
        if order is None:
            return self.in_doubt(first)
        if self.is_reference(order, first):
            return self.fixed(order, "reference", "exactly the reference layout, so its fixed settings apply")
        return self.selected(order, first)

    # -- the order

    def link(self, one: int, other: int) -> Optional[float]:
        key = (one, other) if one < other else (other, one)
        if key not in self.classes:
            self.classes[key] = self.links.link_class(one, other)
        return self.classes[key]

    def score(self, order: Sequence[int]) -> Optional[Score]:
        """Return the score of an order, or None when a class that it needs is unknown."""
        inside = [self.link(*pair) for pair in group_pairs(order, self.tensor)]
        edges = [self.link(*pair) for pair in pipeline_edges(order, self.tensor)]
        known = [value for value in inside if value is not None]
        known_edges = [value for value in edges if value is not None]
        if len(known) < len(inside) or len(known_edges) < len(edges):
            return None
        return min(known, default=None), sum(known), min(known_edges, default=None)

    def best_order(self) -> Optional[List[int]]:
        """Return the order of the rules, or None (and a doubt) when a needed class is unknown."""
        lane = self.lane
        pools = [lane.pool]
        if self.policy["identical"] and lane.size > 1:
            names = list(dict.fromkeys(gpu["name"] for gpu in lane.pool))
            pools = [[gpu for gpu in lane.pool if gpu["name"] == name] for name in names]
        found: List[Tuple[Tuple[float, ...], List[int]]] = []
        for pool in pools:
            for known in self.without_unknown(pool):
                result = self.search(known)
                if result is not None:
                    found.append(result)
        if not found:
            if not lane.doubts:
                lane.doubts.append("no set of GPUs whose links are all known is left")
            return None
        best_key = max(key for key, _ in found)
        best = min(order for key, order in found if key == best_key)
        if lane.given is not None:
            kept = [index for index in lane.given if index in best]
            kept_score, best_score = self.score(kept), self.score(best)
            if kept_score is not None and best_score is not None and _key(kept_score) >= _key(best_score):
                return kept
        return best

    def without_unknown(self, pool: List[Gpu]) -> List[List[Gpu]]:
        """Return the largest parts of a pool, at least a lane each, in which every link is known."""
        indices = [gpu["index"] for gpu in pool]
        unknown = {pair for pair in all_pairs(indices) if self.link(*pair) is None}
        if unknown and not self.lane.choose:
            pairs = ", ".join(f"{one}-{other}" for one, other in sorted(unknown)[:6])
            self.lane.doubts.append(f"the link of the GPU pair(s) {pairs} is unknown")
            return []
        parts: List[List[int]] = []
        seen = set()

        def split(part: Tuple[int, ...]) -> None:
            if len(part) < self.lane.size or part in seen:
                return
            seen.add(part)
            bad = [pair for pair in sorted(unknown) if pair[0] in part and pair[1] in part]
            if not bad:
                parts.append(list(part))
                return
            counts = [end for pair in bad for end in pair]
            worst = max(sorted(set(counts)), key=counts.count)
            beside = {end for pair in bad if worst in pair for end in pair} - {worst}
            split(tuple(index for index in part if index != worst))
            split(tuple(index for index in part if index not in beside))

        split(tuple(indices))
        return [[gpu for gpu in pool if gpu["index"] in part] for part in parts]

    def search(self, pool: List[Gpu]) -> Optional[Tuple[Tuple[float, ...], List[int]]]:
        """Return ``(key, order)`` of the best order out of a pool; a larger key is better."""
        indices = [gpu["index"] for gpu in pool]
        matrix = [[0.0 if one == other else (self.link(one, other) or 0.0) for other in indices] for one in indices]
        free = [_free(gpu) for gpu in pool]
        layers = None if None in free else self.policy["layer_partition"]
        search = Search(
            matrix, self.tensor, self.stages, [gpu["numa_node"] for gpu in pool], [value or 0 for value in free], layers
        )
        score = search.best()
        if score is None:
            return None
        positions, one_node = search.order()
        return (*_key(score), float(one_node)), [indices[position] for position in positions]

    # -- the answers

    def in_doubt(self, first: List[int]) -> Dict[str, Any]:
        doubts = "; ".join(self.lane.doubts)
        state = env.P2pState(self.links, first, self.tensor)
        self.refuse_links(state, first, settings_fixed=True)
        if self.policy["mode"] == "strict":
            raise RefusedError(
                "facts_unknown", doubts, "Make the facts readable, or use mode auto to run with the fixed settings."
            )
        self.lane.warn("facts_unknown", f"{doubts}; the fixed settings are used")
        return self.fixed(first, "facts_unknown", f"{doubts}; so the fixed settings are used")

    def refuse_links(self, state: env.P2pState, order: List[int], settings_fixed: bool) -> None:
        """Refuse what the P2P policy forbids for an order.

        The fixed settings turn P2P on, so a failed link of the lane refuses them under any policy.
        """
        p2p = self.policy["p2p"]
        failed = state.failed_links if settings_fixed or p2p == "required" else state.failed_groups
        if failed and (settings_fixed or p2p != "proven"):
            shown = ", ".join(f"{one}-{other}" for one, other in failed)
            raise RefusedError(
                "p2p_failed",
                f"a transfer check failed on the GPU pair(s) {shown}",
                "Repair the platform (IOMMU, ACS, BAR1, driver) and check again, or run without P2P: mode auto with"
                " p2p: proven.",
            )
        if p2p == "required" and state.unproven:
            shown = ", ".join(f"{one}-{other}" for one, other in state.unproven)
            raise RefusedError(
                "p2p_unproven",
                f"the policy requires proven P2P and it is not proven for the GPU pair(s) {shown}",
                "Run vllm-fleet p2p-check, or use p2p: proven to run without P2P until it is.",
            )

    def is_reference(self, order: List[int], first: List[int]) -> bool:
        """Return whether this is the layout that the fixed settings were made for."""
        lane, gpus = self.lane, self.facts["gpus"]
        members = [self.gpus[index] for index in order]
        pairs = all_pairs(order)
        return (
            self.policy["p2p"] == "trusted"
            and len(gpus) == lane.size > 1
            and order == first
            and lane.by_index
            and len({gpu["name"] for gpu in members}) == 1
            and members[0]["name"] is not None
            and len({gpu["numa_node"] for gpu in members}) == 1
            and members[0]["numa_node"] is not None
            and all(self.links.usable(*pair) for pair in pairs)
            and not any((self.links.pair(*pair) or {}).get("nvlink_lanes") for pair in pairs)
        )

    def fixed(self, order: List[int], reason: str, message: str) -> Dict[str, Any]:
        state = env.P2pState(self.links, order, self.tensor)
        self.refuse_links(state, order, settings_fixed=True)
        values = env.fixed_values()
        source = "fixed"
        if self.policy["mode"] != "fixed":
            values = env.with_caller(values, self.policy["caller_env"], veto=False)
            if self.lane.from_caller:
                source = "caller"
        return self.answer("fixed", reason, message, order, order, env.environment(values, self.of(order), source), [])

    def selected(self, order: List[int], first: List[int]) -> Dict[str, Any]:
        lane = self.lane
        state = env.P2pState(self.links, order, self.tensor)
        self.refuse_links(state, order, settings_fixed=False)
        if state.level == env.OFF and state.granted:
            why = "failed a check" if state.failed_links else "has no passed check"
            lane.warn(
                "p2p_unproven",
                f"the driver grants P2P, but a pair that the lane uses {why}, so P2P is off. Run vllm-fleet p2p-check",
            )
        values = env.with_caller(
            env.selected_values(state, self.policy["nccl_proto"]),
            self.policy["caller_env"],
            veto=bool(state.failed_links),
        )
        given = None if lane.given is None else [index for index in lane.given if index in order]
        kept = order == (first if given is None else given)
        source = "caller" if lane.from_caller and order == lane.given else "selector"
        if set(order) != set(first):
            reason, how = "chosen", "the best set of GPUs"
        elif kept:
            reason, how = "kept", "no other order has better links"
        else:
            reason, how = "reordered", f"better links than the order {','.join(map(str, given or first))}"
        p2p = {env.SYS: "P2P on", env.NVL: "P2P over NVLink only", env.OFF: "P2P off"}[state.level]
        message = f"GPUs {','.join(map(str, order))}: {how}; {p2p}"
        return self.answer(
            "selected",
            reason,
            message,
            order,
            first,
            env.environment(values, self.of(order), source),
            env.engine_args(state),
        )

    def warn_unlike(self, order: List[int]) -> None:
        """Warn about GPUs that were passed over because they are of another model."""
        name = self.gpus[order[0]]["name"]
        unlike = [gpu for gpu in self.lane.considered if gpu["name"] != name]
        if unlike and self.policy["identical"] and self.lane.size > 1:
            shown = "; ".join(describe(gpu) for gpu in unlike)
            self.lane.warn("unlike_gpus_skipped", f"{shown}: the lane runs on {name or 'GPUs of unknown name'}")

    def of(self, order: Sequence[int]) -> List[Gpu]:
        return [self.gpus[index] for index in order]

    def answer(
        self,
        status: str,
        reason: str,
        message: str,
        order: List[int],
        first: List[int],
        environment: Dict[str, Any],
        arguments: List[str],
    ) -> Dict[str, Any]:
        gpus = self.of(order)
        self.warn_unlike(order)
        candidates = [order]
        for other in (first, sorted(order)):
            if other not in candidates:
                candidates.append(other)
        return {
            "schema": 1,
            "status": status,
            "reason": reason,
            "message": message,
            "order": order,
            "lane": [gpu["uuid"] for gpu in gpus],
            "score": _shown(self.score(order)),
            "input_score": _shown(self.score(first)),
            "candidates": [{"order": other, "score": _shown(self.score(other))} for other in candidates],
            "env": environment,
            "engine_args": arguments,
            "binding": bind(self.facts["host"], [gpu["numa_node"] for gpu in gpus], self.policy),
            "warnings": ordered(self.lane.warnings + hardware(self.facts, self.links, gpus)),
        }


def _key(score: Score) -> Tuple[float, float, float]:
    return (score[0] or 0.0, score[1], score[2] or 0.0)


def _shown(score: Optional[Score]) -> Optional[Dict[str, Any]]:
    if score is None:
        return None
    return {"tensor_min": score[0], "tensor_sum": score[1], "pipeline_min": score[2]}


def _free(gpu: Gpu) -> Optional[int]:
    total, used = gpu["memory_total_mib"], gpu["memory_used_mib"]
    return None if total is None or used is None else max(0, total - used)
