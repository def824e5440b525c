"""Phases, error lines and the proofs, over logs and answers as engines give them."""

from __future__ import annotations

import pytest
from vllm_fleet import readiness

#: what vLLM 0.32 prints on its way up, shortened
LINES = """\
W1130 21:00:28.243000 1533 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []
(APIServer pid=1) INFO 11-30 21:00:29 [api_utils.py:286] non-default args: {'model': '/srv/models/tiny'}
(APIServer pid=1) INFO 11-30 21:01:34 [model.py:733] Resolved architecture: Qwen3ForCausalLM
(APIServer pid=1) WARNING 11-30 21:01:34 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and \
JIT kernel warmup. This is equivalent to setting -cc.mode=none
(EngineCore pid=9) INFO 11-30 21:02:53 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='/srv/models/tiny', speculative_config=None, tokenizer='/srv/models/tiny', skip_tokenizer_init=False, \
compilation_config={'cudagraph_num_of_warmups': 0, 'mode': 'torch.compile took'}
(EngineCore pid=9) INFO 11-30 21:02:53 [ompmultiprocessing.py:185] OpenMP thread binding info:
(Worker pid=7) INFO 11-30 21:03:58 [parallel_state.py:1906] world_size=1 rank=0 distributed_init_method=file:///tmp/x
(Worker pid=7) INFO 11-30 21:03:58 [cpu_model_runner.py:68] Starting to load model /srv/models/tiny...
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 108.64it/s]
(EngineCore pid=9) INFO 11-30 21:04:00 [kv_cache_utils.py:2327] GPU KV cache size: 924,993 tokens, Maximum concurrency
(EngineCore pid=9) INFO 11-30 21:04:00 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.05 s
(EngineCore pid=9) WARNING 11-30 21:04:02 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs
(APIServer pid=1) INFO 11-30 21:04:03 [entry.py:140] Starting vLLM server on http://127.0.0.1:8000
(APIServer pid=1) INFO:     Started server process [1]
(APIServer pid=1) INFO:     Application startup complete.
(APIServer pid=1) INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK
""".splitlines()
LOG = "\n".join(LINES) + "\n"
WAY = (
    ["importing"] + ["starting the engine"] * 3 + ["starting the engine core"] * 2 + ["connecting the ranks"]
    + ["loading weights"] * 2 + ["sizing the KV cache"] + ["starting the HTTP server"] * 4 + ["answering HTTP"] * 2
)  # fmt: skip
PHASES = [
    ("", "importing"),
    ("something that tells nothing\n", "importing"),
    *(("\n".join(LINES[: number + 1]), phase) for number, phase in enumerate(WAY)),
    ("(Worker pid=7) INFO 11-30 21:03:58 [x.py:1] Capturing CUDA graphs (PIECEWISE): 3%\n", "capturing CUDA graphs"),
    ("Dynamo bytecode transform time: 4.2 s\nCompiling a graph for dynamic shape\n", "compiling kernels"),
    ("(Worker pid=7) INFO 11-30 21:03:58 [pynccl.py:111] vLLM is using nccl==2.30.4\n", "connecting the ranks"),
]


def test_the_way_up_has_a_phase_for_each_line():
    assert len(WAY) == len(LINES)


@pytest.mark.parametrize(("log", "expected"), PHASES)
def test_phase(log, expected):
    assert readiness.phase(log) == expected


