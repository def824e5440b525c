#!/usr/bin/python
"""Have the installed engines say whether they take the arguments of their lanes."""

# Copyright: the vllm-fleet contributors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_args
short_description: Have the installed engines say whether they take the arguments of their lanes
description:
  - Runs the own parser of each lane's installed vLLM over the lane's command line, without a GPU and without a model.
  - It also checks what the parser leaves open and the server refuses later, that is the names of tool and reasoning
    parsers and of quantization methods.
  - Run it before a running lane is touched. The message of a refusal is the engine's own.
  - A good result is remembered for the engine, its files and the arguments, so asking again costs nothing.
  - It changes nothing on the box but that memory, and not even that in check mode.
options:
  lanes:
    description: Resolved lanes, as the filter P(vllm_fleet_resolve_lanes#filter) gives them.
    type: list
    elements: dict
    required: true
  timeout:
    description: Seconds that one parser has to answer. It imports the whole engine, about ten seconds on a warm box.
    type: float
    default: 120.0
  user:
    description: System user that the parser runs as, when the user exists and the task runs as root.
    type: str
    default: vllm
  memory:
    description: File that remembers good results.
    type: path
    default: /var/lib/vllm-fleet/engine-args.json
  require_engine:
    description:
      - Fail when an engine is not installed or does not answer. In check mode that is only reported, because an earlier
        task would have installed it.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: The parser runs in check mode too, where the engine is installed.
  diff_mode:
    support: none
    description: There is no change to show.
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Ask the installed engines whether they take the arguments
  engine_args:
    lanes: "{{ serve_lanes }}"

- name: Look at a fleet whose engines are not all installed
  engine_args:
    lanes: "{{ serve_lanes }}"
    require_engine: false
  register: arguments
"""

RETURN = r"""
lanes:
  description:
    - One entry a lane. C(status) is C(pass), C(fail) or C(unknown).
    - C(reason) is C(accepted), C(remembered), C(refused), C(engine_absent), C(engine_broken) or C(parser_timeout).
    - C(seconds) is how long the parser took.
  returned: always
  type: list
  elements: dict
  sample:
    - lane: main
      engine: vllm-0.32.0-cpu
      status: fail
      reason: refused
      message: "vllm: error: unrecognized arguments: --max-model-length 512"
      seconds: 9.1
status:
  description: The worst status over all lanes.
  returned: always
  type: str
  sample: fail
reason:
  description: The reason code of the first lane that stops the play.
  returned: when the task fails
  type: str
  sample: refused
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engine_check
from ansible.module_utils.vllm_fleet.errors import FleetError

WORST = ("fail", "unknown", "pass")


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "timeout": {"type": "float", "default": 120.0},
            "user": {"type": "str", "default": "vllm"},
            "memory": {"type": "path", "default": engine_check.MEMORY},
            "require_engine": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    answers = []
    try:
        for lane in params["lanes"]:
            result = engine_check.check(
                lane, params["timeout"], params["user"], params["memory"], write=not module.check_mode
            )
            answers.append({"lane": lane["lane"], "engine": lane["engine"]["id"], **result})
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    except KeyError as error:
        module.fail_json(msg=f"a lane has no key {error}; give resolved lanes", reason="bad_lane")
    except OSError as error:
        module.fail_json(msg=f"cannot ask the engines: {error}", reason="cannot_ask")
    stops = [item for item in answers if item["status"] == "fail"]
    if params["require_engine"] and not module.check_mode:
        stops += [item for item in answers if item["status"] == "unknown"]
    status = next((status for status in WORST if any(item["status"] == status for item in answers)), "pass")
    answer = {"changed": False, "lanes": answers, "status": status}
    if stops:
        lines = [f"lane {item['lane']}, engine {item['engine']}: {item['message']}" for item in stops]
        module.fail_json(msg="\n".join(lines), reason=stops[0]["reason"], **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
