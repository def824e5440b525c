"""The tool parsers of stock 0.6.3, and the one that images for Qwen3 add."""


class ToolParserManager:
    """The register of the tool parsers."""

    tool_parsers = dict.fromkeys(("hermes", "internlm", "llama3_json", "mistral", "qwen3_coder"))
