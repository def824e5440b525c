"""GPU topology of a lane: which GPUs, in which order, over which links, with which environment.

``inputs`` checks facts and policy, ``lane`` picks the GPUs, ``links`` classes the pairs, ``search`` finds the order,
``environment``, ``binding`` and ``warn`` say what follows from it, ``decision`` puts it together; ``picture`` draws it.
"""

from .decision import decide
from .inputs import POLICY_DEFAULTS, validate_facts, validate_policy

__all__ = ["POLICY_DEFAULTS", "decide", "validate_facts", "validate_policy"]
