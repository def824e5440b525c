"""The options of 0.6.3 that the platform's file uses, and --reasoning-parser where the image adds it."""

from pathlib import Path

#: an image without this file is stock 0.6.3
ADDS_REASONING = Path(__file__).with_name("adds-reasoning-parser")
VALUES = {
    str: (
        "--host", "--model", "--tool-call-parser", "--tool-parser-plugin", "--quantization", "--preemption-mode",
    ),
    int: (
        "--port", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--max-seq-len-to-capture",
        "--num-scheduler-steps",
    ),
    float: ("--gpu-memory-utilization",),
}  # fmt: skip
SWITCHES = (
    "--trust-remote-code", "--disable-log-requests", "--disable-frontend-multiprocessing", "--enable-chunked-prefill",
    "--enable-auto-tool-choice", "--enable-prefix-caching", "--disable-custom-all-reduce",
)  # fmt: skip


def make_arg_parser(parser):
    """Add the options."""
    for kind, names in VALUES.items():
        for name in names:
            parser.add_argument(name, type=kind)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    if ADDS_REASONING.exists():
        parser.add_argument("--reasoning-parser")
    return parser


def validate_parsed_serve_args(args):
    """Check what the parser cannot."""
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
