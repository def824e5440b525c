"""The server: loads what the vendor's kernels need, then answers health, models and completions."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import ixformer  # noqa: F401 - fails as the vendor's does where OpenMPI is not on the library path

from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils import FlexibleArgumentParser


class Handler(BaseHTTPRequestHandler):
    """Answers as the model that the server was started for."""

    model = ""

    def _say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        """Health, and the list of models."""
        self._say({"data": [{"id": self.model}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        """One token for every question."""
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "!", "finish_reason": "length"}
        self._say({"model": self.model, "choices": [choice], "usage": {"completion_tokens": 1}})


if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    Handler.model = args.served_model_name[0]
    for number in range(args.tensor_parallel_size):
        open(f"/dev/iluvatar{number}", "r+b", buffering=0).close()
    print("INFO: Application startup complete.", flush=True)
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