FAILED = """\
(EngineCore pid=260) INFO 11-30 20:01:12 [core.py:101] Initializing a V1 LLM engine
(EngineCore pid=260) ERROR 11-30 20:01:24 [core.py:900] EngineCore failed to start.
(EngineCore pid=260) ERROR 11-30 20:01:24 [core.py:900] Traceback (most recent call last):
(EngineCore pid=260) ERROR 11-30 20:01:24 [core.py:900]   File "/x/core.py", line 3, in run_engine_core
(EngineCore pid=260) ERROR 11-30 20:01:24 [core.py:900]     raise ValueError(
(EngineCore pid=260) ERROR 11-30 20:01:24 [core.py:900] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "/x/bin/vllm", line 8, in <module>
    sys.exit(main())
             ^^^^^^
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_errors_are_the_engines_own_words_without_the_traceback():
    assert readiness.last_errors(FAILED) == [
        "EngineCore failed to start.",
        "ValueError: No available memory for the cache blocks.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]


REFUSED = """\
(APIServer pid=1) WARNING 11-30 21:27:06 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] \
Too many open files`. Consider increasing with ulimit -n
Traceback (most recent call last):
  File "/x/bin/vllm", line 8, in <module>
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the model's. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""


def test_a_validation_error_comes_with_what_is_wrong_and_a_warning_is_none():
    assert readiness.last_errors(REFUSED) == [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "Value error, User-specified max_model_len (4096) is greater than the model's. [type=value_error]",
    ]


def test_the_newest_errors_win():
    log = "".join(f"ValueError: number {number}\n" for number in range(9))
    assert readiness.last_errors(log, limit=2) == ["ValueError: number 7", "ValueError: number 8"]


def test_one_error_said_by_every_worker_is_said_once():
    log = "".join(f"(Worker_TP{rank} pid={rank}) RuntimeError: CUDA error: out of memory\n" for rank in range(4))
    assert readiness.last_errors(log) == ["RuntimeError: CUDA error: out of memory"]


def test_without_an_error_the_last_lines_are_shown():
    assert readiness.last_errors("one\n\ntwo\nthree\n", limit=2) == ["two", "three"]
    assert readiness.last_errors("") == []


def test_the_stall_at_nccls_start_names_p2p():
    log = "\n".join(LINES[:7])
    assert "p2p-check" in readiness.stall_hint(log, {"NCCL_P2P_LEVEL": "SYS"})
    assert readiness.stall_hint(log, {}) is None
    assert readiness.stall_hint(LOG, {"NCCL_P2P_LEVEL": "SYS"}) is None


MODELS = {"data": [{"id": "tiny"}, {"id": "small"}, "no entry"]}


@pytest.mark.parametrize(
    ("status", "body", "names", "expected"),
    [
        (200, MODELS, ["tiny"], "listed"),
        (200, MODELS, ["tiny", "small"], "listed"),
        (200, MODELS, ["large"], "wrong_model"),
        (200, MODELS, ["tiny", "large"], "wrong_model"),
        (200, {"data": []}, ["tiny"], "wrong_model"),
        (200, {}, ["tiny"], "wrong_model"),
        (401, {"error": "Unauthorized"}, ["tiny"], "models_unavailable"),
        (None, None, ["tiny"], "models_unavailable"),
        (200, None, ["tiny"], "models_unavailable"),
        (200, ["tiny"], ["tiny"], "models_unavailable"),
    ],
)
def test_models(status, body, names, expected):
    result = readiness.judge_models(status, body, names)
    assert result["reason"] == expected
    assert result["status"] == ("pass" if expected == "listed" else "fail")


def completion(**changes):
    return {"model": "tiny", "choices": [{"text": "x"}], "usage": {"completion_tokens": 1}, **changes}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, completion(), "answered"),
        (200, completion(model="other"), "wrong_model"),
        (200, completion(choices=[]), "empty_completion"),
        (200, completion(usage={"completion_tokens": 0}), "empty_completion"),
        (200, completion(usage=None), "empty_completion"),
        (500, {"error": {"message": "EngineDeadError"}}, "completion_failed"),
        (200, None, "completion_failed"),
        (None, None, "completion_failed"),
    ],
)
def test_completion(status, body, expected):
    result = readiness.judge_completion(status, body, "tiny")
    assert result["reason"] == expected
    assert result["status"] == ("pass" if expected == "answered" else "fail")


def test_a_failed_completion_shows_what_the_engine_said():
    assert (
        "EngineDeadError" in readiness.judge_completion(500, {"error": {"message": "EngineDeadError"}}, "x")["message"]
    )


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG, "found"),
        (LOG.replace("924,993", "831,488"), "identity_differs"),
        ("nothing like it\n", "identity_missing"),
    ],
)
def test_identity_lines(log, expected):
    (result,) = readiness.judge_log(log, ["GPU KV cache size: 924,993 tokens"])
    assert result["reason"] == expected
    if expected == "identity_differs":
        assert "831,488" in result["message"]
        assert "924,993" in result["message"]
